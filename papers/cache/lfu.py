"""Cache policy "lfu": the idle adapter with the fewest uses leaves."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cluster.caching import LFU
from packer.papers.cache.lru import Lru


@dataclass(frozen=True)
class Lfu(Lru):
    """Uses are counted per server from the start; among equals the least recently used leaves."""

    name = "lfu"
    rule = LFU
