"""Lower bounds on the number of GPUs, each a weighing of the adapters that no feasible bin exceeds.

If every feasible bin weighs at most 1, a plan has at least as many bins as all adapters weigh. What a
feasible bin may carry is found by a search with the predictor: every bound here is relative to both
(`packer.solvers.exact` proves stronger ones).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from packer.checks import slot_rank_for
from packer.solvers.base import Problem, Solution, start
from packer.solvers.classes import FloatArray, IntArray, aggregate
from packer.solvers.exact.knapsack import Knapsacks
from packer.solvers.exact.pricing import fill
from packer.solvers.feasibility import Feasibility, OutOfTime
from packer.solvers.limit import within_limit
from packer.solvers.support import counts_gpus

_ROUNDING = 1e-6
_ORDERS = 6
_SLOW_ORDERS = 2
"""Heaviest first for the load, lightest first for the number of adapters: both are needed, however slow they are."""


@dataclass(frozen=True)
class Bound:
    """No plan has fewer than `value` GPUs; `source` is the argument in words.

    `weights` (K,), where the argument is a plain sum: no feasible bin found weighs more than 1. `certain`: the
    argument holds relative to what evaluates bins in the search, whatever a search for the heaviest bin may have
    missed. `always`: it holds whatever evaluates bins.
    """

    value: int
    source: str
    weights: FloatArray | None = None
    certain: bool = False
    always: bool = False

    def proven(self, problem: Problem) -> bool:
        """Whether it holds relative to what evaluates the plan, which may be another than evaluates the search."""
        return self.always or (self.certain and not problem.evaluator.confirms)

    def words(self, problem: Problem) -> str:
        """The argument, marked as an estimate where it is not proven."""
        return self.source if self.proven(problem) else f"estimate: {self.source}"


@dataclass(frozen=True)
class Limits:
    """The most that a feasible bin holds whose slots have at least the rank of class k: float64 (K,) each.

    `complete`: every bin was evaluated; else these are what a search found.
    """

    load_tok_s: FloatArray
    adapters: FloatArray
    bins: IntArray
    complete: bool = False


def limits(feasibility: Feasibility, rng: np.random.Generator, known: IntArray | None = None) -> Limits:
    """The heaviest and the fullest feasible bins of each slot rank: of all, if they are few, else of a search.

    The search includes the `known` bins.
    """
    classes = feasibility.classes
    slots = np.array([slot_rank_for(rank) for rank in classes.ranks.tolist()])
    every = None if feasibility.problem.evaluator.simulates else classes.every_bin()
    found = _searched(feasibility, rng, known) if every is None else every[feasibility.evaluate(every)]
    slot_of = np.array([slots[row > 0].max(initial=0) for row in found], dtype=np.int64)
    carried, held = found @ classes.loads, found.sum(axis=1)
    load_limit = np.array([carried[slot_of >= slot].max(initial=0.0) for slot in slots])
    count_limit = np.array([held[slot_of >= slot].max(initial=0) for slot in slots], dtype=np.float64)
    return Limits(load_limit, count_limit, found, every is not None)


def _searched(feasibility: Feasibility, rng: np.random.Generator, known: IntArray | None) -> IntArray:
    """The heaviest and fullest bins that a search finds, int64 (m, K)."""
    classes = feasibility.classes
    slots = np.array([slot_rank_for(rank) for rank in classes.ranks.tolist()])
    loads, demand = classes.loads, classes.demand
    heaviest = float((known @ loads).max(initial=0.0)) if known is not None else 0.0
    sizes = loads / max(heaviest, float(loads.max()), 1e-12)
    if known is not None:
        known = known[feasibility.feasible(known)]
    n_orders = _SLOW_ORDERS if feasibility.problem.evaluator.simulates else _ORDERS
    bases, orders = [], []
    for slot in np.unique(slots).tolist():
        lightest = min(np.flatnonzero(slots == slot).tolist(), key=lambda k: (loads[k], k))
        smaller = np.flatnonzero(slots <= slot)
        for i in range(n_orders):
            noise = np.exp(rng.normal(0.0, 0.5 * (i // 2), len(smaller)))
            keys = (-loads, loads, -loads / classes.ranks)[i % 3][smaller] * noise
            base = np.zeros(len(classes), dtype=np.int64)
            base[lightest] = 1
            bases.append(base)
            orders.append(smaller[np.argsort(keys, kind="stable")])
    feasible = feasibility.feasible(np.array(bases))
    kept = [i for i in range(len(bases)) if feasible[i]]
    found = np.zeros((0, len(classes)), dtype=np.int64)
    if kept:
        found = fill(
            feasibility, np.array([bases[i] for i in kept]), [orders[i] for i in kept], demand, sizes
        )
    if known is not None and len(known):
        found = np.concatenate([found, known])
    carried = float((found @ loads).max(initial=0.0))
    return np.concatenate([found, Knapsacks(feasibility).best(loads, demand, carried)])


def l2(sizes: FloatArray, demand: IntArray) -> int:
    """Martello and Toth's L2: bins of size 1 for `demand` (K,) items of `sizes` (K,) in ]0, 1].

    The best dual-feasible function of the family that rounds items beyond 1 − t up to a bin and drops those
    below t (S. Martello, P. Toth: Lower bounds and reduction procedures for the bin packing problem, 1990).
    """
    best = int(np.ceil(float(sizes @ demand) - _ROUNDING))
    for threshold in (0.0, *np.unique(sizes[sizes <= 0.5]).tolist()):
        alone = sizes > 1.0 - threshold
        large = (sizes > 0.5) & ~alone
        small = (sizes >= threshold) & (sizes <= 0.5)
        room = float(demand[large].sum() - sizes[large] @ demand[large])
        more = max(0, int(np.ceil(float(sizes[small] @ demand[small]) - room - _ROUNDING)))
        best = max(best, int(demand[alone].sum() + demand[large].sum()) + more)
    return best


def quick_bound(feasibility: Feasibility, rng: np.random.Generator, known: IntArray | None = None) -> Bound:
    """The best of the bounds on load and on slots, in words."""
    classes, name = feasibility.classes, feasibility.problem.evaluator.name
    demand = classes.demand
    found = limits(feasibility, rng, known)
    options = [Bound(1, "at least one GPU", certain=True, always=True)]
    what = "feasible bin" if found.complete else "feasible bin found"
    whose = f"relative to the predictor {name!r}" + (
        ", which evaluated every bin" if found.complete else " and that search"
    )
    if np.all(found.load_tok_s > 0):
        # A bin with slots of rank S carries at most the limit of S; a smaller rank's limit is no lower, so
        # the loads in shares of the limits of their own ranks add up to at most 1 (the KV cache is in it:
        # larger slots leave less of it, and the limit falls).
        shares = np.minimum(1.0, classes.loads / found.load_tok_s)
        total = int(np.ceil(float(shares @ demand) - _ROUNDING))
        value, how = total, ""
        if classes.loss == 0.0:  # it compares single adapters with halves of a bin, which rounding moves
            value, how = l2(shares, demand), "L2 dual-feasible functions; "
        options.append(
            Bound(
                value,
                f"load: no {what} carries more than {found.load_tok_s.max():,.0f} tok/s "
                f"({found.load_tok_s.min():,.0f} with the largest slots); {how}{whose}",
                shares if value == total else None,
                certain=found.complete,
            )
        )
        options.append(
            Bound(
                l2(np.minimum(1.0, 1.0 / found.adapters), demand),
                f"slots: no {what} holds more than {int(found.adapters.max())} adapters "
                f"({int(found.adapters.min())} with the largest slots); {whose}",
                certain=found.complete,
            )
        )
    return max(options, key=lambda bound: (bound.value, bound.certain))


class Bounds:
    """Greedy's plan with the bounds on load and slots: a quick answer to "how good is it at least?"."""

    name = "bounds"
    supports = staticmethod(counts_gpus)

    def solve(self, problem: Problem) -> Solution:
        """The start's bins, and the bound."""
        first = start(problem)
        bound, details = bound_of(problem, first)
        return limited(problem, first, bound, details)


