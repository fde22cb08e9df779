"""Cache policy "none": every request loads its adapter."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cluster.caching import NOTHING, CachePolicy


@dataclass(frozen=True)
class Nothing(CachePolicy):
    """Even where another request is using the adapter: the baseline RROD of ROCK."""

    name = "none"
    rule = NOTHING
