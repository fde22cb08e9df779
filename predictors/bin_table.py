"""Bins as arrays, because searches evaluate thousands of bins and keep few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.bin import Bin, indices, whole
from packer.checks import SLOT_RANKS, slot_rank_for
from packer.errors import IncompatibleError
from packer.profile import Profile

ones = lru_cache(maxsize=64)(lambda n: np.ones(n))
"""Shares of n adapters whose requests all come to the bin, float64 (n,); never written to."""

SLOT_RANK_FOR = np.array([slot_rank_for(rank) for rank in range(SLOT_RANKS[-1] + 1)], dtype=np.float64)
"""`slot_rank_for` by rank, float64 (r,)."""


@dataclass(frozen=True, eq=False)
class BinTable(Sequence[Bin]):
    """Bins of one fleet and profile; each bin is a slice of one list of adapters, and slices may overlap.

    `profile`: profile of all bins.
    `start`, `end`: int64 (n,): bin b holds the entries start[b] … end[b] − 1.
    `adapters`: int64 (m,): indices into the workload.
    `share`: float64 (m,): the part of the adapter's rate that comes to the bin.
    `max_loras`, `max_lora_rank`: float64 (n,).
    """

    profile: Profile
    start: IntArray
    end: IntArray
    adapters: IntArray
    share: FloatArray
    max_loras: FloatArray
    max_lora_rank: FloatArray

    def __len__(self) -> int:
        return len(self.end)

    def __getitem__(self, b: Any) -> Any:
        held, share = (each[self.start[b] : self.end[b]] for each in (self.adapters, self.share))
        shares = whole(len(held)) if (share == 1.0).all() else tuple(share.tolist())
        settings = self.profile.settings(int(self.max_loras[b]), int(self.max_lora_rank[b]))
        return Bin.unchecked(tuple(held.tolist()), settings, self.profile, shares)

    def sums(self, values: FloatArray) -> FloatArray:
        """Sums over each bin of values of adapters, by their shares, float64 (n, k); `values`: (adapters, k)."""
        until = np.cumsum(values[self.adapters] * self.share[:, None], axis=0)
        until = np.vstack([np.zeros_like(until[:1]), until])
        return until[self.end] - until[self.start]

    @classmethod
    def of(cls, bins: Sequence[Bin]) -> BinTable:
        """Make a table of bins of one profile; consecutive bins with the same tuple of adapters share a slice."""
        if isinstance(bins, BinTable):
            return bins
        profile = bins[0].profile
        for item in bins:
            if item.profile is not profile and item.profile.fingerprint != profile.fingerprint:
                raise IncompatibleError("Expected the bins of one table to have the same profile.")
        runs, ends, end = [bins[0]], [], len(bins[0].adapters)
        for item in bins:
            if item.adapters is not runs[-1].adapters or item.shares is not runs[-1].shares:
                runs.append(item)
                end += len(item.adapters)
            ends.append(end)
        index = [indices(item.adapters) for item in runs]
        split = any(item.is_split for item in runs)
        return cls(
            profile,
            np.array([last - len(item.adapters) for last, item in zip(ends, bins, strict=True)]),
            np.array(ends),
            index[0] if len(index) == 1 else np.concatenate(index),
            np.concatenate([item.shares for item in runs], dtype=np.float64) if split else ones(end),
            np.array([item.settings.max_loras for item in bins], dtype=np.float64),
            np.array([item.settings.max_lora_rank for item in bins], dtype=np.float64),
        )


def profiles_of(bins: Sequence[Bin]) -> tuple[Profile, ...]:
    """The different profiles of some bins; a table knows its own without making the bins."""
    return (bins.profile,) if isinstance(bins, BinTable) else (*dict.fromkeys(item.profile for item in bins),)
