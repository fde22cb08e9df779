"""Column generation: the linear relaxation of the pattern model, and the bound that it proves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from packer.solvers.classes import FloatArray, IntArray
from packer.solvers.exact.master import Master, solve_relaxation
from packer.solvers.exact.pricing import price, singles
from packer.solvers.exact.proof import Certificate, certify
from packer.solvers.oracle import Oracle

_NEW_COLUMNS = 12
_EPSILON = 1e-6
SEARCHED_MARGIN = 2.5e-3
"""Where bins could not be enumerated: the bound allows bins worth this share more than the best one found."""


@dataclass
class Relaxation:
    """State of the column generation over one oracle.

    Attributes
    ----------
    patterns
        Feasible bins found so far, int64 (m, K).
    master
        The last optimum over them, None before the first.
    converged
        Pricing found no bin worth more than 1 at the last duals, or none worth enough to change the bound.
    best
        The largest worth that the last pricing found, at least 1.
    bound
        No plan has fewer bins.
    exhaustive
        The bound is proven by enumeration up to dominance, not by a search that found no better bin.
    """

    oracle: Oracle
    rng: np.random.Generator
    patterns: IntArray = field(init=False)
    master: Master | None = None
    converged: bool = False
    best: float = 1.0
    bound: int = 0
    exhaustive: bool = False
    judged_beyond: int = 0

    def __post_init__(self) -> None:
        self.patterns = np.zeros((0, len(self.oracle.classes)), dtype=np.int64)

    @property
    def demand(self) -> IntArray:
        """What is to be covered, int64 (K,)."""
        return self.oracle.classes.demand

    def add(self, rows: IntArray) -> int:
        """Add feasible bins to the pool; returns how many were new."""
        before = len(self.patterns)
        self.patterns = np.unique(np.concatenate([self.patterns, rows]), axis=0)
        return len(self.patterns) - before

    def start(self, bins: IntArray) -> bool:
        """Pool of these feasible bins and the fullest one of each class; False if a class fits nowhere.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        if len(bins):
            self.add(bins[self.oracle.feasible(bins)])
        alone = singles(self.oracle, self.demand)
        self.add(alone[alone.sum(axis=1) > 0])
        return bool(np.all(self.patterns.max(axis=0, initial=0) > 0))

    def run(self, enough: Callable[[], bool], *, to_the_end: bool = False) -> None:
        """Generate columns until they don't change the bound any more, or `enough()` says so.

        `to_the_end`: until none is worth more than 1, for the patterns rather than the bound.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        sizes = self._sizes()
        while not enough():
            self.master = solve_relaxation(self.patterns, self.demand)
            if self.master is None:
                return
            duals = self.master.duals
            bases = self.patterns[self.master.use > _EPSILON]
            found = price(self.oracle, duals, self.demand, sizes, self.rng, bases)
            self.best = max(1.0, float((found @ duals).max(initial=1.0)))
            better = found[found @ duals > 1.0 + _EPSILON][:_NEW_COLUMNS]
            added = self.add(better)
            goal = math.ceil(self.master.value - _EPSILON)
            settled = self.master.value / (self.best * (1.0 + SEARCHED_MARGIN)) > goal - 1 + _EPSILON
            if not added or (settled and not to_the_end):
                self.converged = True
                return

    def prove(self, target: int | None, budget: int) -> bool:
        """Try to prove the bound that the duals promise; False if a better bin was found (run again).

        `target` is the number of bins of the plan at hand: no more is worth proving.
        """
        if self.master is None or not self.converged:
            return True
        value, duals = self.master.value, self.master.duals
        goal = math.ceil(value - _EPSILON)
        if target is not None:
            goal = min(goal, target)
        searched = min(goal, math.ceil(value / (self.best * (1.0 + SEARCHED_MARGIN)) - _EPSILON))
        for bins in sorted({goal, searched}, reverse=True):
            if bins <= self.bound:
                continue
            found = self.certify(duals, value, bins, budget)
            if found.counterexample is not None:
                self.add(found.counterexample[None, :])
                self.converged = False
                return False
            self.judged_beyond = max(self.judged_beyond, found.judged)
            if found.exhaustive or bins == searched:
                self.bound, self.exhaustive = bins, found.exhaustive
                return True
        return True

    def diversify(self, spread: float) -> int:
        """Add bins that are good at duals shaken by noise of this spread; returns how many were new.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        if self.master is None:
            return 0
        weights = self.master.duals * np.exp(self.rng.normal(0.0, spread, len(self.master.duals)))
        bases = self.patterns[self.master.use > _EPSILON]
        found = price(self.oracle, weights, self.demand, self._sizes(), self.rng, bases)
        return self.add(found[found @ self.master.duals > 0.9])

    def certify(self, weights: FloatArray, value: float, bins: int, budget: int) -> Certificate:
        """Look for a feasible bin so heavy that fewer than `bins` might carry the whole weight `value`.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        if bins <= 1:
            return Certificate(True, 0)
        # All bins worth at most `most` make more than `bins` − 1 of them necessary.
        most = value / (bins - 1) * (1.0 - 1e-9)
        if most <= self.best + _EPSILON:
            return Certificate(False, 0)
        # Half of the room for bins a little better than the known ones, half for the rounding of counts.
        above = (self.best + most) / 2.0
        return certify(
            self.oracle, weights, self.demand, above=above, slack=most - above, budget=budget, rng=self.rng
        )

    def _sizes(self) -> FloatArray:
        """A guess of each class's share of a bin, from the fullest bins of one class and the loads."""
        loads = self.oracle.classes.loads
        carried = float((self.patterns @ loads).max(initial=0.0))
        return loads / max(carried, 1e-12) + 1e-4
