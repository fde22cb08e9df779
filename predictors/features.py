"""Features of a bin: the paper's seven, what they leave out, and an equilibrium of the step law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.bin import Bin, indices
from packer.checks import SLOT_RANKS
from packer.errors import IncompatibleError
from packer.io.shipped import table
from packer.lengths import Lengths, length_moments, normal_grid
from packer.predictors.features_kernel import MAX_GROUPS, MIDDLE_GROUP, ROOM, FleetArrays, fill_all
from packer.profile import Profile
from packer.twin.law.law import coefficient_vector
from packer.twin.memory.policy import kv_cache_tokens_many
from packer.workload import Workload


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature: name, unit, its description in words, and how it changes when all rates grow by one factor.

    `trend` 1: it grows, so that starvation may only become likelier with it; -1: it falls.
    """

    name: str
    unit: str
    text: str
    trend: int = 0


FEATURES = tuple(Feature(name, *words) for name, words in table("packer.predictors", "features.toml").items())
"""In the kernel's order."""

NAMES = tuple(feature.name for feature in FEATURES)
COLUMN = {name: i for i, name in enumerate(NAMES)}
TABULATED_SLOTS = 513
_SLOT_RANK_NUMBER = np.searchsorted(SLOT_RANKS, np.arange(SLOT_RANKS[-1] + 1))


@dataclass(frozen=True, eq=False)
class BinTable:
    """Bins of one fleet and profile as arrays, for callers that evaluate thousands of times.

    `indptr`: int64 (n + 1,): bin b holds the entries indptr[b] … indptr[b + 1].
    `index`: int64 (nnz,): adapters, as indices into the workload.
    `share`: float64 (nnz,): the part of the adapter's rate that comes to this bin.
    `max_loras`, `max_lora_rank`: float64 (n,).
    """

    indptr: IntArray
    index: IntArray
    share: FloatArray
    max_loras: FloatArray
    max_lora_rank: FloatArray

    def __len__(self) -> int:
        return len(self.max_loras)

    @classmethod
    def of(cls, bins: Sequence[Bin], factors: FloatArray | float = 1.0) -> BinTable:
        """From bins of one profile, with every rate of bin k times `factors[k]`."""
        first = bins[0].profile
        if any(item.profile is not first and item.profile != first for item in bins):
            raise IncompatibleError("Expected the bins of one table to have the same profile.")
        index = [indices(item.adapters) for item in bins]
        sizes = [len(each) for each in index]
        share = np.empty(sum(sizes))
        share[:] = np.repeat(factors, sizes) if isinstance(factors, np.ndarray) else factors
        if any(item.is_split for item in bins):
            share *= np.concatenate([item.shares for item in bins], dtype=np.float64)
        return cls(
            np.array([0, *accumulate(sizes)], dtype=np.int64),
            index[0] if len(index) == 1 else np.concatenate(index),
            share,
            np.array([item.settings.max_loras for item in bins], dtype=np.float64),
            np.array([item.settings.max_lora_rank for item in bins], dtype=np.float64),
        )


@lru_cache(maxsize=64)
def _kv_tokens(profile: Profile) -> FloatArray:
    """KV capacity by slot rank and number of slots, float64 (r, TABULATED_SLOTS), tokens."""
    slots = np.arange(TABULATED_SLOTS)
    return kv_cache_tokens_many(profile, np.maximum(slots, 1)[None, :], np.array(SLOT_RANKS)[:, None])


@lru_cache(maxsize=4096)
def _product(first: Lengths, second: Lengths, correlation: float) -> float:
    """E[I·O] with this correlation of the normal scores."""
    z, weight = normal_grid(81)
    mixed = correlation * z[:, None] + np.sqrt(1.0 - correlation**2) * z[None, :]
    return float((weight * first.at_normal(z)) @ second.at_normal(mixed) @ weight)


def length_pairs(workload: Workload) -> tuple[list[tuple[Lengths, Lengths]], IntArray]:
    """The distinct lengths of prompts and outputs, and which of them each adapter has, int64 (m,)."""
    pairs: dict[tuple[Lengths, Lengths], int] = {}
    first, second = workload.input_tokens, workload.output_tokens
    own = ((each.input_tokens or first, each.output_tokens or second) for each in workload.adapters)
    kind = np.array([pairs.setdefault(pair, len(pairs)) for pair in own])
    return list(pairs), kind


def fleet_table(workload: Workload) -> FloatArray:
    """Columns of the fleet as the kernel takes them, float64 (m, 8): see `FleetArrays`."""
    pairs, kind = length_pairs(workload)
    moments = []
    for first, second in pairs:
        (i1, i2), (o1, o2) = length_moments(first), length_moments(second)
        moments.append((i1, o1, i2, o2, _product(first, second, workload.length_correlation)))
    table = np.empty((len(workload), 8))
    table[:, 0], table[:, 1] = workload.ranks, workload.rates
    table[:, 2:7] = np.array(moments)[kind]
    exponent = np.frexp(table[:, 1] * table[:, 3])[1]
    table[:, 7] = np.clip(exponent + MIDDLE_GROUP, 0, MAX_GROUPS - 1)
    return table


def engine_vector(profile: Profile) -> FloatArray:
    """Engine settings as the kernel takes them, float64 (9,)."""
    engine, loading = profile.engine, profile.loading
    return np.array(
        [
            profile.latency.graph_max_tokens,
            engine.max_num_batched_tokens,
            engine.max_num_seqs,
            engine.block_size,
            engine.max_cpu_loras if engine.max_cpu_loras is not None else 1e18,
            loading.host_base_ms,
            loading.host_per_rank_ms,
            loading.disk_base_ms,
            loading.disk_per_rank_ms,
        ]
    )


class FeatureExtractor:
    """Features of one fleet's bins on one profile; what belongs to the fleet is computed once."""

    def __init__(self, workload: Workload, profile: Profile) -> None:
        self.workload, self.profile = workload, profile
        self._kv = _kv_tokens(profile)
        self.arrays = FleetArrays(
            fleet_table(workload),
            coefficient_vector(profile.latency),
            profile.latency.form == "paper",
            engine_vector(profile),
            workload.offered_tok_s_by_adapter,
        )

    def kv_cache_tokens(self, table: BinTable) -> FloatArray:
        """KV capacity of each bin, float64 (n,), tokens."""
        try:
            return self._kv[
                _SLOT_RANK_NUMBER[table.max_lora_rank.astype(np.int64)], table.max_loras.astype(np.int64)
            ]
        except IndexError:  # more slots than are tabulated
            return kv_cache_tokens_many(self.profile, table.max_loras, table.max_lora_rank)

    def matrix(self, table: BinTable, kv_tokens: FloatArray | None = None) -> FloatArray:
        """Features, float64 (n, len(FEATURES))."""
        kv = self.kv_cache_tokens(table) if kv_tokens is None else kv_tokens
        out = np.empty((len(table), len(FEATURES)))
        fill_all(
            table.indptr, table.index, table.share, table.max_loras, table.max_lora_rank, kv, self.arrays,
            np.zeros(ROOM), out,
        )  # fmt: skip
        return out
