"""Column generation: the linear relaxation of the pattern model, and the bound that it proves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.solvers.columns.knapsack import Knapsacks
from packer.solvers.columns.master import Master, solve_relaxation
from packer.solvers.columns.pricing import price, singles
from packer.solvers.columns.proof import Certificate, certify
from packer.solvers.feasibility import Feasibility, OutOfTime

_NEW_COLUMNS = 12
_WARM_ROUNDS, _FEW_STARTS, _STARTS = 60, 6, 24
_SMOOTHING = 0.6
_EPSILON = 1e-6
_SPREAD, _TIES = 0.1, 1e-4
"""Noise of prices for other bins, and noise that breaks ties alone."""
_EACH = 3
MISSED = 0.1
"""By how much the first rounds of a search may miss the heaviest bin: 5 % where it was run to its end."""
SEARCHED_MARGIN = 5e-3
"""Where bins could not be enumerated: the bound allows bins worth this share more than the best one found."""


@dataclass
class Relaxation:
    """State of the column generation over one feasibility.

    `patterns`: feasible bins found so far, int64 (m, K).
    `master`, `pool`: the last optimum, None before the first, and the patterns over which it is one.
    `weights`: what an adapter of each class weighs, float64 (K,), such that no bin found weighs more than 1: the sum
    over all adapters is a bound.
    `priced`: bins heavier than 1 were looked for at least once.
    `converged`: pricing found no bin worth more than 1 at the last duals.
    `bound`: no plan has fewer bins.
    `exhaustive`: the bound is proven by enumeration up to dominance, not by a search that found no better bin.
    `value`, `evaluated_beyond`: the weight of all adapters behind the bound, and how many bins beyond 1 were
    evaluated to support it.
    """

    feasibility: Feasibility
    rng: np.random.Generator
    patterns: IntArray = field(init=False)
    pool: IntArray = field(init=False)
    master: Master | None = None
    weights: FloatArray | None = None
    converged: bool = False
    priced: bool = False
    bound: int = 0
    exhaustive: bool = False
    value: float = 0.0
    evaluated_beyond: int = 0

    def __post_init__(self) -> None:
        self.patterns = self.pool = np.zeros((0, len(self.feasibility.classes)), dtype=np.int64)
        self.knapsacks = Knapsacks(self.feasibility)

    @property
    def demand(self) -> IntArray:
        """What is to be covered, int64 (K,)."""
        return self.feasibility.classes.demand

    def add(self, rows: IntArray) -> int:
        """Add feasible bins to the pool; returns how many were new."""
        before = len(self.patterns)
        self.patterns = np.unique(np.concatenate([self.patterns, rows]), axis=0)
        return len(self.patterns) - before

    def start(self, bins: IntArray) -> bool:
        """Pool of these bins, if feasible, and the fullest one of each class else not held; False if one fits none."""
        if len(bins):
            self.add(bins[self.feasibility.feasible(bins)])
        covered = self.patterns.max(axis=0, initial=0) > 0
        if not covered.all():
            alone = singles(self.feasibility, np.where(covered, 0, self.demand))
            self.add(alone[alone.sum(axis=1) > 0])
        return bool(np.all(self.patterns.max(axis=0, initial=0) > 0))

    def warm(self, features: FloatArray, known: int | None = None) -> None:
        """Generate columns for weights that are sums of a few prices, where `features` (K, D) is what is priced.

        Feasibility depends on the load, the number of adapters and their ranks first of all: few prices come near the
        best weights in a few rounds, however many classes there are. With a `known` bound it ends where no more than
        that can be promised (more columns lower the optimum, which no weights exceed), or no more than is promised
        already, also if bins were `MISSED` heavier than those found.
        """
        sizes, priced = self._sizes(), self.demand @ features
        if self.weights is None:
            self.weights = sizes
        n_starts = _FEW_STARTS
        for _ in range(_WARM_ROUNDS):
            if self.feasibility.problem.out_of_time():
                raise OutOfTime
            master = self._solved(self.patterns @ features, priced)
            if master is None:
                return
            value = float(self.weights @ self.demand)
            safe = _promise((1.0 - MISSED) * value) if self.priced else 0
            if known is not None and _promise(max(float(priced @ master.duals), value)) <= max(known, safe):
                return
            at = features @ master.duals
            bases = self.patterns[master.use > 0.0]
            found = price(self.knapsacks, at, self.demand, sizes, self.rng, bases, n_starts)
            self._keep(at, found)
            self.priced = True
            if not self.add(found[found @ at > 1.0 + _EPSILON][:_NEW_COLUMNS]):
                if n_starts == _STARTS:
                    return
                n_starts = _STARTS

    def run(self, enough: Callable[[], bool], *, to_the_end: bool = False) -> None:
        """Generate columns until the weights give a better bound, none improves it, or `enough()` is true.

        Priced at a mean of the master's duals and the best weights so far, which settles much faster than the
        duals alone (A. Pessoa et al.: Automation and combination of linear-programming based stabilization
        techniques in column generation, 2018). `to_the_end`: at the duals alone until no bin is worth more
        than 1, for the patterns rather than the bound.
        """
        sizes, classes = self._sizes(), self.feasibility.classes
        estimated = (
            self.feasibility.problem.evaluator.confirms or classes.loss > 0.0
        )  # better weights prove nothing
        share = 0.0 if to_the_end else 1.0
        if self.weights is None:
            self.weights = sizes
        while not enough():
            if self.feasibility.problem.out_of_time():
                raise OutOfTime
            self.master, self.pool = self._solved(self.patterns, self.demand), self.patterns
            if self.master is None:
                self.converged = True
                return
            if estimated and not to_the_end and _promise(self.master.value) <= self.bound:
                self.converged = True  # no weights of all adapters exceed the optimum over some patterns
                return
            duals = self.master.duals
            at = share * self.weights + (1.0 - share) * duals
            found = price(
                self.knapsacks, at, self.demand, sizes, self.rng, self.patterns[self.master.use > 0.0]
            )
            self._keep(at, found)
            better = found[found @ duals > 1.0 + _EPSILON][:_NEW_COLUMNS]
            if self.add(better):
                share = min(share, _SMOOTHING)
            elif share == 0.0:
                self.converged = True
                return
            else:
                share = 0.0 if share <= _SMOOTHING else _SMOOTHING
            if not to_the_end and self.promised > self.bound:
                return

    def _solved(self, patterns: IntArray | FloatArray, demand: IntArray | FloatArray) -> Master | None:
        """The relaxation over these patterns; None if they can't cover the demand. Raises `OutOfTime`."""
        problem = self.feasibility.problem
        found = solve_relaxation(patterns, demand, time_limit_s=problem.remaining_s())
        if found is None and problem.out_of_time():
            raise OutOfTime
        return found

    @property
    def promised(self) -> int:
        """The bound by the weights, if the search for the heaviest bin missed little."""
        return 0 if self.weights is None else _promise(float(self.weights @ self.demand))

    def _keep(self, weights: FloatArray, found: IntArray) -> None:
        """Keep the weights if, with the heaviest bin known scaled to 1, all adapters weigh more than before."""
        heaviest = max(
            float((found @ weights).max(initial=0.0)), float((self.patterns @ weights).max(initial=0.0))
        )
        if heaviest > 0.0:
            scaled = weights / heaviest
            assert self.weights is not None
            old = self.weights / max(1.0, float((found @ self.weights).max(initial=0.0)))
            self.weights = scaled if scaled @ self.demand > old @ self.demand else old

    def prove(self, target: int, budget: int) -> bool:
        """Look for bins that refute that bound; False if one was found (run again).

        `target` is the number of bins of the plan at hand: no more is worth proving.
        """
        if self.weights is None:
            return True
        value = float(self.weights @ self.demand)
        searched = min(target, self.promised)
        for bins in sorted({min(target, math.ceil(value - _EPSILON)), searched}, reverse=True):
            if bins <= self.bound:
                continue
            # All bins worth at most `most` make more than `bins` − 1 of them necessary.
            most = value / max(bins - 1, _EPSILON) * (1.0 - 1e-9)
            above = (
                1.0 + most
            ) / 2.0  # half for bins a little heavier than known ones, half for rounded counts
            found = Certificate(False, 0)
            if most > 1.0 + _EPSILON:
                slack = most - above
                found = certify(
                    self.feasibility,
                    self.weights,
                    above=above,
                    slack=slack,
                    budget=budget,
                    known=self.patterns,
                )
            if found.counterexample is not None:
                self.add(found.counterexample[None, :])
                self.weights = self.weights / float(found.counterexample @ self.weights)
                return False
            self.evaluated_beyond = max(self.evaluated_beyond, found.evaluated)
            if found.exhaustive or bins == searched:
                self.bound, self.exhaustive, self.value = bins, found.exhaustive, value
                return True
        return True

    def diversify(self, target: int) -> int:
        """Add bins that a plan of `target` bins may consist of; returns how many were new.

        At the mean of the duals and the best weights, shaken by noise, and with one adapter of each class in turn. If
        no bin is worth more than 1, none in such a plan is worth less by more than the bins that it has beyond the
        worth of all adapters: others are left out.
        """
        if self.master is None or self.weights is None:
            return 0
        at, demand = (self.master.duals + self.weights) / 2.0, self.demand
        bases = self.pool[self.master.use > _EPSILON]
        weights = at * np.exp(self.rng.normal(0.0, _SPREAD, len(at)))
        rows = price(self.knapsacks, weights, demand, self._sizes(), self.rng, bases)
        if not self.feasibility.problem.evaluator.simulates:
            held = np.repeat(np.flatnonzero(at > _EPSILON), _EACH).tolist()
            ties = np.exp(self.rng.normal(0.0, _TIES, (len(held), len(at))))
            rows = np.concatenate([rows, self.knapsacks.alike(at * ties, demand, held)])
        slack = max(0.0, target - float(at @ demand))
        return self.add(rows[rows @ at >= 1.0 - slack - _EPSILON])

    def _sizes(self) -> FloatArray:
        """A guess of each class's share of a bin, from the fullest bins of one class and the loads."""
        loads = self.feasibility.classes.loads
        carried = float((self.patterns @ loads).max(initial=0.0))
        return loads / max(carried, 1e-12) + 1e-4


def _promise(value: float) -> int:
    return math.ceil(value / (1.0 + SEARCHED_MARGIN) - _EPSILON)
