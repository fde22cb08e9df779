"""Features of a bin: the paper's seven, properties that these omit, and figures of the step law's equilibrium."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.checks import SLOT_RANKS
from packer.io.shipped import table
from packer.lengths import Lengths, length_moments, paired
from packer.predictors.bin_table import BinTable
from packer.predictors.features_kernel import ROOM, FleetArrays, fill_all
from packer.profile import Profile
from packer.twin.law.law import coefficient_vector, law_settings
from packer.twin.memory.held import held_by_adapter
from packer.twin.memory.policy import kv_cache_tokens_many
from packer.workload import Workload


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature; `trend`: 1 if it grows with all rates, so that starvation can only get likelier, -1 if it falls."""

    name: str
    unit: str
    text: str
    trend: int = 0


FEATURES = tuple(Feature(name, *words) for name, words in table("packer.predictors", "features.toml").items())
"""Features in the kernel's order."""

NAMES = tuple(feature.name for feature in FEATURES)
COLUMN = {name: i for i, name in enumerate(NAMES)}
TABULATED_SLOTS = 513
_SLOT_RANK_NUMBER = np.searchsorted(SLOT_RANKS, np.arange(SLOT_RANKS[-1] + 1))


@lru_cache(maxsize=64)
def _kv_tokens(profile: Profile) -> FloatArray:
    """KV capacity by slot rank and number of slots, float64 (r, TABULATED_SLOTS), tokens."""
    slots = np.arange(TABULATED_SLOTS)
    return kv_cache_tokens_many(profile, np.maximum(slots, 1)[None, :], np.array(SLOT_RANKS)[:, None])


@lru_cache(maxsize=4096)
def _product(first: Lengths, second: Lengths, correlation: float) -> float:
    """E[I·O] with this correlation of the normal scores."""
    prompt, output, weight = paired(first, second, correlation)
    return float((weight * prompt[:, 0]) @ output @ weight)


def length_pairs(workload: Workload) -> tuple[list[tuple[Lengths, Lengths]], IntArray]:
    """Return the distinct pairs of prompt and output lengths, and the index of each adapter's pair, int64 (m,)."""
    pairs: dict[tuple[Lengths, Lengths], int] = {}
    first, second = workload.input_tokens, workload.output_tokens
    own = ((each.input_tokens or first, each.output_tokens or second) for each in workload.adapters)
    kind = np.array([pairs.setdefault(pair, len(pairs)) for pair in own])
    return list(pairs), kind


def fleet_table(workload: Workload) -> FloatArray:
    """Return the columns of the fleet for the kernel, float64 (m, 7): see `FleetArrays`."""
    pairs, kind = length_pairs(workload)
    moments = []
    for first, second in pairs:
        (i1, i2), (o1, o2) = length_moments(first), length_moments(second)
        moments.append((i1, o1, i2, o2, _product(first, second, workload.length_correlation)))
    return np.column_stack([workload.ranks, workload.rates, np.array(moments)[kind]])


class FeatureExtractor:
    """Features of one fleet's bins on one profile; the arrays of the fleet are computed once."""

    def __init__(self, workload: Workload, profile: Profile) -> None:
        self.workload, self.profile = workload, profile
        self._kv, law, engine, load = _kv_tokens(profile), profile.latency, profile.engine, profile.loading
        limits = (engine.server_tokens, engine.server_seqs, engine.block_size, engine.max_cpu_loras or 1e18)
        load_ms = (load.host_base_ms, load.host_per_rank_ms, load.disk_base_ms, load.disk_per_rank_ms)
        self.arrays = FleetArrays(
            fleet_table(workload), coefficient_vector(law), law.form == "paper",
            np.array([*limits, *load_ms, *law_settings(profile)]), workload.offered_tok_s_by_adapter,
        )  # fmt: skip
        self._held = held_by_adapter(workload, shape) if (shape := profile.model.kv_shape) else None

    def kv_cache_tokens(self, table: BinTable) -> FloatArray:
        """KV capacity of each bin, float64 (n,), tokens of its requests; with a `KvShape`, < 0 if it does not start."""
        try:
            ranks = _SLOT_RANK_NUMBER[table.max_lora_rank.astype(np.int64)]
            tokens = self._kv[ranks, table.max_loras.astype(np.int64)]
        except IndexError:  # more slots than are tabulated
            tokens = kv_cache_tokens_many(self.profile, table.max_loras, table.max_lora_rank)
        if self._held is None:
            return tokens
        held, taken = np.maximum(table.sums(self._held), 1e-100).T  # equal without requests
        tokens = np.where(tokens < self.profile.memory.min_kv_tokens, -1.0, tokens * taken / held)
        return np.floor(tokens)

    def matrix(self, table: BinTable, factors: FloatArray | float = 1.0) -> FloatArray:
        """Features, with every rate of bin b times factors[b], float64 (n, len(FEATURES))."""
        out = np.empty((len(table), len(FEATURES)))
        fill_all(
            table.start, table.end, table.adapters, table.share, np.full(len(table), factors), table.max_loras,
            table.max_lora_rank, self.kv_cache_tokens(table), self.arrays, np.empty(ROOM), out,
        )  # fmt: skip
        return out