def bound_of(problem: Problem, first: Solution) -> tuple[Bound, dict[str, object]]:
    """The quick bound with the bins of a plan at hand, and what it took."""
    classes = aggregate(problem.workload)
    feasibility = Feasibility(problem, classes)
    known = np.array([classes.counts(each.adapters) for each in first.bins], dtype=np.int64)
    try:
        bound = quick_bound(feasibility, np.random.default_rng(problem.seed), known.reshape(-1, len(classes)))
    except OutOfTime:
        source = "at least one GPU; the time was up before anything better was shown"
        bound = Bound(1, source, certain=True, always=True)
    return bound, {"bins_evaluated": feasibility.evaluated}


def limited(problem: Problem, first: Solution, bound: Bound, details: dict[str, object]) -> Solution:
    """The solution with a bound; cut to the GPUs that there may be, and then infeasible."""
    # That there is at least one GPU is no news, and a plan at hand refutes a search that missed a bin.
    known = bound.value > 1 or len(first.bins) <= 1
    known &= bound.value <= len(first.bins) or bool(first.unplaced)
    found = replace(
        first,
        lower_bound=float(bound.value) if known else None,
        bound_source=bound.words(problem) if known else "",
        proven=known and bound.proven(problem),
        details={**first.details, **details},
    )
    cut = within_limit(problem, found)
    if problem.max_gpus is None or cut is found or bound.value <= problem.max_gpus:
        return cut
    necessary = f"At least {bound.value} GPUs are necessary ({bound.words(problem)})"
    return replace(cut, reasons=(*cut.reasons, necessary))
