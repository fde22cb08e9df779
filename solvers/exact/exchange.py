"""Better bins from good ones: up to two adapters out, up to two others in, while the value rises."""

from __future__ import annotations

import numpy as np

from packer.solvers.candidates import MAX_ADAPTERS_PER_GPU
from packer.solvers.classes import FloatArray, IntArray
from packer.solvers.feasibility import Feasibility

_MOST_HELD = 12
_MOST_CLASSES = 160
_TRIED = 32
_BEYOND = 1.02
_ROUNDS = 12
_ALIKE = 1e-3


def exchanged(feasibility: Feasibility, row: IntArray, weights: FloatArray, limit: IntArray) -> IntArray:
    """Feasible bins (m, K) around the feasible `row`, the row among them, none of more than `limit` (K,) of a class.

    The value rises from step to step; bins that were feasible and not the best of their step are returned, too.
    Exchanges that keep the load within what feasible bins are known to carry are tried first, the most valuable ones;
    then those a little beyond. Only for bins of few adapters, where filling in any order leaves room unused.

    Raises
    ------
    OutOfTime
        The problem's time is up.
    """
    loads = feasibility.classes.loads
    found, carried = [row[None, :]], float(row @ loads)
    if row.sum() > _MOST_HELD or len(loads) > _MOST_CLASSES:
        return found[0]
    for _ in range(_ROUNDS):
        good = _feasible_exchanges(feasibility, row, weights, limit, carried)
        if not len(good):
            break
        found.append(good)
        best = good[np.argmax(good @ weights)]
        if best @ weights <= row @ weights * (1.0 + 1e-9):
            break
        row = best
        carried = max(carried, float(row @ loads))
    return np.concatenate(found)


def _feasible_exchanges(
    feasibility: Feasibility, row: IntArray, weights: FloatArray, limit: IntArray, carried: float
) -> IntArray:
    """Feasible bins that are one exchange away and worth about as much or more, int64 (m, K)."""
    loads = feasibility.classes.loads
    out, into = _choices(np.minimum(row, 2)), _choices(np.minimum(limit - row, 2))
    gain = (into @ weights)[None, :] - (out @ weights)[:, None]
    load = float(row @ loads) + (into @ loads)[None, :] - (out @ loads)[:, None]
    held = int(row.sum()) + into.sum(axis=1)[None, :] - out.sum(axis=1)[:, None]
    better = (gain > -_ALIKE * float(row @ weights)) & (held <= MAX_ADAPTERS_PER_GPU)
    tried: list[IntArray] = []
    for within in (load <= carried * (1.0 + 1e-9), (load > carried) & (load <= carried * _BEYOND)):
        where = np.flatnonzero((better & within).ravel())
        best = where[np.argsort(-gain.ravel()[where], kind="stable")[:_TRIED]]
        tried += [row - out[k // len(into)] + into[k % len(into)] for k in best.tolist()]
    rows = np.array(tried, dtype=np.int64).reshape(-1, len(row))
    return rows[feasibility.feasible(rows)] if len(rows) else rows


def _choices(available: IntArray) -> IntArray:
    """Every choice of at most two adapters, int64 (m, K), where so many of each class are available."""
    classes = np.flatnonzero(available > 0)
    one = np.zeros((len(classes), len(available)), dtype=np.int64)
    one[np.arange(len(classes)), classes] = 1
    first, second = np.triu_indices(len(classes), k=1)
    double = one[available[classes] > 1] * 2
    none = np.zeros((1, len(available)), dtype=np.int64)
    return np.concatenate([none, one, one[first] + one[second], double])
