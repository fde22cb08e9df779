"""The same number of GPUs, evenly loaded: what a plan gains for nothing once the number is settled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.order import paper_order
from packer.solvers.probe import Probe, quality


def balanced(problem: Problem, bins: Sequence[Bin]) -> tuple[Bin, ...]:
    """The fleet split anew into as many bins of equal load, if that serves the worst-off one better.

    Ranks stay together, so that few GPUs need the largest slots. The bins given are returned where the split
    is not admissible, no better, or worse by the objective; and for several GPU types, split adapters and
    plans that stay close to a running one.
    """
    plain = len(problem.profiles) == 1 and not problem.old_bins and all(b.shares is None for b in bins)
    if len(bins) < 2 or not plain or problem.out_of_time():
        return tuple(bins)
    probe = Probe(problem)
    hint = int(np.median([bin_.max_loras for bin_ in bins]))
    even: list[Bin] = []
    for part in even_parts(problem, len(bins)):
        found = probe.feasible(part, hint=hint) if part else None
        if found is None:
            return tuple(bins)
        hint = found.max_loras
        even.append(found)
    even = [probe.best(bin_) for bin_ in even]
    return tuple(even) if _better(problem, even, bins) else tuple(bins)


def even_parts(problem: Problem, n: int) -> list[list[int]]:
    """The fleet in paper order, cut into `n` parts of about equal load."""
    order = paper_order(problem.workload)
    loads = problem.workload.offered_tok_s_by_adapter[order]
    middle = np.cumsum(loads) - loads / 2
    part = np.minimum((middle / loads.sum() * n).astype(np.int64), n - 1)
    return [order[part == k].tolist() for k in range(n)]


def _better(problem: Problem, new: Sequence[Bin], old: Sequence[Bin]) -> bool:
    found = problem.predictor.evaluate(problem.workload, [*new, *old])
    if not problem.objective.admissible(found)[: len(new)].all():
        return False
    rows = list(found)
    worst_new = max(quality(row) for row in rows[: len(new)])
    worst_old = max(quality(row) for row in rows[len(new) :])
    keys = [
        problem.objective.key(
            problem.workload, bins, problem.predictor.evaluate(problem.workload, list(bins))
        )
        for bins in (new, old)
    ]
    return keys[0] <= keys[1] and worst_new < worst_old
