"""Sets of adapters of one base model that one kind of server carries."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.solvers.columns.knapsack import Knapsacks
from packer.solvers.columns.pricing import price, singles
from packer.solvers.columns.proof import certify
from packer.solvers.feasibility import Feasibility

PROOF_SLACK = 0.01  # Share by which a proven weight exceeds the heaviest pattern found.
_BOUND_STARTS = 8
_CERTIFIED = 4_000
_NOTHING = 1e-9  # Weight limit, below the weight of any adapter, of a kind that holds no adapter of a class.


@dataclass
class Source:
    """Patterns of one base model on one kind of server.

    `price`: what a server adds to the objective: its price per hour, or its GPUs.
    `mean`: feasibility with the mean rate of each class, for patterns of average adapters.
    `light`: feasibility with the lowest rate of each class, for bounds; `mean` itself if no class is rounded.
    `rng`: gives the noise of the searches for patterns.
    """

    price: float
    mean: Feasibility
    light: Feasibility
    rng: np.random.Generator
    patterns: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self.patterns = np.zeros((0, len(self.mean.classes)), dtype=np.int64)
        self.knapsacks = Knapsacks(self.mean)
        self._light_knapsacks = self.knapsacks if self.light is self.mean else Knapsacks(self.light)

    @property
    def gpu(self) -> str:
        """The name of its GPU."""
        return self.mean.problem.profile.gpu.name

    @property
    def gpus(self) -> int:
        """GPUs of a server."""
        return self.mean.problem.profile.engine.gpus

    def add(self, rows: IntArray) -> int:
        """Add feasible patterns; returns how many were new."""
        before = len(self.patterns)
        self.patterns = distinct(np.concatenate([self.patterns, rows]), axis=0)
        return len(self.patterns) - before

    def start(self, rows: IntArray) -> None:
        """Add these patterns if feasible, and the fullest one of each class that none holds; raises `OutOfTime`."""
        if len(rows):
            self.add(rows[self.mean.feasible(rows)])
        covered = self.patterns.max(axis=0, initial=0) > 0
        if not covered.all():
            alone = singles(self.mean, np.where(covered, 0, self.mean.classes.demand))
            self.add(alone[alone.sum(axis=1) > 0])

    def sizes(self) -> FloatArray:
        """A guess of each class's share of a server, float64 (K,)."""
        return self.mean.classes.loads / max(self.carried(), 1e-12) + 1e-4

    def carried(self) -> float:
        """The largest offered load of a pattern found, tok/s."""
        return float((self.patterns @ self.mean.classes.loads).max(initial=0.0))

    def search(self, weights: FloatArray, bases: IntArray, n_starts: int, limit: IntArray | None = None) -> IntArray:
        """Patterns of high weight (m, K), best first, of at most `limit` (K,) of each class; raises `OutOfTime`."""
        most = self.mean.classes.demand if limit is None else limit
        return price(self.knapsacks, weights, most, self.sizes(), self.rng, bases, n_starts)

    def heaviest(self, weights: FloatArray) -> float:
        """The largest weight of the patterns found, with the lightest adapters of each class; raises `OutOfTime`."""
        rows = self.patterns
        best = rows[np.argsort(-(rows @ weights), kind="stable")[:8]]
        demand = self.light.classes.demand
        found = price(self._light_knapsacks, weights, demand, self.sizes(), self.rng, best, _BOUND_STARTS)
        return float(max((rows @ weights).max(initial=0.0), (found @ weights).max(initial=0.0)))

    def excludes(self, weights: FloatArray, most: float) -> bool:
        """Whether it is certain that no pattern weighs more than `most`; raises `OutOfTime`."""
        # Scaled so that patterns heavier than `most` are just those beyond `above` + `slack`.
        scaled, slack = weights / max(most, _NOTHING) * (1.0 + PROOF_SLACK), PROOF_SLACK / 2.0
        known = self.patterns
        found = certify(self.light, scaled, above=1.0 + slack, slack=slack, budget=_CERTIFIED, known=known)
        monotone = self.light.problem.evaluator.monotone and not self.light.violations
        exact = self.light.classes.exact and monotone
        return found.exhaustive and found.counterexample is None and exact
