"""Cache policy "unlimited": all adapters are on the GPU, and take no memory."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cluster.caching import FIXED, CachePolicy


@dataclass(frozen=True)
class Unlimited(CachePolicy):
    """All adapters stay on the GPU and take no memory: CaraServe's bound "Cached" (arXiv 2401.11240, section 7.1)."""

    name = "unlimited"
    rule = FIXED
    takes_memory = False
