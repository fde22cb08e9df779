"""How a server is started: what it takes for adapters. `Profile.settings` makes the kind that fits a profile."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks

MAX_LORAS = 100_000
"""Largest `max_loras` that is accepted."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What every kind of settings has.

    `max_loras`: adapters on the GPU at once (A_max of arXiv 2602.24044); 0: LoRA is off.
    `max_lora_rank`: largest rank that the server takes (S_max), one of vLLM's values.
    """

    max_loras: int
    max_lora_rank: int

    def __post_init__(self) -> None:
        checks.integer("max_loras", self.max_loras, low=0, high=MAX_LORAS)
        checks.slot_rank("max_lora_rank", self.max_lora_rank)


class Slots(Settings):
    """vLLM's: `max_loras` slots of `max_lora_rank` are reserved when the server starts, used or not."""

    __slots__ = ()


class Pool(Settings):
    """S-LoRA's unified pool: nothing is reserved; an adapter on the GPU takes room of the KV cache by its rank."""

    __slots__ = ()
