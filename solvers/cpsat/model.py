"""The repacking model: adapters of a few bins, into so many bins, by CP-SAT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from packer.solvers.classes import IntArray
from packer.solvers.cpsat import constraints, objective
from packer.solvers.cpsat.surrogate import Option
from packer.solvers.cpsat.variables import Variables


class RepackModel:
    """Integer counts n[class, bin] and slots for each bin; limits or costs from the options.

    Parameters
    ----------
    demand
        What the bins hold together, int64 (K,).
    ranks
        Rank of each class, int64 (K,).
    dominates
        [i, j]: an adapter of class i is at least as heavy as one of class j, bool (K, K).
    options
        Kinds of slots with their weights; not empty.
    bins
        How many bins there are.
    most
        No bin weighs more.
    """

    def __init__(
        self,
        demand: IntArray,
        ranks: IntArray,
        dominates: npt.NDArray[np.bool_],
        options: Sequence[Option],
        *,
        bins: int,
        most: int,
    ) -> None:
        self._dominates = dominates
        self.model = cp_model.CpModel()
        self.variables = Variables.create(self.model, demand, options, bins, most)
        constraints.cover(self.model, self.variables, demand)
        constraints.slots(self.model, self.variables, options, ranks)
        constraints.order(self.model, self.variables)
        objective.lightest(self.model, self.variables)
        self._cuts = 0

    def hint(self, rows: Sequence[IntArray]) -> None:
        """Start the search at these bins, fullest first; their number may differ. Call once."""
        ordered = sorted(rows, key=lambda row: -int(row.sum()))
        for counts, row in zip(self.variables.counts, ordered, strict=False):
            for variable, value in zip(counts, row.tolist(), strict=True):
                self.model.add_hint(variable, value)

    def forbid(self, rejected: IntArray) -> None:
        """No bin may be as heavy as what is known to be infeasible."""
        constraints.no_good(self.model, self.variables, rejected, self._dominates, f"cut{self._cuts}")
        self._cuts += 1

    def solve(self, *, time_limit_s: float, seed: int) -> tuple[list[IntArray] | None, bool]:
        """Bins as counts, or None; and whether None is a proof that no such bins exist."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, time_limit_s)
        solver.parameters.num_workers = 1
        solver.parameters.catch_sigint_signal = False  # else Ctrl-C would end the process from now on
        solver.parameters.random_seed = seed
        # Near the best is good enough: what counts is whether the predictor takes it.
        solver.parameters.relative_gap_limit = 0.02
        solver.parameters.max_deterministic_time = max(0.05, time_limit_s)
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, status == cp_model.INFEASIBLE
        rows = [
            np.array([solver.value(variable) for variable in counts], dtype=np.int64)
            for counts in self.variables.counts
        ]
        return rows, False


@dataclass(frozen=True)
class Task:
    """One repacking as plain data, so that it can be solved in another process."""

    demand: IntArray
    ranks: IntArray
    dominates: npt.NDArray[np.bool_]
    options: tuple[Option, ...]
    bins: int
    most: int
    start: tuple[IntArray, ...]
    rejected: tuple[IntArray, ...] = ()
    time_limit_s: float = 1.0
    seed: int = 0

    def without(self, rejected: Sequence[IntArray]) -> Task:
        """The same task with more bins known to be infeasible."""
        return replace(self, rejected=(*self.rejected, *rejected))


def solve_task(task: Task) -> list[IntArray] | None:
    """Bins as counts (K,), or None if there are none within the limits, or none was found in time."""
    held = np.flatnonzero(task.demand)
    options = [replace(option, weights=option.weights[held]) for option in task.options]
    model = RepackModel(
        task.demand[held],
        task.ranks[held],
        task.dominates[np.ix_(held, held)],
        options,
        bins=task.bins,
        most=task.most,
    )
    model.hint([row[held] for row in task.start])
    for row in task.rejected:
        if np.all(row[task.demand == 0] == 0):  # others can't come up here
            model.forbid(row[held])
    rows, _ = model.solve(time_limit_s=task.time_limit_s, seed=task.seed)
    if rows is None:
        return None
    full = np.zeros((len(rows), len(task.demand)), dtype=np.int64)
    full[:, held] = rows
    return list(full)
