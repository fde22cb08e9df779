"""Cache policy "lru": the least recently used idle adapter leaves."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks
from packer.twin.cluster.caching import LRU, CachePolicy


@dataclass(frozen=True)
class Lru(CachePolicy):
    """Evicts the least recently used idle adapter if memory is needed, or if more than `high_water` of it is used."""

    name = "lru"
    rule = LRU
    high_water: float = 1.0

    def __post_init__(self) -> None:
        checks.real("high_water", self.high_water, low=0.0, high=1.0, open_low=True)
