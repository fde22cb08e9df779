"""Whether bins given as counts of adapters of each class are feasible: evaluated in batches, and stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.arrays import BoolArray, IntArray
from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.solvers.base import Problem
from packer.solvers.candidates import nearest
from packer.solvers.classes import Classes
from packer.solvers.slots import Climb, Score, search

_BATCH = 256
_REMEMBERED = 400
_CHECK_EVERY = 16
_KNOWN_BYTES = 256 * 2**20  # Most memory of stored results; each takes `_ENTRY_BYTES` and 4 bytes per class.

_ENTRY_BYTES = 160


class OutOfTime(Exception):  # noqa: N818  (not an error: a search returns the best so far)
    """The time limit has passed, or the search was stopped; every function that evaluates bins may raise this."""


class Feasibility:
    """Feasibility of vectors of counts (over the classes), with any one candidate of `max_loras`.

    Feasibility is not monotone in `max_loras`: every candidate of a proof (`packer.solvers.candidates`) is tested
    before a bin is called infeasible, the most promising one first. Dominance saves evaluations: a bin is infeasible if
    it contains an infeasible bin, or that bin with adapters replaced by adapters of higher rates. A bin is feasible if
    a feasible bin contains it in the same sense. Predictors are not exactly monotone, so every 16th such inference is
    evaluated all the same and counted in `checks` and, if it was wrong, in `violations`.

    `problem`: gives the objective (what holds), the evaluator, the GPU type and the clock.
    `classes`: what is counted; bins are made of `classes.fleet`.
    """

    def __init__(self, problem: Problem, classes: Classes) -> None:
        self.problem, self.classes = problem, classes
        self.evaluated = 0  # Bins evaluated.
        self.checks = 0
        self.violations = 0
        self.most_slots = 0  # The most slots of a server that was found infeasible.
        self._inferred = 0
        self._known: dict[bytes, bool] = {}
        self._most = _KNOWN_BYTES // (4 * len(classes) + _ENTRY_BYTES)
        self._preferred: dict[tuple[int, int], int] = {}
        self._good = _Recent(len(classes))
        self._bad = _Recent(len(classes))

    def feasible(self, counts: IntArray) -> BoolArray:
        """Which rows of `counts` (m, K) are feasible bins, bool (m,); the empty bin is feasible."""
        counts = np.ascontiguousarray(counts, dtype=np.int64)
        answers = np.zeros(len(counts), dtype=bool)
        open_: list[int] = []
        checked: list[tuple[int, bool]] = []
        reached = counts @ self.classes.chains
        for i, row in enumerate(counts):
            known = self._known.get(_key(row))
            if known is not None:
                answers[i] = known
                continue
            inferred = self._infer(reached[i])
            if inferred is None:
                open_.append(i)
                continue
            answers[i] = inferred
            self._inferred += 1
            if self._inferred % _CHECK_EVERY == 0:
                checked.append((i, inferred))
        if open_ or checked:
            rows = open_ + [i for i, _ in checked]
            answers[rows] = self.evaluate(counts[rows])
            self.checks += len(checked)
            self.violations += sum(bool(answers[i]) is not inferred for i, inferred in checked)
        return answers

    def _infer(self, reached: IntArray) -> bool | None:
        if self._good.any(reached, above=True):
            return True
        return False if self._bad.any(reached, above=False) else None

    def evaluate(self, counts: IntArray) -> BoolArray:
        """Which rows of `counts` (m, K) are feasible, bool (m,), without inference; raises `OutOfTime`. Results are
        stored up to `_KNOWN_BYTES`; the oldest are dropped first."""
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        counts = np.ascontiguousarray(counts, dtype=np.int64)
        keys = [_key(row) for row in counts]
        rows = list({k: row for k, row in zip(keys, counts, strict=True) if k not in self._known}.items())
        for start in range(0, len(rows), _BATCH):
            self._evaluate_rows(rows[start : start + _BATCH])
        return np.array([self._known[key] for key in keys], dtype=bool)

    def _evaluate_rows(self, rows: list[tuple[bytes, IntArray]]) -> None:
        climbs: dict[bytes, Climb] = {}
        for key, row in rows:
            n = int(row.sum())
            if n == 0 or n > self.problem.most_adapters:
                self._known[key] = n == 0
                continue
            rank = slot_rank_for(int(self.classes.ranks[row > 0].max()))
            profile = self.problem.profile
            like = Bin(self.classes.representatives(row), profile.settings(1, rank), profile)
            order = nearest(like, self._preferred.get((rank, n.bit_length()), n), proof=True)
            # the most promising value of every row, then all the others of the rows that failed
            climbs[key] = Climb(like.with_slots(order[0]), 0, [order[:1], order], until_holds=True)
        search([*climbs.values()], self._rated)
        for key, climb in climbs.items():
            self._known[key] = (made := climb.best) is not None
            if made is None:
                self.most_slots = max(self.most_slots, *climb.score)
            else:
                # Servers of about as many adapters mostly hold with about as many slots.
                self._preferred[made.max_lora_rank, len(made.adapters).bit_length()] = made.max_loras
        for key, row in rows:
            (self._good if self._known[key] else self._bad).add(row @ self.classes.chains)

    def _rated(self, bins: Sequence[Bin]) -> list[Score]:
        """Whether each bin holds; raises `OutOfTime`."""
        rated: list[Score] = []
        for start in range(0, len(bins), _BATCH):
            if self.problem.out_of_time():
                raise OutOfTime
            part = bins[start : start + _BATCH]
            self.evaluated += len(part)
            holds = self.problem.objective.holds(self.problem.evaluator.evaluate(self.classes.fleet, part))
            rated += [(float(ok),) for ok in holds.tolist()]
        return rated


def _key(row: IntArray) -> bytes:
    return row.astype(np.int32).tobytes()


class _Recent:
    """The last vectors with the same result (feasible or infeasible), for dominance."""

    def __init__(self, width: int) -> None:
        self._rows = np.zeros((_REMEMBERED, width), dtype=np.int64)
        self._used = 0

    def add(self, row: IntArray) -> None:
        self._rows[self._used % _REMEMBERED] = row
        self._used += 1

    def any(self, row: IntArray, *, above: bool) -> bool:
        """Whether a stored vector is >= (`above`) or <= the row in every entry."""
        rows = self._rows[: min(self._used, _REMEMBERED)]
        held = rows >= row if above else rows <= row
        return bool(held.all(axis=1).any())
