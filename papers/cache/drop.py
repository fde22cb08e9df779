"""Cache policy "drop": an adapter leaves with the last request that uses it."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cluster.caching import DROP, CachePolicy


@dataclass(frozen=True)
class Drop(CachePolicy):
    """S-LoRA's rule (arXiv 2311.03285): an adapter leaves with its last request, unless the last prefetch wants it."""

    name = "drop"
    rule = DROP
