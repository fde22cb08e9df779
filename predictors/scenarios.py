"""Servers of a dataset: the paper's grid, mixtures that it omits, and servers with thousands of adapters.

Every scenario is a function of (seed, index) and the profile only, so that any part of a dataset can be
built on any machine, in any order, repeatedly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from packer import checks
from packer.adapter import Adapter
from packer.arrays import FloatArray
from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.lengths import Lengths
from packer.predictors.bin_table import BinTable
from packer.predictors.features import COLUMN, FeatureExtractor
from packer.profile import Profile
from packer.settings import Settings
from packer.twin.memory.policy import memory_error
from packer.twin.memory.starts import largest_max_loras
from packer.workload import SHAREGPT_CORRELATION, SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

SIZES = (8, 16, 32)
RATES = (3.2, 1.6, 0.8, 0.4, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125)
COUNTS = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
"""The grid of arXiv 2602.24044, Appendix B: three of `SIZES`, three of `RATES`, adapters and max_loras of `COUNTS`."""

RANKS = (8, 16, 32, 64, 128)  # Ranks of adapters outside the grid.
MOST_OVERLOADED = 20.0
SHARES = {"grid": 4 / 11, "mixed": 2.5 / 11, "edge": 3.5 / 11, "large": 1 / 11}  # Shares of the families in a dataset.
LARGE = (512.0, 4096.0)  # Least and most adapters of the family `large`; other mixtures have at most the least.
FEWEST_SLOTS = 4  # Minimum slots of the family `large`, if this number fits into memory.
LEAST_RATE = 1e-7  # Smallest rate of an adapter outside the grid, req/s.
_TRIES = 200
_DIMENSIONS = 14


@dataclass(frozen=True, eq=False)
class MeasuredScenario:
    """A server with its traffic. Rows of one `group` are similar and are never on both sides of a split."""

    index: int
    family: str
    group: str
    workload: Workload
    settings: Settings

    def bin(self, profile: Profile) -> Bin:
        """The whole workload on one server."""
        return Bin(tuple(range(len(self.workload))), self.settings, profile)

    def features(self, profile: Profile) -> FloatArray:
        """Return the features of the server, float64 (F,)."""
        table = BinTable.of([self.bin(profile)])
        row: FloatArray = FeatureExtractor(self.workload, profile).matrix(table)[0]
        return row


def scenario(index: int, profile: Profile, seed: int) -> MeasuredScenario:
    """The scenario of this index, of a family drawn by `SHARES`: grid, mixed, near starvation, many adapters. Raises
    `IncompatibleError`: not even a small server starts."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, index, 0x5CE7A]))
    limits = np.cumsum([*SHARES.values()][:-1])
    family = list(SHARES)[int(np.searchsorted(limits, rng.random(), side="right"))]
    for _ in range(_TRIES):
        if family == "grid":
            found = _from_grid(index, rng, profile)
        else:
            found = _mixed(index, family, rng, profile, _space_filling(index, seed, rng))
        if found is not None and found.features(profile)[COLUMN["load_factor"]] <= MOST_OVERLOADED:
            return found
    small = _mixed(index, family, rng, profile, np.full(_DIMENSIONS, 0.1))
    if small is None:
        raise IncompatibleError(f"No server of {profile.name} starts, not even one with a few adapters.")
    return small


def _from_grid(index: int, rng: np.random.Generator, profile: Profile) -> MeasuredScenario | None:
    """Return a server of the grid; None if it does not start."""
    sizes = sorted(rng.choice(SIZES, 3).tolist())
    rates = sorted(rng.choice(len(RATES), 3).tolist())
    n, slots = (int(x) for x in rng.choice(COUNTS, 2))
    n, slots = max(n, slots), min(n, slots)
    ranks = np.resize(sizes, n)
    rng.shuffle(ranks)
    each = np.resize([RATES[k] for k in rates], n)
    rng.shuffle(each)
    jitter = np.exp(rng.normal(0.0, 0.03, 2))
    settings = profile.settings(slots, checks.slot_rank_for(int(ranks.max())))
    if memory_error(profile, settings) is not None:
        return None
    rows = enumerate(zip(ranks.tolist(), each.tolist(), strict=True))
    inputs = SHAREGPT_INPUT.scaled(SHAREGPT_INPUT.mean * jitter[0])
    outputs = SHAREGPT_OUTPUT.scaled(SHAREGPT_OUTPUT.mean * jitter[1])
    adapters = [Adapter(f"a{i}", rank, rate) for i, (rank, rate) in rows]
    workload = Workload(adapters, inputs, outputs, SHAREGPT_CORRELATION)
    group = "grid " + " ".join(map(str, rates)) + " / " + " ".join(map(str, sizes))
    return MeasuredScenario(index, "grid", group, workload, settings)


def _space_filling(index: int, seed: int, rng: np.random.Generator) -> FloatArray:
    """A point of the unit cube: a Kronecker sequence (R_d, Roberts 2018), shifted by the seed, with noise."""
    root = 2.0
    for _ in range(40):
        root = (1.0 + root) ** (1.0 / (_DIMENSIONS + 1))
    step = root ** -np.arange(1.0, _DIMENSIONS + 1)
    shift = np.random.default_rng(seed).random(_DIMENSIONS)
    return (shift + index * step + rng.normal(0.0, 0.02, _DIMENSIONS)) % 1.0


