"""The estimate that CP-SAT uses of how full a server is: linear, and fitted to the predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray, distinct
from packer.bin import Bin
from packer.evaluation import Evaluation, Evaluations
from packer.profile import Profile
from packer.search import reach
from packer.solvers.base import Problem
from packer.solvers.candidates import slot_ranks
from packer.solvers.slots import SlotSearch

_ORDERS, _SIMULATED_ORDERS = 24, 6
"""Number of random orders of adapters from which each kind of server is filled; the second with simulations."""

_POWERS = (0.0, 0.0, 1.0, -0.5)  # Each order prefers adapters by their load to one of these powers.


_FIRST = 16  # Number of adapters that is tried first.


@dataclass(frozen=True)
class LoadedKind:
    """Servers of one profile and slot rank, and the share of a server that each adapter takes.

    `shares`: float64 (n,), for every adapter of the fleet; 1 is a full server (or, for latency, an infinite wait).
    `base`: the fill of an empty server.
    """

    profile: Profile
    slot_rank: int
    shares: FloatArray
    base: float = 0.0


def features(problem: Problem) -> FloatArray:
    """Features that may fill a server, float64 (n, 4): input tok/s, output tok/s, 1 and the rank of each adapter."""
    fleet = problem.workload
    rates, ranks = fleet.rates, fleet.ranks.astype(np.float64)
    columns = [rates * fleet.mean_input_tokens, rates * fleet.mean_output_tokens, np.ones(len(fleet)), ranks]
    return np.stack(columns, axis=1)


def fitted_limits(problem: Problem, rng: np.random.Generator) -> list[LoadedKind]:
    """Fit one kind for each profile and slot rank that holds an adapter.

    Adapters are added in random orders until the predictor refuses the server. The last servers that it admits have a
    fill of 1: non-negative least squares over these servers give the shares.
    """
    rows, found = features(problem), []
    for profile in problem.profiles:
        slot = slot_ranks(problem.workload.ranks, profile)
        for rank in distinct(slot).tolist():
            orders = _orders(problem, np.flatnonzero(slot <= rank), slot == rank, rng)
            full = [_largest(problem, profile, order) for order in orders]
            held = [rows[list(each)].sum(axis=0) for each in full if each]
            if held:
                theta, _ = _fit(np.array(held), np.ones(len(held)))
                found.append(LoadedKind(profile, rank, rows @ theta))
    return found


def fitted_latencies(problem: Problem, bins: Sequence[Bin], rng: np.random.Generator) -> list[LoadedKind]:
    """Fit one kind for each profile and slot rank to 1 − least latency / latency, which is linear in a queue's load.
    Evaluates servers of the plan with adapters exchanged, removed and added at random."""
    rows, fleet, slots = features(problem), problem.workload, SlotSearch(problem)
    tried = list(bins)
    count = (_SIMULATED_ORDERS if problem.evaluator.simulates else _ORDERS) * 4
    for _ in range(count):
        one, other = (bins[int(rng.integers(len(bins)))] for _ in range(2))
        pool = np.array(sorted({*one.adapters, *other.adapters}))
        size = int(np.clip(rng.normal(1.0, 0.2) * len(one.adapters), 1, len(pool)))
        tried.append(slots.like(tuple(sorted(rng.choice(pool, size, replace=False).tolist())), one))
    evaluations = problem.evaluator.evaluate(fleet, tried)
    latency = np.array([latency_of(problem, *each) for each in zip(tried, evaluations, strict=True)])
    known = np.isfinite(latency) & (latency > 0.0)
    if not known.any():
        return []
    # It is below every latency, so that 1 − least / latency stays above 0.
    least = 0.9 * float(latency[known].min())
    found = []
    for profile, rank in dict.fromkeys((item.profile, item.max_lora_rank) for item in tried):
        here = [k for k in np.flatnonzero(known).tolist()
                if (tried[k].profile, tried[k].max_lora_rank) == (profile, rank)]  # fmt: skip
        if len(here) < 3:
            continue
        held = np.array([rows[list(tried[k].adapters)].sum(axis=0) for k in here])
        theta, base = _fit(held, 1.0 - least / latency[here], with_base=True)
        found.append(LoadedKind(profile, rank, rows @ theta, base))
    return found


def latency_of(problem: Problem, item: Bin, row: Evaluation) -> float:
    """The first entry of the objective's key for one server alone."""
    return problem.objective.key(problem.workload, [item], Evaluations.of([row]))[0]


def _orders(problem: Problem, members: IntArray, largest: BoolArray, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Random orders of these adapters; the first one of each order is one of the `largest`, bool (n,), of the fleet."""
    loads = problem.workload.offered_tok_s_by_adapter[members]
    found = []
    for k in range(_SIMULATED_ORDERS if problem.evaluator.simulates else _ORDERS):
        # Exponential keys over weights: an adapter comes first with a probability proportional to its weight.
        keys = rng.exponential(size=len(members)) / np.maximum(loads, 1e-9) ** _POWERS[k % len(_POWERS)]
        keys[rng.choice(np.flatnonzero(largest[members]))] = -1.0
        found.append(tuple(members[np.argsort(keys, kind="stable")].tolist()))
    return found


def _largest(problem: Problem, profile: Profile, order: Sequence[int]) -> tuple[int, ...]:
    """The longest prefix of the order that is found to hold."""
    slots, hint = SlotSearch(problem), 32

    def holds(n: int) -> bool:
        nonlocal hint
        made = slots.feasible(order[:n], profile, hint=min(hint, n), thorough=True)
        hint = hint if made is None else made.max_loras
        return made is not None

    most = min(len(order), problem.most_adapters)
    return tuple(order[: reach(holds, 1, most, _FIRST, _FIRST, problem.out_of_time)[0]])


def _fit(held: FloatArray, target: FloatArray, *, with_base: bool = False) -> tuple[FloatArray, float]:
    """Non-negative weights of the features, and a base, by least squares to the target."""
    from scipy.optimize import nnls

    columns = np.column_stack([held, np.ones(len(held))]) if with_base else held
    scale = np.maximum(columns.max(axis=0), 1e-12)
    theta = nnls(columns / scale, np.maximum(target, 0.0))[0] / scale
    return (theta[:-1], float(theta[-1])) if with_base else (theta, 0.0)
