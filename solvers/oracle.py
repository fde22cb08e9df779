"""Is a bin of so many adapters of each class feasible? The predictor's answer, batched and remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluation
from packer.checks import slot_rank_for
from packer.solvers.base import Problem
from packer.solvers.candidates import MAX_ADAPTERS_PER_GPU, max_loras_candidates
from packer.solvers.classes import Classes, IntArray
from packer.workload import Workload

_BATCH = 256


class OutOfTime(Exception):  # noqa: N818  (not an error: whoever searches returns the best so far)
    """The time limit has passed or somebody asked to stop, in the middle of a search."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether some `max_loras` works, the first one that did, and what the predictor said of it."""

    feasible: bool
    max_loras: int = 0
    evaluation: Evaluation | None = None


class Oracle:
    """Feasibility of vectors of counts (over the classes), for some candidate of `max_loras`.

    Feasibility is not monotone in `max_loras`: all candidates are tested before a bin is called infeasible,
    the most promising one first.

    Parameters
    ----------
    problem
        Gives the objective (what is admissible), the predictor, the GPU type and the clock.
    classes
        What is counted; bins are made of `classes.fleet`.
    """

    def __init__(self, problem: Problem, classes: Classes) -> None:
        self.problem, self.classes = problem, classes
        self.asked = 0
        """Bins that the predictor was asked about."""
        self._known: dict[bytes, Verdict] = {}
        self._preferred: dict[tuple[int, int], int] = {}

    def feasible(self, counts: IntArray) -> npt.NDArray[np.bool_]:
        """Which rows of `counts` (m, K) are feasible bins, bool (m,); the empty bin is.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        return np.array([verdict.feasible for verdict in self.judge(counts)], dtype=bool)

    def judge(self, counts: IntArray) -> list[Verdict]:
        """`Verdict` of each row of `counts` (m, K); raises `OutOfTime`."""
        counts = np.ascontiguousarray(counts, dtype=np.int64)
        keys = [row.tobytes() for row in counts]
        rows = list({k: row for k, row in zip(keys, counts, strict=True) if k not in self._known}.items())
        for start in range(0, len(rows), _BATCH):
            self._judge(rows[start : start + _BATCH])
        return [self._known[key] for key in keys]

    def _judge(self, rows: list[tuple[bytes, IntArray]]) -> None:
        if self.problem.out_of_time():
            raise OutOfTime
        open_rows: list[tuple[bytes, tuple[int, ...], int, list[int]]] = []
        for key, row in rows:
            n = int(row.sum())
            if n == 0 or n > MAX_ADAPTERS_PER_GPU:
                self._known[key] = Verdict(n == 0)
                continue
            rank = slot_rank_for(int(self.classes.ranks[row > 0].max()))
            candidates = list(max_loras_candidates(n))
            liked = self._preferred.get((rank, n.bit_length()), candidates[-1])
            candidates.sort(key=lambda p: abs(p - liked))
            open_rows.append((key, self.classes.representatives(row), rank, candidates))
        # The most promising candidate of every row, then all the others of the rows that failed.
        for first in (True, False):
            asked = [
                (key, Bin(members, p, rank, self.problem.profile), n)
                for key, members, rank, candidates in open_rows
                if key not in self._known
                for n in [len(members)]
                for p in (candidates[:1] if first else candidates[1:])
            ]
            self._ask(asked)
        for key, _members, _rank, _candidates in open_rows:
            self._known.setdefault(key, Verdict(False))

    def _ask(self, asked: Sequence[tuple[bytes, Bin, int]]) -> None:
        for start in range(0, len(asked), _BATCH):
            if self.problem.out_of_time():
                raise OutOfTime
            part = asked[start : start + _BATCH]
            bins = [each for _, each, _ in part]
            evaluations = self.problem.predictor.evaluate(self.classes.fleet, bins)
            self.asked += len(bins)
            admissible = self.problem.objective.admissible(evaluations)
            for i in np.flatnonzero(admissible).tolist():
                key, each, n = part[i]
                if key not in self._known:
                    self._known[key] = Verdict(True, each.max_loras, evaluations[i])
                    self._preferred[each.max_lora_rank, n.bit_length()] = each.max_loras

    def known(self) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Every vector judged so far, int64 (m, K), and whether it was feasible, bool (m,)."""
        rows = np.array([np.frombuffer(key, dtype=np.int64) for key in self._known], dtype=np.int64)
        verdicts = np.array([verdict.feasible for verdict in self._known.values()], dtype=bool)
        return rows.reshape(-1, len(self.classes)), verdicts

    def violations(self, sample: int = 1500) -> int:
        """Pairs among the bins judged where the heavier one is feasible and the lighter one is not.

        Predictors are not exactly monotone, and what is proven by dominance holds up to these. At most the
        `sample` last bins of each verdict are compared.
        """
        rows, verdicts = self.known()
        good, bad = rows[verdicts][-sample:], rows[~verdicts][-sample:]
        return sum(int(np.all(good >= each, axis=1).sum()) for each in bad)


def real_bins(
    problem: Problem, sets: Sequence[tuple[int, ...]], *, hints: Sequence[int] | None = None
) -> list[Bin | None]:
    """Bins of these adapters of the real fleet, with the best `max_loras`; None where no candidate is
    feasible.

    Best: the smallest mean ITL plus TTFT among the admissible ones. `hints` are values of `max_loras` to try
    beyond the candidates. Never raises `OutOfTime`: it ends a search.
    """
    bins: list[Bin] = []
    owners: list[int] = []
    for owner, adapters in enumerate(sets):
        rank = slot_rank_for(int(problem.workload.ranks[list(adapters)].max()))
        values = set(max_loras_candidates(len(adapters)))
        if hints is not None:
            values.add(hints[owner])
        for p in sorted(values):
            bins.append(Bin(adapters, p, rank, problem.profile))
            owners.append(owner)
    best: list[Bin | None] = [None] * len(sets)
    best_latency = [float("inf")] * len(sets)
    if not bins:
        return best
    evaluations = problem.predictor.evaluate(problem.workload, bins)
    admissible = problem.objective.admissible(evaluations)
    latency = np.nan_to_num(evaluations.mean_itl_ms + evaluations.mean_ttft_ms, nan=1e300)
    for i in np.flatnonzero(admissible).tolist():
        if latency[i] < best_latency[owners[i]]:
            best[owners[i]], best_latency[owners[i]] = bins[i], float(latency[i])
    return best


def has_classes(workload: Workload) -> str | None:
    """Why adapters of this fleet can't be counted in classes, or None if they can."""
    if workload.arrivals.trace is not None:
        return "A replayed trace gives every adapter its own requests: use Poisson arrivals (rates) instead."
    return None
