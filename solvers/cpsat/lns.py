"""Large-neighbourhood search: repack a few bins at a time, and keep what the predictor confirms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.classes import Classes, FloatArray, IntArray, aggregate
from packer.solvers.cpsat.model import Task, solve_task
from packer.solvers.cpsat.surrogate import SCALE, Option, fit_costs, fit_limits, sample
from packer.solvers.feasibility import real_bins

_TOLERANCE = 0.03
_SAMPLES = 120
_CUT_ROUNDS = 6
_SOLVE_S = 1.5
_PATIENCE = 12
_REMEMBERED_CUTS = 60


@dataclass
class Statistics:
    """What the search did."""

    neighbourhoods: int = 0
    improvements: int = 0
    rejected_bins: int = 0


class Search:
    """The plan at hand and how it is improved; works for GPU counts and for a fixed number of GPUs.

    Parameters
    ----------
    problem
        What is minimised, the evaluator, the clock.
    bins
        A complete plan without replicas; never made worse.
    pool
        Where to solve disjoint neighbourhoods at once; None solves one at a time here.
    workers
        How many at once.
    """

    def __init__(
        self, problem: Problem, bins: Sequence[Bin], pool: Executor | None = None, workers: int = 1
    ) -> None:
        self.problem, self.bins = problem, list(bins)
        self.statistics = Statistics()
        self._classes: Classes = aggregate(problem.workload)
        self._rng = np.random.default_rng(problem.seed)
        self._pool, self._workers = pool, workers
        self._rejected: list[IntArray] = []
        self._options: list[Option] = []
        self._age = _PATIENCE
        self._key = self._key_of(self.bins)

    def run(self, enough: Callable[[int], bool] = lambda _gpus: False) -> tuple[Bin, ...]:
        """Improve until `enough(GPUs)`, the time is up, or nothing helped for a while."""
        idle = 0
        while idle < _PATIENCE and len(self.bins) > 1 and not enough(len(self.bins)):
            if self.problem.out_of_time():
                break
            improved = self._step()
            idle = 0 if improved else idle + 1
            done = self.statistics.neighbourhoods
            self.problem.progress(f"cpsat: {len(self.bins)} GPUs", done, 0)
        return tuple(self.bins)

    def _step(self) -> bool:
        self._refit()
        if not self._options:
            return False
        tasks = [(chosen, self._task(chosen)) for chosen in self._neighbourhoods()]
        improved = False
        for _ in range(_CUT_ROUNDS):
            if not tasks or self.problem.out_of_time():
                break
            again = []
            for (chosen, task), rows in zip(tasks, self._solve(task for _, task in tasks), strict=True):
                refused = self._try(chosen, rows) if rows is not None else []
                if refused is None:
                    improved = True
                elif refused:
                    again.append((chosen, task.without(refused)))
            # Positions of bins change when a plan is accepted: what is left over is chosen anew.
            tasks = [] if improved else again
        return improved

    def _solve(self, tasks: Iterable[Task]) -> list[list[IntArray] | None]:
        listed = list(tasks)
        self.statistics.neighbourhoods += len(listed)
        if self._pool is None:
            return [solve_task(task) for task in listed]
        return list(self._pool.map(solve_task, listed))

    def _refit(self) -> None:
        """Sample around the plan at hand now and then."""
        if self._age < _PATIENCE:
            self._age += 1
            return
        self._age = 0
        counts = [self._classes.counts(each.adapters) for each in self.bins]
        found = sample(self.problem, self._classes, counts, self._rng, _SAMPLES)
        fixed = self.problem.objective.fixed_gpus
        self._options = fit_costs(self._classes, found) if fixed else fit_limits(self._classes, found)

    def _neighbourhoods(self) -> list[list[int]]:
        """Disjoint sets of positions: the bin to dissolve or to relieve, and a few others."""
        fixed = self.problem.objective.fixed_gpus
        weight = self._costs() if fixed else self._loads()
        ranked = np.argsort(-weight if fixed else weight, kind="stable").tolist()
        free = set(range(len(self.bins)))
        found: list[list[int]] = []
        while len(free) >= 2 and len(found) < self._workers:
            first = next(i for i in ranked if i in free)
            if self._rng.random() < 0.25:
                first = int(self._rng.choice(sorted(free)))
            free.discard(first)
            size = min(len(free), int(self._rng.integers(1, 5)))
            # Emptier bins are likelier companions: they have room.
            emptiness = np.array([1.0 / (weight[i] + 1e-9) for i in sorted(free)])
            others = self._rng.choice(
                sorted(free), size=size, replace=False, p=emptiness / emptiness.sum()
            ).tolist()
            free.difference_update(others)
            found.append([first, *others])
        return found

    def _loads(self) -> FloatArray:
        return np.array([each.offered_tok_s(self.problem.workload) for each in self.bins])

    def _costs(self) -> FloatArray:
        found = self.problem.evaluator.evaluate(self.problem.workload, self.bins)
        one = type(found)
        key = self.problem.objective.key
        costs = [
            key(self.problem.workload, [each], one.of([found[i]]))[0] for i, each in enumerate(self.bins)
        ]
        return np.asarray(np.nan_to_num(np.array(costs), nan=1e12), dtype=np.float64)

    def _task(self, chosen: Sequence[int]) -> Task:
        fixed = self.problem.objective.fixed_gpus
        rows = [self._classes.counts(self.bins[i].adapters) for i in chosen]
        bins = len(chosen) if fixed else len(chosen) - 1
        most = 100 * SCALE if fixed else int(SCALE * (1.0 + _TOLERANCE))
        return Task(
            demand=np.sum(rows, axis=0),
            ranks=self._classes.ranks,
            dominates=self._classes.dominates,
            options=tuple(self._options),
            bins=bins,
            most=most,
            start=tuple(rows if fixed else rows[1:]),
            rejected=tuple(self._rejected[-_REMEMBERED_CUTS:]),
            time_limit_s=min(_SOLVE_S, max(0.05, self.problem.remaining_s())),
            seed=int(self._rng.integers(2**31)),
        )

    def _try(self, chosen: Sequence[int], rows: Sequence[IntArray]) -> list[IntArray] | None:
        """Evaluate a repacking: None if it was accepted, else the bins that the predictor refuses."""
        freed = [i for position in chosen for i in self.bins[position].adapters]
        sets = self._classes.assign(rows, freed)
        made = real_bins(self.problem, sets)
        refused = [row for row, each in zip(rows, made, strict=True) if each is None]
        self.statistics.rejected_bins += len(refused)
        self._rejected.extend(refused)
        if refused:
            return refused
        kept = [each for i, each in enumerate(self.bins) if i not in set(chosen)]
        bins = [*kept, *(each for each in made if each is not None)]
        key = self._key_of(bins)
        if key >= self._key:
            return []
        self.bins, self._key = bins, key
        self.statistics.improvements += 1
        return None

    def _key_of(self, bins: Sequence[Bin]) -> tuple[float, ...]:
        """What the objective minimises, after the number of bins that a plan may not contain."""
        objective = self.problem.objective
        found = self.problem.evaluator.evaluate(self.problem.workload, bins)
        refused = float((~objective.admissible(found)).sum())
        return (refused, *objective.key(self.problem.workload, bins, found))
