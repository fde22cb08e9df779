"""Cache policy "lfu": the idle adapter with the fewest uses leaves."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cluster.caching import LFU
from packer.papers.cache.lru import Lru


@dataclass(frozen=True)
class Lfu(Lru):
    """Evicts the idle adapter with the fewest uses on the server since its start; among equals, by last use."""

    name = "lfu"
    rule = LFU
