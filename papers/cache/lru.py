"""Cache policy "lru": the least recently used idle adapter leaves."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cluster.caching import LRU, CachePolicy


@dataclass(frozen=True)
class Lru(CachePolicy):
    """Evicts the least recently used idle adapter if memory is needed, or if more than `high_water` of it is used."""

    name = "lru"
    rule = LRU
    high_water: float = 1.0
