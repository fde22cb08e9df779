"""What CP-SAT knows of feasibility: for slots (`max_loras`, rank) a linear limit, fitted to the predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.solvers.base import Problem
from packer.solvers.candidates import max_loras_candidates
from packer.solvers.classes import Classes, FloatArray, IntArray

SCALE = 1_000_000
"""Weights and limits are whole numbers for CP-SAT: this is 1."""
_FEATURES = 3
_FEWEST = 6


@dataclass(frozen=True)
class Option:
    """One way to start a server: slots, and what a class weighs there (K,), as whole numbers of 1/`SCALE`.

    For a limit, a bin of at most `SCALE` is taken to be feasible; for a cost, the weights and `base` add
    up to the cost of a bin.
    """

    max_loras: int
    slot_rank: int
    weights: IntArray
    base: int = 0


@dataclass(frozen=True)
class Samples:
    """Bins evaluated around a plan: counts (m, K), slots (m,), admissible (m,), cost (m,; NaN where not)."""

    counts: IntArray
    max_loras: IntArray
    slot_rank: IntArray
    admissible: npt.NDArray[np.bool_]
    cost: FloatArray


def sample(
    problem: Problem, classes: Classes, plan: Sequence[IntArray], rng: np.random.Generator, n: int
) -> Samples:
    """Evaluate `n` bins like those of the plan: parts of two of them, a little more or less than they hold.

    The cost is the first entry of the objective's key for a plan of that bin alone.
    """
    fleet, ranks, demand = classes.fleet, classes.ranks, classes.demand
    profile = problem.profile
    bins: list[Bin] = []
    rows: list[IntArray] = []
    while len(bins) < n:
        a, b = plan[int(rng.integers(len(plan)))], plan[int(rng.integers(len(plan)))]
        share = rng.random()
        grown = (share * a + (1.0 - share) * b) * rng.uniform(0.8, 1.25)
        row = np.minimum(demand, np.floor(grown + rng.random(len(a))).astype(np.int64))
        held = int(row.sum())
        if held == 0:
            row = a
            held = int(row.sum())
        for p in _near(held, rng):
            slot = slot_rank_for(int(ranks[row > 0].max()))
            bins.append(Bin(classes.representatives(row), profile.settings(p, slot), profile))
            rows.append(row)
    found = problem.evaluator.evaluate(fleet, bins)
    admissible = problem.objective.admissible(found)
    cost = np.full(len(bins), np.nan)
    for i in np.flatnonzero(~found.memory_error).tolist():
        one = type(found).of([found[i]])
        cost[i] = problem.objective.key(fleet, [bins[i]], one)[0]
    slots = np.array([[each.max_loras, each.max_lora_rank] for each in bins], dtype=np.int64)
    return Samples(np.array(rows), slots[:, 0], slots[:, 1], admissible, cost)


def _near(held: int, rng: np.random.Generator) -> list[int]:
    candidates = max_loras_candidates(held)
    return sorted({candidates[-1], candidates[int(rng.integers(len(candidates)))]})


def fit_limits(classes: Classes, samples: Samples) -> list[Option]:
    """A linear limit for every pair of slots that was sampled: load, adapters and ranks that still pass.

    The separating plane with the least total violation (a linear program); feasible bins count twice, because
    a limit that is too loose is mended by cuts and one that is too tight hides plans.
    """
    options = []
    for p, slot in _slots(samples):
        here = samples.slot_rank == slot
        near = here & (np.abs(np.log(samples.max_loras / p)) < 0.75)
        good, bad = near & samples.admissible, near & ~samples.admissible
        if good.sum() < _FEWEST:
            continue
        theta = _separate(_features(classes, samples.counts[good]), _features(classes, samples.counts[bad]))
        weights = _per_class(classes) @ theta
        whole = np.maximum(1, np.floor(weights * SCALE)).astype(np.int64)
        options.append(Option(p, slot, whole))
    return options


def fit_costs(classes: Classes, samples: Samples) -> list[Option]:
    """The objective's cost of a bin as a linear function for every pair of slots sampled (non-negative
    fit)."""
    from scipy.optimize import nnls

    options = []
    known = samples.admissible & np.isfinite(samples.cost)
    top = float(samples.cost[known].max(initial=0.0))
    if top <= 0.0:
        return []
    for p, slot in _slots(samples):
        near = known & (samples.slot_rank == slot) & (np.abs(np.log(samples.max_loras / p)) < 0.75)
        if near.sum() < _FEWEST:
            continue
        matrix = np.column_stack([np.ones(int(near.sum())), _features(classes, samples.counts[near])])
        scale = np.maximum(matrix.max(axis=0), 1e-12)
        theta = nnls(matrix / scale, samples.cost[near] / top)[0] / scale
        weights = np.maximum(1, np.floor(_per_class(classes) @ theta[1:] * SCALE)).astype(np.int64)
        options.append(Option(p, slot, weights, int(theta[0] * SCALE)))
    return options


def _slots(samples: Samples) -> list[tuple[int, int]]:
    pairs = np.unique(np.stack([samples.max_loras, samples.slot_rank], axis=1), axis=0)
    keep = pairs if len(pairs) <= 12 else pairs[np.linspace(0, len(pairs) - 1, 12).astype(int)]
    return [(int(p), int(slot)) for p, slot in keep.tolist()]


def _per_class(classes: Classes) -> FloatArray:
    """What one adapter of each class adds to the features, float64 (K, 3)."""
    return np.stack([classes.loads, np.ones(len(classes)), classes.ranks.astype(np.float64)], axis=1)


def _features(classes: Classes, counts: IntArray) -> FloatArray:
    return np.asarray(counts @ _per_class(classes), dtype=np.float64)


def _separate(good: FloatArray, bad: FloatArray) -> FloatArray:
    from scipy.optimize import linprog

    scale = np.maximum(np.concatenate([good, bad]).max(axis=0), 1e-12)
    g, b = len(good), len(bad)
    rows = np.concatenate([good / scale, -bad / scale]) if b else good / scale
    slack = -np.eye(g + b)
    right = np.concatenate([np.ones(g), -1.01 * np.ones(b)])
    # Without a counterexample the tightest plane around the feasible bins.
    price = np.concatenate([np.full(_FEATURES, -1e-3), np.full(g, 2.0), np.ones(b)])
    found = linprog(price, A_ub=np.hstack([rows, slack]), b_ub=right, bounds=(0, None), method="highs")
    theta: FloatArray = found.x[:_FEATURES] / scale
    return theta
