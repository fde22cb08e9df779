"""Column generation over base models and kinds of server: every pattern has a kind and a price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from packer.solvers.base import Problem
from packer.solvers.by_model import Part
from packer.solvers.classes import FloatArray, IntArray, aggregate
from packer.solvers.exact.knapsack import Knapsacks
from packer.solvers.exact.master import Master, solve_relaxation
from packer.solvers.exact.pricing import price, singles
from packer.solvers.exact.proof import certify
from packer.solvers.feasibility import Feasibility, OutOfTime
from packer.solvers.mixed.sums import next_sum

MOST_CLASSES = 96
"""Classes of each base model; adapters of near rates are merged beyond."""

SEARCHED_MARGIN = 5e-3
"""By how much better than the best pattern found one may be that the search missed: the bound allows for it."""

_NEW_COLUMNS = 8
_STARTS = 8
_DIVE_STARTS = 3
_FAR = 0.9
_RESTS = 4
_BOUND_STARTS = 8
_SMOOTHING = 0.6
_EPSILON = 1e-6
_CERTIFIED = 4_000
_MOST_CERTIFIED = 24
_PROOF_SLACK = 0.01


@dataclass
class Source:
    """Patterns of one base model on one kind of server.

    Parameters
    ----------
    part
        Which of the parts of the problem.
    price
        What a server adds to the objective: its price per hour, or its GPUs.
    mean
        Feasibility with the mean rate of each class, for patterns that adapters fill on average.
    light
        The same with the lowest rates, for bounds.
    """

    part: int
    price: float
    mean: Feasibility
    light: Feasibility
    patterns: IntArray = field(init=False)

    def __post_init__(self) -> None:
        self.patterns = np.zeros((0, len(self.mean.classes)), dtype=np.int64)
        self.mean_knapsacks, self.light_knapsacks = Knapsacks(self.mean), Knapsacks(self.light)

    def add(self, rows: IntArray) -> int:
        """Add feasible patterns; returns how many were new."""
        before = len(self.patterns)
        self.patterns = np.unique(np.concatenate([self.patterns, rows]), axis=0)
        return len(self.patterns) - before

    def sizes(self) -> FloatArray:
        """A guess of each class's share of a server, float64 (K,)."""
        loads = self.mean.classes.loads
        carried = float((self.patterns @ loads).max(initial=0.0))
        sizes: FloatArray = loads / max(carried, 1e-12) + 1e-4
        return sizes


