"""LoRA settings with which a server is started. `Profile.settings` makes the kind that fits a profile."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks

MAX_LORAS = 100_000
"""Largest `max_loras` that is accepted."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Fields of every kind of settings.

    `max_loras`: largest number of adapters on the GPU at once (A_max of arXiv 2602.24044); 0: LoRA is off.
    `max_lora_rank`: largest rank that the server accepts (S_max), one of vLLM's values.
    """

    max_loras: int
    max_lora_rank: int

    def __post_init__(self) -> None:
        checks.integer("max_loras", self.max_loras, low=0, high=MAX_LORAS)
        checks.slot_rank("max_lora_rank", self.max_lora_rank)


class Slots(Settings):
    """vLLM's slots: memory for `max_loras` adapters of `max_lora_rank` is reserved when the server starts."""

    __slots__ = ()


class Pool(Settings):
    """S-LoRA's unified pool: nothing is reserved; an adapter on the GPU uses KV cache in proportion to its rank."""

    __slots__ = ()
