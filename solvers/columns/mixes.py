"""Mixes (numbers of servers of each kind): cuts exclude mixes that can't hold the adapters of a model.

The weights of the column generation give cuts that every plan satisfies, so the cheapest mix that satisfies the cuts
is a bound. If the relaxation excludes this mix, its duals are the weights of the next cut (J. F. Benders: Partitioning
procedures for solving mixed-variables programming problems, 1962).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.classes import aggregate
from packer.solvers.columns.generation import SEARCHED_MARGIN, Columns, Schedule
from packer.solvers.columns.master import solve_integer
from packer.solvers.columns.source import PROOF_SLACK, Source
from packer.solvers.feasibility import Feasibility

MOST_CLASSES = 96  # Most classes of each base model; with more, adapters of similar rates are merged.
_RELAXED_SHARE = 0.2  # Share of the remaining time for a relaxation: a mix hard to exclude leaves time for others.
_FEW: Schedule = ((0.5, 8), (0.0, 8))
_ALL: Schedule = ((0.9, 8), (0.5, 8), (0.0, 8))
"""Most steps stay near the best weights so far: weights from few prices are already close to the optimum."""
_FEW_CLASSES = 24
_TOLERANCE = 1e-7
_DOUBT = 0.02  # Share of capacity by which a mix must exceed a mix that could not be packed.


@dataclass(frozen=True, eq=False)
class Cut:
    """The constraint `most` @ (servers of each kind) >= 1.

    `weights`, float64 (K,): weight of an adapter of each class. `most`, float64 (S,): the largest share of the weight
    of all adapters that a server of each kind carries. `proven`: no heavier pattern exists.
    """

    weights: FloatArray
    most: FloatArray
    proven: bool = False

    def allows(self, servers: IntArray) -> bool:
        """Whether these numbers of servers of each kind (S,) satisfy the cut."""
        return bool(self.most @ servers >= 1.0 - _TOLERANCE)


def cheapest(sources: Sequence[Source], cuts: Sequence[Cut], stock: Mapping[str, int]) -> IntArray | None:
    """Servers of each kind (S,) that satisfy the cuts at the lowest price; None if that is not proven."""
    limited = list(stock)
    rows = np.array(
        [
            [*(cut.most[k] for cut in cuts), *(-source.gpus * (source.gpu == name) for name in limited)]
            for k, source in enumerate(sources)
        ]
    )
    # A stock of GPUs is a cover constraint with negative coefficients: -used >= -stock.
    demand = np.array([*np.full(len(cuts), 1.0 - _TOLERANCE), *(-stock[name] for name in limited)])
    prices = np.array([source.price for source in sources])
    work = sources[0].mean.problem.evaluator.work
    servers, optimal = solve_integer(rows, demand, prices=prices, work=work)
    return servers if optimal else None


class Mixes(Columns):
    """The mixes of the one base model of `problem`. `cuts`: constraints that every plan satisfies. `doubts`:
    constraints on the mixes to try, which exclude mixes that could not be packed."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        classes = aggregate(problem.workload, max_classes=MOST_CLASSES)
        rng = np.random.default_rng([problem.seed, seed])
        lowest = aggregate(problem.workload, max_classes=MOST_CLASSES, optimistic=True)
        sources: list[Source] = []
        for profile in problem.profiles:
            alone = replace(problem, profiles=(profile,))
            mean = Feasibility(alone, classes)
            light = Feasibility(alone, lowest) if classes.loss else mean
            sources.append(Source(problem.objective.weight(profile), mean, light, rng))
        super().__init__(sources)
        self.cuts: list[Cut] = []
        self.doubts: list[Cut] = []

    def begin(self, bins: Sequence[Bin]) -> bool:
        """Start with the patterns of these servers, the fullest ones of each class alone, and the cut that weighs each
        class by its price on its best kind, by load; False if a class fits no kind. Raises `OutOfTime`."""
        own = [[b for b in bins if b.profile == source.mean.problem.profile] for source in self.sources]
        if not self.start([self.classes.rows(each) for each in own]):
            return False
        self.cut(np.min([source.price * source.sizes() for source in self.sources], axis=0))
        return True

    @property
    def prices(self) -> FloatArray:
        """Price of a server of each kind, float64 (S,)."""
        return np.array([source.price for source in self.sources])

    def counts(self, bins: Sequence[Bin]) -> IntArray:
        """Number of servers of each kind among these bins, int64 (S,)."""
        used = [item.profile for item in bins]
        return np.array([used.count(source.mean.problem.profile) for source in self.sources], dtype=np.int64)

    def admit(self, servers: IntArray) -> bool:
        """Whether no cut excludes these numbers of servers of each kind (S,)."""
        return all(cut.allows(servers) for cut in self.cuts)

    def cut(self, weights: FloatArray) -> Cut | None:
        """Add the cut of these weights (K,); None if they are all zero. Raises `OutOfTime`."""
        total = float(weights @ self.demand)
        if total <= 0.0:
            return None
        most = [source.heaviest(weights) * (1.0 + SEARCHED_MARGIN) / total for source in self.sources]
        self.cuts.append(Cut(weights, np.array(most)))
        return self.cuts[-1]

    def prove(self) -> None:
        """Add a proven version of each cut that no pattern exceeds, if classes are few; raises `OutOfTime`."""
        if len(self.demand) > _FEW_CLASSES:
            return
        slack = (1.0 + PROOF_SLACK) / (1.0 + SEARCHED_MARGIN)
        for cut in list(self.cuts):
            most, total = cut.most * slack, float(cut.weights @ self.demand)
            pairs = zip(self.sources, most.tolist(), strict=True)
            if all(source.excludes(cut.weights, share * total) for source, share in pairs):
                self.cuts.append(replace(cut, most=most, proven=True))

    def doubt(self, weights: FloatArray, servers: IntArray) -> None:
        """Exclude this mix, and mixes that carry hardly more, from the mixes to try."""
        most = np.array([float((source.patterns @ weights).max(initial=0.0)) for source in self.sources])
        self.doubts.append(Cut(weights, most / (float(most @ servers) * (1.0 + _DOUBT))))

    def relaxed(self, servers: IntArray, *, few: bool) -> bool:
        """Solve the relaxation over patterns for this mix: its value is the share of the mix that holds all adapters.

        Patterns are generated until the value is at most 1, a cut excludes the mix, no pattern improves the value, or a
        share of the time is up. Returns False if it was not solved; kinds that hold no adapter of a class are excluded
        by a cut. `few`: only use weights that are sums of a few prices; a value of at most 1 then says little.

        Raises `OutOfTime`: the problem's time is up.
        """
        held = self.held(servers)
        if not held.all():
            alone = np.eye(len(held))[int(np.argmin(held))]
            self.cut(alone)  # admits the mix if the lightest adapter of a rounded class fits
            fits = [float((source.patterns @ alone).any()) for source in self.sources]
            self.doubts.append(Cut(alone, np.array(fits)))
            return False
        until_s = (1.0 - _RELAXED_SHARE) * self.problem.remaining_s()
        tried = 1.0 + SEARCHED_MARGIN

        def enough() -> bool:
            nonlocal tried
            assert self.master is not None
            if self.master.value <= 1.0 + _TOLERANCE or self.problem.remaining_s() <= until_s:
                return True
            # A cut takes a search of its own: it is only tried once the weights have improved.
            if not self.priced or self.value <= tried:
                return False
            tried, cut = self.value, self.cut(self.weights)
            return cut is not None and not cut.allows(servers)

        if few:  # weights from few prices come close in few rounds; the full search starts from the best
            self.priced, self.weights = False, np.zeros(len(held))
        self.run(servers, _FEW if few else _ALL, enough, basis=self.classes.features if few else None)
        return self.master is not None
