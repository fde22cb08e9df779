"""Cache policy "none": every request loads its adapter."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cluster.caching import NOTHING, CachePolicy


@dataclass(frozen=True)
class Nothing(CachePolicy):
    """Every request loads its adapter, even if another request is using it: ROCK's baseline RROD."""

    name = "none"
    rule = NOTHING
