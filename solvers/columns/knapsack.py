"""The most valuable bins of a given load: good candidates if the load decides whether a bin is feasible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.solvers.candidates import slot_ranks
from packer.solvers.feasibility import Feasibility
from packer.solvers.work import CELL_S

_UNITS = 1024  # Loads are rounded to this number of parts of a bin, unless they are multiples of a larger unit.
_MOST_UNITS = 4096
_BEYOND = 1.03  # Largest load that is tried, as a factor of the heaviest bin known.
_MOST_CLASSES = 160


class Knapsacks:
    """Knapsacks over the loads of the classes, solved by dynamic programming, one for each slot rank.

    The load that a bin can carry is not known. Bisection, from the last result, finds the largest load whose best bin
    is feasible. For predictors that only consider the load, this bin is the most valuable; for others it is a
    candidate.
    """

    def __init__(self, feasibility: Feasibility) -> None:
        self.feasibility = feasibility
        self.lead = False  # Whether knapsacks gave a bin as good as the best other bin the last time.
        self._slots = slot_ranks(feasibility.classes.ranks)
        self._borne: dict[int, tuple[float, ...]] = {}
        """By slot rank, loads of bins, tok/s: of the last best bin, and of the heaviest if that is another."""
        self._unit = _common_unit(feasibility.classes.loads)

    def best(self, weights: FloatArray, limit: IntArray, carried_tok_s: float) -> IntArray:
        """Feasible bins (m, K) of high value, at most one for each slot rank and none of more than `limit` (K,). For
        each slot rank, the best bin of the largest load whose best bin is feasible. `carried_tok_s`: the heaviest's
        load."""
        found = [np.zeros((0, len(weights)), dtype=np.int64)]
        if len(weights) <= _MOST_CLASSES:
            for slot in self._useful(weights, limit):
                row = self._largest(slot, weights, limit, carried_tok_s)
                found += [] if row is None else [row[None, :]]
        return np.concatenate(found)

    def alike(self, weights: FloatArray, limit: IntArray, held: Sequence[int | None]) -> IntArray:
        """Feasible bins among the best bins of the loads that `best` found last, for each row of `weights` (m, K). Bins
        for row i hold at least one adapter of class `held[i]`, unless that is None. Raises `OutOfTime`."""
        rows = [np.zeros(len(limit), dtype=np.int64)]
        for row, k in zip(weights, held, strict=True):
            for slot in self._useful(row, limit):
                for load_tok_s in self._borne.get(slot, ()) if k is None or self._slots[k] <= slot else ():
                    made = self._packed(slot, row, limit, load_tok_s, k)
                    rows += [] if made is None else [made]
        different = distinct(np.array(rows), axis=0)
        return different[self.feasibility.feasible(different)]

    def _useful(self, weights: FloatArray, limit: IntArray) -> list[int]:
        found: list[int] = distinct(self._slots[(weights > 0.0) & (limit > 0)]).tolist()
        return found

    def _unit_of(self, load_tok_s: float) -> float:
        return self._unit if load_tok_s <= _MOST_UNITS * self._unit else load_tok_s / _UNITS

    def _sizes(self, unit: float) -> IntArray:
        return np.maximum(1, np.rint(self.feasibility.classes.loads / unit)).astype(np.int64)

    def _packed(
        self, slot: int, weights: FloatArray, limit: IntArray, load_tok_s: float, held: int | None
    ) -> IntArray | None:
        """The best bin of this load with one adapter of class `held`; None if this adapter alone exceeds the load."""
        unit = self._unit_of(load_tok_s)
        sizes, base = self._sizes(unit), np.zeros(len(limit), dtype=np.int64)
        if held is not None:
            base[held] = 1
        capacity = round(load_tok_s / unit) - int(sizes @ base)
        if capacity < 0:
            return None
        most = np.where((self._slots <= slot) & (weights > 0.0), limit - base, 0)
        return base + self._table(weights, sizes, most, capacity).row(capacity)

    def _table(self, weights: FloatArray, sizes: IntArray, most: IntArray, capacity: int) -> _Table:
        table = _Table(weights, sizes, most, capacity)
        self.feasibility.problem.evaluator.work.add(CELL_S * table.passes * capacity)
        return table

    def _largest(self, slot: int, weights: FloatArray, limit: IntArray, carried_tok_s: float) -> IntArray | None:
        """The best bin of the largest load whose best bin is feasible, None if none is."""
        borne = self._borne.get(slot, (carried_tok_s,))
        most_tok_s = _BEYOND * max(*borne, carried_tok_s)
        unit = self._unit_of(most_tok_s)
        sizes = self._sizes(unit)
        limit = np.where((self._slots <= slot) & (weights > 0.0), limit, 0)
        capacity = min(int(most_tok_s / unit) + 1, int(sizes @ limit))
        table = self._table(weights, sizes, limit, capacity)
        low, high, step = 0, capacity + 1, 1
        best: IntArray | None = None
        at = round(borne[0] / unit)
        while high - low > 1:
            at = min(max(at, low + 1), high - 1)
            row = table.row(at)
            if self.feasibility.feasible(row[None, :])[0]:
                low, best = at, row
            else:
                high = max(low + 1, int(sizes @ row))  # a larger capacity has the same best bin
            both = best is not None and high <= capacity
            at = (low + high) // 2 if both else low + step if best is not None else high - step
            step *= 2
        if best is not None:
            load_tok_s = float(best @ self.feasibility.classes.loads)
            heaviest = max(borne[-1] if slot in self._borne else 0.0, load_tok_s)
            self._borne[slot] = (load_tok_s,) if load_tok_s == heaviest else (load_tok_s, heaviest)
        return best


class _Table:
    """Dynamic program over capacities, with at most `limit` (K,) items of each size; sizes in whole units."""

    def __init__(self, weights: FloatArray, sizes: IntArray, limit: IntArray, capacity: int) -> None:
        self.sizes, value = sizes, np.zeros(capacity + 1)
        self._taken: list[tuple[int, int, np.ndarray]] = []
        for k in np.flatnonzero(limit > 0).tolist():
            left = min(int(limit[k]), capacity // int(sizes[k]))
            # Parts of 1, 2, 4, … adapters make every number up to the limit, in few passes over the table.
            part = 1
            while left > 0:
                count = min(part, left)
                size = count * int(sizes[k])
                # All sums are made before the table changes, so no part is used twice.
                more = value[: len(value) - size] + count * weights[k]
                better = more > value[size:] + 1e-12
                np.copyto(value[size:], more, where=better)
                self._taken.append((k, count, better))
                left -= count
                part *= 2

    @property
    def passes(self) -> int:
        """How often all of it was computed."""
        return len(self._taken)

    def row(self, capacity: int) -> IntArray:
        """Counts of the most valuable bin of at most this capacity, int64 (K,)."""
        counts = np.zeros(len(self.sizes), dtype=np.int64)
        for k, count, better in reversed(self._taken):
            size = count * int(self.sizes[k])
            if capacity >= size and better[capacity - size]:
                counts[k] += count
                capacity -= size
        return counts


def _common_unit(loads: FloatArray) -> float:
    """The largest unit that divides all loads, up to rounding; 0 if rounding hides it."""
    unit = 0.0
    for load in distinct(loads).tolist():
        small, large = sorted((unit, load))
        while small > 1e-6 * load:
            # Euclid's algorithm; the remainder to the nearest multiple keeps rounding errors small.
            rest = large % small
            rest = min(rest, small - rest)
            small, large = rest, small
        unit = large
    return unit
