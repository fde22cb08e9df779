"""Column generation over base models and kinds of server: every pattern has a kind and a price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.solvers.base import Problem
from packer.solvers.by_model import Part
from packer.solvers.classes import FloatArray, IntArray, aggregate
from packer.solvers.exact.master import Master, solve_relaxation
from packer.solvers.exact.prices import features
from packer.solvers.feasibility import Feasibility, OutOfTime
from packer.solvers.mixed.source import Source

MOST_CLASSES = 96
"""Classes of each base model; adapters of near rates are merged beyond."""

NEW_COLUMNS = 8
STARTS = 8
_FAR = 0.9
_RESTS = 4
_SMOOTHING = 0.6
_EPSILON = 1e-6


class Columns:
    """The relaxation of the pattern model of a problem in parts.

    `sources`: one for each base model and kind of server that serves it.
    `demand`: what the patterns have to hold, int64 (K + S,): the adapters of each class, model after model, and the
    negative of the GPUs at hand of each limited kind.
    `weights`: of each class, float64 (K + S,): of each model those of the highest bound so far.
    """

    def __init__(self, problem: Problem, parts: Sequence[Part]) -> None:
        self.problem, self.parts = problem, parts
        rng = np.random.default_rng(problem.seed)
        self.classes = [aggregate(part.problem.workload, max_classes=MOST_CLASSES) for part in parts]
        self.sources: list[Source] = []
        for m, part in enumerate(parts):
            lowest = aggregate(part.problem.workload, max_classes=MOST_CLASSES, optimistic=True)
            for profile in part.problem.profiles:
                alone = replace(part.problem, profiles=(profile,))
                mean = Feasibility(alone, self.classes[m])
                light = Feasibility(alone, lowest) if self.classes[m].loss else mean
                self.sources.append(Source(m, problem.objective.weight(profile), mean, light, rng))
        self.starts = np.concatenate([[0], np.cumsum([len(each) for each in self.classes])])
        self.stock = list(problem.stock)
        at_hand = -np.array(list(problem.stock.values()), dtype=np.int64)
        self.demand = np.concatenate([*(each.demand for each in self.classes), at_hand]).astype(np.int64)
        self.master: Master | None = None
        self.weights = np.zeros(len(self.demand))
        self._promised = np.zeros(len(parts))
        self.converged = False

    def start(self, bins: Sequence[tuple[Source, IntArray]]) -> bool:
        """Pool of these patterns and the fullest ones of each class alone; False if a class fits no kind."""
        for source, row in bins:
            if source.mean.feasible(row[None, :])[0]:
                source.add(row[None, :])
        for source in self.sources:
            source.start()
        return all(
            np.max([s.patterns.max(axis=0, initial=0) for s in self.sources if s.part == m], axis=0).all()
            for m in range(len(self.parts))
        )

    def stacked(self) -> tuple[IntArray, FloatArray, list[tuple[int, int]]]:
        """All patterns (m, K + S), their prices (m,), and the source and row of each."""
        blocks, prices, owners = [], [], []
        for k, source in enumerate(self.sources):
            block = np.zeros((len(source.patterns), len(self.demand)), dtype=np.int64)
            block[:, self._of(source)] = source.patterns
            if source.gpu in self.stock:
                block[:, self.starts[-1] + self.stock.index(source.gpu)] = -source.gpus
            blocks.append(block)
            prices.append(np.full(len(block), source.price))
            owners += [(k, row) for row in range(len(block))]
        return np.concatenate(blocks), np.concatenate(prices), owners

    def warm(self, until_s: float) -> None:
        """Generate patterns for weights that are sums of a few prices, which come near the best ones in a few rounds.

        The first weights are prices per load. Raises `OutOfTime`.
        """
        from scipy.linalg import block_diag

        for m in range(
            len(self.parts)
        ):  # what each class costs on its best kind if servers were full of load
            own = [source.price * source.sizes() for source in self.sources if source.part == m]
            self.weights[self.starts[m] : self.starts[m + 1]] = np.min(own, axis=0)
        few = block_diag(*(features(each) for each in self.classes), np.eye(len(self.stock)))
        self._generate(few, until_s)

    def run(self, until_s: float) -> None:
        """Generate patterns until none improves the relaxation, or so many seconds are left; raises `OutOfTime`."""
        self.converged = self._generate(np.eye(len(self.demand)), until_s)

    def _generate(self, basis: FloatArray, until_s: float) -> bool:
        """Generate patterns for weights `basis` (K + S, D) @ prices; whether none improves the relaxation any more.

        Priced at a mean of the master's duals and the best weights so far, which settles much faster than the duals
        alone (A. Pessoa et al.: Automation and combination of linear-programming based stabilization techniques in
        column generation, 2018).
        """
        share = 1.0
        ratios = np.full(len(self.sources), np.inf)
        rest = np.zeros(len(self.sources), dtype=np.int64)
        while self.problem.remaining_s() > until_s:
            if self.problem.out_of_time():
                raise OutOfTime
            patterns, prices, owners = self.stacked()
            master = solve_relaxation(patterns @ basis, self.demand @ basis, prices)
            if master is None:
                return False
            duals = basis @ master.duals
            self.master = replace(master, duals=duals)
            at = share * self.weights + (1.0 - share) * duals
            used = [owners[j] for j in np.flatnonzero(self.master.use > 0.0).tolist()]
            added = 0
            for k in np.flatnonzero(rest == 0).tolist():
                new, ratios[k] = self._priced(k, at, duals, used)
                added += new
            rest = np.maximum(0, rest - 1)
            rested = rest.any()
            for m in range(len(self.parts)):
                own_ratios = np.array([source.part == m for source in self.sources])
                top = float(ratios[own_ratios].max())
                # a kind that is far from worth its price is looked at now and then
                rest[own_ratios & (ratios < _FAR * top) & (rest == 0)] = _RESTS
                classes = slice(self.starts[m], self.starts[m + 1])
                # the classes' weights over the ratio are a feasible dual (A. A. Farley: A note on bounding a class of
                # linear programming problems, 1990)
                promised = float(at[classes] @ self.demand[classes]) / top if top > 0.0 else 0.0
                if promised > self._promised[m]:
                    self.weights[classes], self._promised[m] = at[classes], promised
                    self.weights[self.starts[-1] :] = at[self.starts[-1] :]
            if added:
                share = min(share, _SMOOTHING)
            elif rested:
                rest[:] = 0
            elif share == 0.0:
                return True
            else:
                share = 0.0 if share <= _SMOOTHING else _SMOOTHING
        return False

    def _priced(
        self, k: int, at: FloatArray, duals: FloatArray, used: Sequence[tuple[int, int]]
    ) -> tuple[int, float]:
        """Look for patterns of a source at the weights `at`.

        How many were added that improve the relaxation, and the largest weight over price of all.
        """
        source = self.sources[k]
        weights, own = at[self._of(source)], duals[self._of(source)]
        bases = source.patterns[[row for owner, row in used if owner == k]]
        found = source.search(weights, bases, STARTS)
        better = found[found @ own > self._effective(source, duals) * (1.0 + _EPSILON)]
        heaviest = float((np.concatenate([found, source.patterns]) @ weights).max(initial=0.0))
        ratio = heaviest / self._effective(source, at)
        return source.add(better[:NEW_COLUMNS]) if len(better) else 0, ratio

    def _of(self, source: Source) -> slice:
        """The classes of its model."""
        return slice(self.starts[source.part], self.starts[source.part + 1])

    def _effective(self, source: Source, duals: FloatArray) -> float:
        """The price of a server with what the GPUs at hand are worth."""
        if source.gpu not in self.stock:
            return source.price
        worth = float(duals[self.starts[-1] + self.stock.index(source.gpu)])
        return source.price + worth * source.gpus
