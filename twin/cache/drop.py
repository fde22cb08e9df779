"""Cache policy "drop": an adapter leaves with the last request that uses it."""

from __future__ import annotations

from dataclasses import dataclass

from packer.twin.cache.base import DROP


@dataclass(frozen=True)
class Drop:
    """S-LoRA's rule (arXiv 2311.03285); adapters brought by its last prefetch stay."""

    name = "drop"
    rule = DROP
    high_water = 1.0
    takes_memory = True
