"""Cache policies that are one of the compiled rules alone."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks
from packer.twin.cluster.caching import DROP, FIXED, LFU, LRU, NOTHING, CachePolicy


@dataclass(frozen=True)
class Lru(CachePolicy):
    """The least recently used idle adapter leaves, on demand or where more than `high_water` of the memory is used."""

    name = "lru"
    rule = LRU
    high_water: float = 1.0

    def __post_init__(self) -> None:
        checks.real("high_water", self.high_water, low=0.0, high=1.0, open_low=True)


@dataclass(frozen=True)
class Lfu(Lru):
    """The idle adapter with the fewest uses on the server leaves; among equals the least recently used."""

    name = "lfu"
    rule = LFU


@dataclass(frozen=True)
class Drop(CachePolicy):
    """S-LoRA's rule (arXiv 2311.03285): an adapter leaves with the last request that uses it.

    Adapters that the last prefetch brought stay.
    """

    name = "drop"
    rule = DROP


@dataclass(frozen=True)
class Nothing(CachePolicy):
    """Every request loads its adapter, even where another one is using it: the baseline RROD of ROCK."""

    name = "none"
    rule = NOTHING


@dataclass(frozen=True)
class Pinned(CachePolicy):
    """All adapters that a server may serve are on its GPU from the start and never leave.

    A server whose memory they fill does not start.
    """

    name = "pinned"
    rule = FIXED


@dataclass(frozen=True)
class Unlimited(Pinned):
    """Like "pinned", but adapters take no memory: CaraServe's upper bound "Cached" (arXiv 2401.11240, section 7.1)."""

    name = "unlimited"
    takes_memory = False
