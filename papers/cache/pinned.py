"""Cache policy "pinned": all adapters that a server may serve are on its GPU from the start."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cluster.caching import FIXED, CachePolicy


@dataclass(frozen=True)
class Pinned(CachePolicy):
    """All adapters stay on the GPU and take memory. A server whose memory they fill does not start."""

    name = "pinned"
    rule = FIXED