class Columns:
    """The relaxation of the pattern model of a problem in parts.

    Attributes
    ----------
    sources
        One for each base model and kind of server that serves it.
    demand
        What the patterns have to hold, int64 (K + S,): the adapters of each class, model after model, and the
        negative of the GPUs at hand of each limited kind.
    """

    def __init__(self, problem: Problem, parts: Sequence[Part]) -> None:
        self.problem, self.parts = problem, parts
        self.rng = np.random.default_rng(problem.seed)
        fleets = [part.problem.workload for part in parts]
        light = [aggregate(fleet, max_classes=MOST_CLASSES, optimistic=True) for fleet in fleets]
        self.classes = [aggregate(fleet, max_classes=MOST_CLASSES) for fleet in fleets]
        self.sources = [
            Source(
                m,
                problem.objective.weight(alone.profile),
                Feasibility(alone, self.classes[m]),
                Feasibility(alone, light[m]),
            )
            for m, part in enumerate(parts)
            for alone in _kinds(part.problem)
        ]
        self.starts = np.concatenate([[0], np.cumsum([len(each) for each in self.classes])])
        self.stock = list(problem.stock)
        at_hand = [-count for count in problem.stock.values()]
        self.demand = np.concatenate(
            [*(each.demand for each in self.classes), np.array(at_hand, dtype=np.int64)]
        )
        self.demand = self.demand.astype(np.int64)
        self.master: Master | None = None
        self.weights = np.zeros(len(self.demand))
        self.converged = False

    def start(self, bins: Sequence[tuple[Source, IntArray]]) -> bool:
        """Pool of these patterns and the fullest ones of each class alone; False if a class fits no kind.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        for source, row in bins:
            if source.mean.feasible(row[None, :])[0]:
                source.add(row[None, :])
        for source in self.sources:
            alone = singles(source.mean, source.mean.classes.demand)
            source.add(alone[alone.sum(axis=1) > 0])
        held = np.concatenate(
            [
                np.max([s.patterns.max(axis=0, initial=0) for s in self.sources if s.part == m], axis=0)
                for m in range(len(self.parts))
            ]
        )
        return bool(np.all(held > 0))

    def stacked(self) -> tuple[IntArray, FloatArray, list[tuple[int, int]]]:
        """All patterns (m, K + S), their prices (m,), and the source and row of each."""
        blocks, prices, owners = [], [], []
        for k, source in enumerate(self.sources):
            first = int(self.starts[source.part])
            block = np.zeros((len(source.patterns), len(self.demand)), dtype=np.int64)
            block[:, first : first + source.patterns.shape[1]] = source.patterns
            profile = source.mean.problem.profile
            if profile.gpu.name in self.stock:
                column = int(self.starts[-1]) + self.stock.index(profile.gpu.name)
                block[:, column] = -profile.engine.tensor_parallel_size
            blocks.append(block)
            prices.append(np.full(len(block), source.price))
            owners += [(k, row) for row in range(len(block))]
        return np.concatenate(blocks), np.concatenate(prices), owners

    def run(self, until_s: float) -> None:
        """Generate patterns until none improves the relaxation, or only so many seconds are left.

        Priced at a mean of the master's duals and the best weights so far, which settles much faster than the duals
        alone (A. Pessoa et al.: Automation and combination of linear-programming based stabilization techniques in
        column generation, 2018). The first weights are prices per load.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        self.weights = self._first_weights()
        best, share = 0.0, 1.0
        ratios = [np.inf] * len(self.sources)
        rest = [0] * len(self.sources)
        while self.problem.remaining_s() > until_s:
            if self.problem.out_of_time():
                raise OutOfTime
            patterns, prices, owners = self.stacked()
            self.master = solve_relaxation(patterns, self.demand, prices)
            if self.master is None:
                return
            duals = self.master.duals
            at = share * self.weights + (1.0 - share) * duals
            used = [owners[j] for j in np.flatnonzero(self.master.use > 0.0).tolist()]
            added = 0
            for k in range(len(self.sources)):
                if rest[k] == 0:
                    new, ratios[k] = self._priced(k, at, duals, used)
                    added += new
                rest[k] = max(0, rest[k] - 1)
            rested = any(rest)
            for k, ratio in enumerate(
                ratios
            ):  # a kind that is far from worth its price is looked at now and then
                if ratio < _FAR * max(ratios) and not rest[k]:
                    rest[k] = _RESTS
            promised = self._value(at, max(ratios))
            if promised > best:
                self.weights, best = at, promised
            if added:
                share = min(share, _SMOOTHING)
            elif rested:
                rest = [0] * len(rest)
            elif share == 0.0:
                self.converged = True
                return
            else:
                share = 0.0 if share <= _SMOOTHING else _SMOOTHING

    def _first_weights(self) -> FloatArray:
        """What each class costs on its best kind if servers were full of load, float64 (K + S,)."""
        weights = np.zeros(len(self.demand))
        for m in range(len(self.parts)):
            own = [source.price * source.sizes() for source in self.sources if source.part == m]
            weights[self.starts[m] : self.starts[m + 1]] = np.min(own, axis=0)
        return weights

    def _priced(
        self, k: int, at: FloatArray, duals: FloatArray, used: Sequence[tuple[int, int]]
    ) -> tuple[int, float]:
        """Look for patterns of a source at the weights `at`.

        How many were added that improve the relaxation, and the largest weight over price of all.
        """
        source = self.sources[k]
        weights, own = self._own(source, at), self._own(source, duals)
        bases = source.patterns[[row for owner, row in used if owner == k]]
        demand = source.mean.classes.demand
        found = price(source.mean_knapsacks, weights, demand, source.sizes(), self.rng, bases, _STARTS)
        better = found[found @ own > self._effective(source, duals) * (1.0 + _EPSILON)]
        rows = np.concatenate([found, source.patterns])
        ratio = float((rows @ weights).max(initial=0.0)) / self._effective(source, at)
        return source.add(better[:_NEW_COLUMNS]) if len(better) else 0, ratio

    def _value(self, weights: FloatArray, ratio: float) -> float:
        """What all adapters cost at the least, if no pattern weighs more than `ratio` times its price.

        The classes' weights over the ratio are then a feasible dual (A. A. Farley: A note on bounding a class of
        linear programming problems, 1990); GPUs at hand keep theirs.
        """
        last = int(self.starts[-1])
        if ratio <= 0.0:
            return 0.0
        return float(weights[:last] @ self.demand[:last]) / ratio + float(weights[last:] @ self.demand[last:])

    def _own(self, source: Source, duals: FloatArray) -> FloatArray:
        """The duals of the classes of its model, float64 (K,)."""
        return duals[self.starts[source.part] : self.starts[source.part + 1]]

    def _effective(self, source: Source, duals: FloatArray) -> float:
        """The price of a server with what the GPUs at hand are worth."""
        profile = source.mean.problem.profile
        if profile.gpu.name not in self.stock:
            return source.price
        worth = float(duals[int(self.starts[-1]) + self.stock.index(profile.gpu.name)])
        return source.price + worth * profile.engine.tensor_parallel_size

    def bound(self) -> tuple[float, bool]:
        """A lower bound on the price of any plan, and whether it is proven; 0 before the first relaxation.

        By `_value`, for classes at their lowest rates.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        if self.master is None:
            return 0.0, False
        options = []
        for weights in (self.weights, self.master.duals) if self.converged else (self.weights,):
            ratio = max(self._heaviest(source, weights) for source in self.sources)
            options.append((self._value(weights, ratio * (1.0 + SEARCHED_MARGIN)), ratio, weights))
        value, ratio, weights = max(options, key=lambda option: option[0])
        value = max(value, self._rounded_up(weights, ratio * (1.0 + SEARCHED_MARGIN)))
        allowed = ratio * (1.0 + _PROOF_SLACK)
        few = max(map(len, self.classes)) <= _MOST_CERTIFIED
        if value > 0.0 and few and all(self._excluded(source, weights, allowed) for source in self.sources):
            return max(self._value(weights, allowed), self._rounded_up(weights, allowed)), True
        return value, False

    def _rounded_up(self, weights: FloatArray, ratio: float) -> float:
        """As `_value`, each model's part raised to the next sum of prices of its kinds; 0 if models share GPUs."""
        if self.stock:
            return 0.0
        total = 0.0
        for m in range(len(self.parts)):
            first, last = self.starts[m], self.starts[m + 1]
            value = float(weights[first:last] @ self.demand[first:last]) / ratio
            total += next_sum(value - 1e-9, [source.price for source in self.sources if source.part == m])
        return total

    def _heaviest(self, source: Source, weights: FloatArray) -> float:
        """The largest weight over price of the patterns found, with the lightest adapters of each class."""
        rows, own = source.patterns, self._own(source, weights)
        best = rows[np.argsort(-(rows @ own), kind="stable")[:8]]
        found = price(
            source.light_knapsacks,
            own,
            source.light.classes.demand,
            source.sizes(),
            self.rng,
            best,
            _BOUND_STARTS,
        )
        heaviest = max((rows @ own).max(initial=0.0), (found @ own).max(initial=0.0))
        return float(heaviest) / self._effective(source, weights)

    def _excluded(self, source: Source, weights: FloatArray, ratio: float) -> bool:
        """Whether it is certain that no pattern weighs more than `ratio` times its price."""
        found = certify(
            source.light,
            self._own(source, weights) / (self._effective(source, weights) * ratio) * (1.0 + _PROOF_SLACK),
            source.light.classes.demand,
            above=1.0 + _PROOF_SLACK / 2.0,
            slack=_PROOF_SLACK / 2.0,
            budget=_CERTIFIED,
            rng=self.rng,
        )
        sure = source.light.classes.sure and not source.light.violations
        return found.exhaustive and found.counterexample is None and sure

    def dive(self) -> list[tuple[Source, IntArray]] | None:
        """The relaxation rounded down, and for the rest the pattern that is worth most for its price, again and again.

        None if a class is left that fits no kind of which there are GPUs. The patterns join the pool.

        Raises
        ------
        OutOfTime
            The problem's time is up.
        """
        if self.master is None:
            return None
        patterns, _, owners = self.stacked()
        left = self.demand.copy()
        chosen: list[tuple[Source, IntArray]] = []
        for j, times in enumerate(
            np.floor(self.master.use[: len(patterns)] + 1e-6).astype(np.int64).tolist()
        ):
            chosen += [self._take(owners[j][0], patterns[j], left) for _ in range(times)]
        while np.any(left[: self.starts[-1]] > 0):
            best = self._best(left)
            if best is None:
                return None
            chosen.append(best)
        return chosen

    def _take(self, k: int, row: IntArray, left: IntArray) -> tuple[Source, IntArray]:
        """The part of a pattern that is still needed; taken off `left`."""
        source, last = self.sources[k], int(self.starts[-1])
        needed = row.copy()
        needed[:last] = np.minimum(row[:last], np.maximum(left[:last], 0))
        left -= needed
        return source, needed[self.starts[source.part] : self.starts[source.part + 1]]

    def _best(self, left: IntArray) -> tuple[Source, IntArray] | None:
        """The pattern for what is left that is worth most for its price."""
        assert self.master is not None
        options: list[tuple[float, int, IntArray]] = []
        for k, source in enumerate(self.sources):
            first, last = self.starts[source.part], self.starts[source.part + 1]
            limit, gpu = np.maximum(left[first:last], 0), source.mean.problem.profile.gpu.name
            if not limit.any() or (
                gpu in self.stock and -left[int(self.starts[-1]) + self.stock.index(gpu)] <= 0
            ):
                continue
            weights = np.maximum(self.master.duals[first:last], 1e-6)
            bases = np.minimum(source.patterns, limit)
            bases = bases[np.argsort(-(bases @ weights), kind="stable")[:4]]
            found = price(
                source.mean_knapsacks, weights, limit, source.sizes(), self.rng, bases, _DIVE_STARTS
            )
            if len(found) and found[0].any():
                options.append((float(found[0] @ weights) / source.price, k, found[0]))
        if not options:
            return None
        _, k, row = max(options, key=lambda option: (option[0], -option[1]))
        source = self.sources[k]
        source.add(row[None, :])
        whole = np.zeros(len(self.demand), dtype=np.int64)
        whole[self.starts[source.part] : self.starts[source.part + 1]] = row
        profile = source.mean.problem.profile
        if profile.gpu.name in self.stock:
            whole[
                int(self.starts[-1]) + self.stock.index(profile.gpu.name)
            ] = -profile.engine.tensor_parallel_size
        return self._take(k, whole, left)


def _kinds(problem: Problem) -> list[Problem]:
    return [replace(problem, profiles=(profile,)) for profile in problem.profiles]
