"""Shares of replicated adapters such that their servers carry equal loads, or have equal TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.arrays import FloatArray
from packer.bin import Bin
from packer.solvers.base import Problem

_LEAST = 0.01  # A replica keeps at least this share, or 0.9 of an equal share of very many.
_PARTS = (0.02, 0.05, 0.1, 0.2)  # Shares of an adapter that one move between two servers may shift.
_STEPS = 8
_FASTER = 0.95  # A move must lower the TTFT of the slower server to at most this share of it.


def even_shares(problem: Problem, bins: Sequence[Bin]) -> tuple[Bin, ...]:
    """Choose shares for equal loads, if the bins then hold; then move shares from the slowest server to the fastest."""
    if not any(item.is_split for item in bins):
        return tuple(bins)
    workload = problem.workload
    shares = [dict(zip(item.adapters, item.shares, strict=True)) for item in bins]
    loads = np.array([item.offered_tok_s(workload) for item in bins])
    parted = {i for own in shares for i, share in own.items() if share < 1.0}
    split = sorted(parted, key=lambda i: (-float(workload.offered_tok_s_by_adapter[i]), i))
    for i in split:
        load = float(workload.offered_tok_s_by_adapter[i])
        holding = [k for k, own in enumerate(shares) if i in own]
        others = loads[holding] - load * np.array([shares[k][i] for k in holding])
        parts = filled(others / load)
        loads[holding] = others + load * parts
        for k, part in zip(holding, parts.tolist(), strict=True):
            shares[k][i] = part
    even = [replace(item, shares=tuple(own.values())) for item, own in zip(bins, shares, strict=True)]
    changed = [item for item, old in zip(even, bins, strict=True) if item != old]
    if not changed or not problem.evaluator.holds(workload, changed).all():
        even = list(bins)
    for i in split:
        for _ in range(_STEPS):
            if problem.out_of_time() or not _moved(problem, even, i):
                break
    return tuple(even)


def _moved(problem: Problem, bins: list[Bin], adapter: int) -> bool:
    """Move some of an adapter's share from its slowest server to its fastest, if that makes the slower one faster."""
    holding = [k for k, item in enumerate(bins) if adapter in item.adapters]
    found = problem.evaluator.evaluate(problem.workload, [bins[k] for k in holding])
    ttft_ms = np.nan_to_num(found.mean_ttft_ms, nan=np.inf)
    slow, fast = holding[int(ttft_ms.argmax())], holding[int(ttft_ms.argmin())]
    pairs = [
        (_with_share(bins[slow], adapter, -part), _with_share(bins[fast], adapter, part)) for part in _PARTS
    ] if slow != fast else []  # fmt: skip
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not pairs:
        return False
    tried = [item for pair in pairs for item in pair if item is not None]
    after = problem.evaluator.evaluate(problem.workload, tried)
    slower_ms = np.nan_to_num(after.mean_ttft_ms, nan=np.inf).reshape(-1, 2).max(axis=1)
    slower_ms[~problem.objective.holds(after).reshape(-1, 2).all(axis=1)] = np.inf
    best = int(slower_ms.argmin())
    if slower_ms[best] > _FASTER * ttft_ms.max():
        return False
    bins[slow], bins[fast] = tried[2 * best], tried[2 * best + 1]
    return True


def _with_share(item: Bin, adapter: int, change: float) -> Bin | None:
    """The bin with a larger or smaller share of an adapter; None if the share would not be that of a replica."""
    shares = dict(zip(item.adapters, item.shares, strict=True))
    shares[adapter] += change
    if not _LEAST <= shares[adapter] < 1.0:
        return None
    return replace(item, shares=tuple(shares.values()))


def filled(others: FloatArray) -> FloatArray:
    """Shares, sum 1, each at least `_LEAST` (see there), that raise the loads of the servers to one level.

    Water-filling: the fewest least loaded servers whose missing load adds up to 1 reach the level.
    `others`: load of each server without the adapter, in units of the adapter's load, float64 (n,).
    """
    least = min(_LEAST, 0.9 / len(others))
    free = 1.0 - least * len(others)
    order = np.sort(others)
    levels = (free + np.cumsum(order)) / np.arange(1, len(order) + 1)
    # With the k least loaded servers at one level, that level must be above the load of each of them.
    level = levels[np.flatnonzero(levels > order)[-1]]
    parts: FloatArray = np.maximum(0.0, level - others) + least
    parts /= parts.sum()
    return parts
