"""Cache policy "pinned": all adapters that a server may serve are on its GPU from the start."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cache.base import FIXED


@dataclass(frozen=True)
class Pinned:
    """They take their memory, and never leave: a server whose memory they fill does not start."""

    name = "pinned"
    rule = FIXED
    high_water = 1.0
    takes_memory = True