def _log_between(u: float, low: float, high: float) -> float:
    return float(low * (high / low) ** u)


def _lengths(u: float, spread: float, kind: float, longest: float = 2048.0) -> Lengths:
    mean, cv = _log_between(u, 16.0, longest), round(32 * spread) / 20
    if kind < 0.15 or cv < 0.05:
        return Lengths.constant(mean)
    return Lengths.gamma(mean, max(cv, 0.2)) if kind < 0.6 else Lengths.lognormal(mean, cv, high=16384)


def _mixed(
    index: int, family: str, rng: np.random.Generator, profile: Profile, u: FloatArray
) -> MeasuredScenario | None:
    """Return a random mixture of rates, ranks and lengths, with a total rate relative to the estimated capacity; None
    if the server does not start."""
    large = family == "large"
    n = round(_log_between(u[0], *(LARGE if large else (1.0, LARGE[0]))))
    weights = _weights(n, u[2], u[3], rng)
    ranks = rng.choice(RANKS, n, p=_rank_mix(u[4], rng))
    slot_rank = checks.slot_rank_for(int(ranks.max()))
    if large:
        most = max(1, min(int(1.3 * n), largest_max_loras(profile, slot_rank)))
        slots = round(_log_between(u[1], min(FEWEST_SLOTS, most), most))
    else:
        slots = max(1, min(round(_log_between(u[1], 1.0, 1.3 * n + 4)), 512))
    if u[5] < 0.45:
        lengths = (SHAREGPT_INPUT, SHAREGPT_OUTPUT)
        correlation = SHAREGPT_CORRELATION
    else:
        lengths = (_lengths(u[6], u[7], rng.random()), _lengths(u[8], u[9], rng.random(), 1024.0))
        correlation = float(1.2 * u[10] - 0.6)
    own: list[tuple[Lengths | None, Lengths | None]] = [(None, None)] * n
    if u[11] > 0.85:  # adapters that differ in their lengths too
        others = []
        for _ in range(3):
            prompts = _lengths(rng.random(), rng.random(), rng.random())
            others.append((prompts, _lengths(rng.random(), rng.random(), 0.5, 1024.0)))
        own = [others[k] for k in rng.integers(0, 3, n)]

    settings = profile.settings(slots, slot_rank)
    if memory_error(profile, settings) is not None:
        return None
    named = zip(ranks.tolist(), weights.tolist(), own, strict=True)
    adapters = [Adapter(f"a{i}", rank, max(w, LEAST_RATE), *each) for i, (rank, w, each) in enumerate(named)]
    workload = Workload(adapters, *lengths, correlation)
    one = MeasuredScenario(index, family, f"{family} {index}", workload, settings)

    def build(rate: float) -> MeasuredScenario:
        scaled = (a.at_rate(max(rate * w, LEAST_RATE)) for a, w in zip(adapters, weights.tolist(), strict=True))
        return replace(one, workload=replace(workload, adapters=tuple(scaled)))

    table, extractor = BinTable.of([one.bin(profile)]), FeatureExtractor(one.workload, profile)

    def feature(factor: float, name: str) -> float:
        return float(extractor.matrix(table, factor)[0, COLUMN[name]])

    full = 1.0 / feature(1.0, "load_factor")
    if family == "mixed" or (large and u[13] > 0.8):
        return build(full * _log_between(u[12], 0.05, 6.0))
    if n > slots and u[13] < 0.6:
        return build(_rate_with_slot_wait(feature, full, _log_between(u[12], 30.0, 4000.0)))
    return build(full * _log_between(u[12], 0.7, 1.35))


def _rate_with_slot_wait(feature: Callable[[float, str], float], full: float, wait_s: float) -> float:
    """Return the rate at which adapters wait about `wait_s` for a slot, at most 1.5 times the capacity `full`."""
    low, high = 0.01 * full, 1.5 * full
    for _ in range(8):
        middle = (low * high) ** 0.5
        if feature(middle, "slot_wait") > wait_s:
            high = middle
        else:
            low = middle
    return float((low * high) ** 0.5)


def _weights(n: int, shape: float, spread: float, rng: np.random.Generator) -> FloatArray:
    """Shares of the request rate: equal, log-normal, Zipf, or a few levels."""
    if shape < 0.15:
        raw = np.ones(n)
    elif shape < 0.55:
        raw = np.exp(rng.normal(0.0, 2.2 * spread, n))
    elif shape < 0.75:
        raw = 1.0 / (np.arange(1.0, n + 1) ** (1.6 * spread))
    else:
        raw = np.resize([1.0, 0.5 ** (6 * spread), 0.5 ** (9 * spread)], n)
    rng.shuffle(raw)
    share: FloatArray = raw / raw.sum()
    return share


def _rank_mix(u: float, rng: np.random.Generator) -> FloatArray:
    if u < 0.4:
        mix = np.zeros(len(RANKS))
        mix[min(len(RANKS) - 1, int(u / 0.08))] = 1.0
        return mix
    return rng.dirichlet((1.0, 1.0, 0.7, 0.4, 0.3))
