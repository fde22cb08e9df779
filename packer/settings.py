"""LoRA settings with which a server is started."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks

MAX_LORAS = 100_000  # Largest `max_loras` that is accepted.


@dataclass(frozen=True, slots=True)
class Settings:
    """`max_loras`: largest number of adapters on the GPU at once (A_max of arXiv 2602.24044); 0: LoRA is off.
    `max_lora_rank`: largest rank that the server accepts (S_max), one of vLLM's values.

    The profile says what they take (`MemorySpec.policy`).
    """

    max_loras: int
    max_lora_rank: int

    def __post_init__(self) -> None:
        checks.integer("max_loras", self.max_loras, low=0, high=MAX_LORAS)
        checks.slot_rank("max_lora_rank", self.max_lora_rank)
