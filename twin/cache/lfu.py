"""Cache policy "lfu": the idle adapter with the fewest uses leaves."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks
from packer.twin.cache.base import LFU


@dataclass(frozen=True)
class Lfu:
    """Uses are counted per server from the start; among equals the least recently used leaves."""

    name = "lfu"
    rule = LFU
    takes_memory = True
    high_water: float = 1.0

    def __post_init__(self) -> None:
        checks.real("high_water", self.high_water, low=0.0, high=1.0, open_low=True)
