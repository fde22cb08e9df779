"""Cache policy "none": every request loads its adapter."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cache.base import NOTHING


@dataclass(frozen=True)
class Nothing:
    """Even where another request is using the adapter: the baseline RROD of ROCK."""

    name = "none"
    rule = NOTHING
    high_water = 1.0
    takes_memory = True
