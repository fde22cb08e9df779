"""Cache policy "unlimited": all adapters are on the GPU, and take no memory."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cache.base import FIXED


@dataclass(frozen=True)
class Unlimited:
    """CaraServe's upper bound "Cached" (arXiv 2401.11240, section 7.1)."""

    name = "unlimited"
    rule = FIXED
    high_water = 1.0
    takes_memory = False
