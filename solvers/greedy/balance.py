"""Load the same number of GPUs evenly: lower latency at no cost once the number is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.order import paper_order
from packer.solvers.slots import Quality, SlotSearch, qualities

_RELIEFS = 2


def balanced(problem: Problem, bins: Sequence[Bin]) -> tuple[Bin, ...]:
    """The same number of bins with a better worst bin, if that is possible; else the bins given.

    First the fleet is split again into bins of equal load. Equal ranks stay together so that few GPUs need the largest
    slots. Then the worst GPU, by `qualities`, gives adapters to the least loaded ones. Nothing changes for several GPU
    types, split adapters and plans that stay close to a running one.
    """
    plain = len(problem.profiles) == 1 and not problem.old_bins and not any(b.is_split for b in bins)
    if len(bins) < 2 or not plain or problem.out_of_time():
        return tuple(bins)
    slots = SlotSearch(problem)
    return tuple(_relieve(slots, *_better(problem, _even(slots, len(bins), bins[0]), list(bins))))


def _even(slots: SlotSearch, n: int, like: Bin) -> list[Bin]:
    """The fleet in `n` bins of equal load, with about as many slots as `like`; [] if a bin does not hold."""
    parts = even_parts(slots.problem, n)
    if not all(0 < len(part) <= slots.problem.most_adapters for part in parts):
        return []
    return slots.climbed([slots.like(part, like) for part in parts])[0]


def _relieve(slots: SlotSearch, bins: list[Bin], grades: list[Quality]) -> list[Bin]:
    """Move adapters from the worst GPU, by `grades`, to less loaded ones while that improves the worse of the two."""
    problem = slots.problem
    loads = np.array([bin_.offered_tok_s(problem.workload) for bin_ in bins])
    changes = [0] * len(bins)
    tried: set[tuple[int, int, int, int]] = set()  # pairs of GPUs, each with the number of its changes
    for _ in range(_RELIEFS * len(bins)):
        worst = max(range(len(bins)), key=grades.__getitem__)
        for target in np.argsort(loads, kind="stable").tolist():
            pair = (worst, target, changes[worst], changes[target])
            if target != worst and pair not in tried:
                break
        else:
            break
        if problem.out_of_time():
            break
        made, new = _level(slots, bins[worst], bins[target], (loads[worst] - loads[target]) / 2)
        if not new or max(new) >= grades[worst]:
            tried.add(pair)
            continue
        for k, bin_, grade in zip((worst, target), made, new, strict=True):
            bins[k], grades[k] = bin_, grade
            loads[k] = bin_.offered_tok_s(problem.workload)
            changes[k] += 1
    return bins


def _level(slots: SlotSearch, source: Bin, sink: Bin, amount_tok_s: float) -> tuple[list[Bin], list[Quality]]:
    """Move up to `amount_tok_s` from `source` to `sink`, or a half or a quarter of it; [] if the bins never hold. The
    smallest ranks move first, so that the slots of the sink need not grow."""
    workload, index = slots.problem.workload, np.array(source.adapters)
    loads = workload.offered_tok_s_by_adapter[index]
    if loads.min() > amount_tok_s:
        return [], []
    order = np.lexsort((index, -loads, workload.ranks[index]))
    for part in (1.0, 0.5, 0.25):
        moving: list[int] = []
        left = amount_tok_s * part
        for i, load in zip(index[order].tolist(), loads[order].tolist(), strict=True):
            if load <= left and len(sink.adapters) + len(moving) < slots.problem.most_adapters:
                moving.append(i)
                left -= load
        gone = set(moving)
        staying = [i for i in source.adapters if i not in gone]
        if not moving or not staying:
            continue
        found = slots.climbed([slots.like(staying, source), slots.like([*sink.adapters, *moving], sink)])
        if found[0]:
            return found
    return [], []


def even_parts(problem: Problem, n: int) -> list[list[int]]:
    """The fleet in paper order, cut into `n` parts of about equal load."""
    order = paper_order(problem.workload)
    loads = problem.workload.offered_tok_s_by_adapter[order]
    middle = np.cumsum(loads) - loads / 2
    part = np.minimum((middle / loads.sum() * n).astype(np.int64), n - 1)
    return [order[part == k].tolist() for k in range(n)]


def _better(problem: Problem, new: list[Bin], old: list[Bin]) -> tuple[list[Bin], list[Quality]]:
    """The new bins if they are better than the old ones, else the old ones, with their `qualities`."""
    found = [problem.evaluator.evaluate(problem.workload, bins) for bins in (old, new) if bins]
    keys = [problem.objective.key(problem.workload, *each) for each in zip((old, new), found, strict=False)]
    grades = [qualities(each) for each in found]
    better = new and keys[1] <= keys[0] and max(grades[1]) < max(grades[0])
    return (new, grades[1]) if better else (old, grades[0])
