"""How many servers of each kind: mixes that can't hold the adapters of a model are excluded, on others they are packed.

Weigh the adapters in any way: where no server of kind k carries more than M_k, the servers n of a plan satisfy
Σ n_k M_k >= the weight of all adapters. Such cuts hold in whole numbers, so that their cheapest mix is a bound; if the
relaxation refutes it, its duals are the weights of the next cut (J. F. Benders: Partitioning procedures for solving
mixed-variables programming problems, 1962).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.classes import aggregate
from packer.solvers.columns.master import Master, solve_integer, solve_relaxation
from packer.solvers.columns.prices import features
from packer.solvers.columns.source import PROOF_SLACK, Source
from packer.solvers.feasibility import Feasibility

SEARCHED_MARGIN = 5e-3
"""By how much better than the best pattern found one may be that the search missed: cuts allow for it."""

MOST_CLASSES = 96
"""Classes of each base model; adapters of near rates are merged beyond."""

_INTEGER_S = 2.0
_RELAXED_SHARE = 0.2
"""Of the time that is left, for one relaxation: a mix that is nearly excluded must leave time for others."""
_NEW_PATTERNS = 8
_STARTS = 8
_DIVE_STARTS = 3
_FEW_CLASSES = 24
_TOLERANCE = 1e-7
_SMOOTHING, _NEAR = 0.5, 0.9
"""Shares of the best weights so far in those that are priced: at first, and where they come near already."""
_EPSILON = 1e-6
_DOUBT = 0.02
"""Share of its capacity that a mix has to exceed one that could not be packed by."""


@dataclass(frozen=True, eq=False)
class Cut:
    """`most` @ servers of each kind >= 1.

    `most`, float64 (S,): the largest share of the weight of all adapters that a server of each kind carries, where an
    adapter of class k has `weights[k]` (K,). `proven`: no pattern was missed.
    """

    weights: FloatArray
    most: FloatArray
    proven: bool = False

    def admits(self, servers: IntArray) -> bool:
        """Whether so many servers of each kind (S,) satisfy it."""
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
    demand = np.array([*np.full(len(cuts), 1.0 - _TOLERANCE), *(-stock[name] for name in limited)])
    prices = np.array([source.price for source in sources])
    servers, optimal = solve_integer(rows, demand, time_limit_s=_INTEGER_S, prices=prices)
    return servers if optimal else None


class Mixes:
    """The mixes of one base model, of which `problem` is.

    `sources`: its kinds of server.
    `cuts`: what all plans satisfy.
    `doubts`: the same for mixes that are worth a try: those that could not be packed are excluded.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.classes = aggregate(problem.workload, max_classes=MOST_CLASSES)
        self.demand = self.classes.demand
        rng = np.random.default_rng([problem.seed, seed])
        lowest = aggregate(problem.workload, max_classes=MOST_CLASSES, optimistic=True)
        self.sources: list[Source] = []
        for profile in problem.profiles:
            alone = replace(problem, profiles=(profile,))
            mean = Feasibility(alone, self.classes)
            light = Feasibility(alone, lowest) if self.classes.loss else mean
            self.sources.append(Source(problem.objective.weight(profile), mean, light, rng))
        self.cuts: list[Cut] = []
        self.doubts: list[Cut] = []
        self.promise: tuple[float, FloatArray] | None = None
        """The value of the best weights of the last relaxation, and the weights."""

    def start(self, bins: Sequence[Bin]) -> bool:
        """Patterns of these servers and the fullest ones of each class alone, and the cut of what each class costs on
        its best kind if servers were full of load; False if a class fits no kind. Raises `OutOfTime`."""
        for source in self.sources:
            own = [item for item in bins if item.profile == source.mean.problem.profile]
            rows = np.array([self.classes.counts(item.adapters) for item in own], dtype=np.int64)
            if own:
                source.add(rows[source.mean.feasible(rows)])
            source.start()
        fits = np.max([source.patterns.max(axis=0, initial=0) for source in self.sources], axis=0).all()
        if fits:
            self.cut(np.min([source.price * source.sizes() for source in self.sources], axis=0))
        return bool(fits)

    @property
    def prices(self) -> FloatArray:
        """Of a server of each kind, float64 (S,)."""
        return np.array([source.price for source in self.sources])

    def counts(self, bins: Sequence[Bin]) -> IntArray:
        """Servers of each kind (S,)."""
        used = [item.profile for item in bins]
        return np.array([used.count(source.mean.problem.profile) for source in self.sources], dtype=np.int64)

    def admit(self, servers: IntArray) -> bool:
        """Whether no cut excludes so many servers of each kind (S,)."""
        return all(cut.admits(servers) for cut in self.cuts)

    def cut(self, weights: FloatArray) -> Cut | None:
        """Add the cut of these weights (K,); None if they are all zero. Raises `OutOfTime`."""
        total = float(weights @ self.demand)
        if total <= 0.0:
            return None
        most = [source.heaviest(weights) * (1.0 + SEARCHED_MARGIN) / total for source in self.sources]
        self.cuts.append(Cut(weights, np.array(most)))
        return self.cuts[-1]

    def prove(self) -> None:
        """Cuts of which it is certain that no heavier pattern exists, where classes are few; raises `OutOfTime`."""
        if len(self.demand) > _FEW_CLASSES:
            return
        slack = (1.0 + PROOF_SLACK) / (1.0 + SEARCHED_MARGIN)
        for cut in list(self.cuts):
            most, total = cut.most * slack, float(cut.weights @ self.demand)
            pairs = zip(self.sources, most.tolist(), strict=True)
            if all(source.excludes(cut.weights, share * total) for source, share in pairs):
                self.cuts.append(replace(cut, most=most, proven=True))

    def doubt(self, weights: FloatArray, servers: IntArray) -> None:
        """Exclude this mix, and those that carry hardly more, from what is worth a try."""
        most = np.array([float((source.patterns @ weights).max(initial=0.0)) for source in self.sources])
        self.doubts.append(Cut(weights, most / (float(most @ servers) * (1.0 + _DOUBT))))

    def relaxed(self, servers: IntArray, *, few: bool) -> Master | None:
        """The relaxation over patterns for this mix: its value is the share of the mix that holds all adapters.

        Patterns are generated until that is at most 1, or a cut excludes the mix, or none improves it, or a share of
        the time is up; None without time, and for a mix of kinds that hold no adapter of a class, which a cut then
        excludes. `few`: for weights that are sums of a few prices, so that a value of at most 1 says little.

        Raises `OutOfTime`: the problem's time is up.
        """
        chosen = [source for source, count in zip(self.sources, servers.tolist(), strict=True) if count]
        counts = servers[servers > 0]
        classes = self.classes
        basis = features(classes) if few else np.eye(len(classes))
        held = np.max([source.patterns.max(axis=0, initial=0) for source in chosen], axis=0, initial=0)
        if not held.all():
            alone = np.eye(len(classes))[int(np.argmin(held))]
            self.cut(alone)  # admits the mix where the lightest adapter of a rounded class fits
            fits = [float((source.patterns @ alone).any()) for source in self.sources]
            self.doubts.append(Cut(alone, np.array(fits)))
            return None
        if few:  # weights of few prices come near in a few rounds: all prices start from the best of these
            self.promise = None
        share, most = (0.0, _SMOOTHING) if self.promise is None else (_NEAR, _NEAR)
        best, center = self.promise or (0.0, np.zeros(len(classes)))
        master, until_s = None, (1.0 - _RELAXED_SHARE) * self.problem.remaining_s()
        while self.problem.remaining_s() > until_s:
            master, worth = self._master(chosen, counts, basis)
            if master is None or master.value <= 1.0 + _TOLERANCE:
                return master
            at = share * center + (1.0 - share) * master.duals
            added, carried, first = 0, 0.0, 0
            for source, count, least in zip(chosen, counts.tolist(), worth, strict=True):
                bases = source.patterns[master.use[first : first + len(source.patterns)] > 0.0]
                first += len(source.patterns)
                found = source.search(at, bases, _STARTS)
                heaviest = float((np.concatenate([found, source.patterns]) @ at).max())
                carried += count * heaviest
                added += source.add(found[found @ master.duals > least * (1.0 + _EPSILON)][:_NEW_PATTERNS])
            promised = float(at @ self.demand) / carried
            if promised > 1.0 + SEARCHED_MARGIN:
                cut = self.cut(at)
                if cut is not None and not cut.admits(servers):
                    return master
            if promised > best:
                best, center = promised, at
                self.promise = best, center
            if added:
                share = most
            elif share == 0.0:
                return master
            else:
                share, most = (_SMOOTHING if share == _NEAR else 0.0), _SMOOTHING
        return master

    def _master(
        self, chosen: Sequence[Source], counts: IntArray, basis: FloatArray
    ) -> tuple[Master | None, list[float]]:
        """The relaxation over the patterns at hand for `counts` servers of the chosen kinds, with weights of the
        classes `basis` (K, D) @ prices; and what a server of each kind is worth."""
        width, one = basis.shape[1], np.eye(len(chosen))
        held = [
            np.hstack([source.patterns @ basis, -one[[k] * len(source.patterns)]])
            for k, source in enumerate(chosen)
        ]
        rows = [*held, np.append(np.zeros(width), counts)]  # the last one is the share of the mix in use
        prices = np.zeros(sum(len(source.patterns) for source in chosen) + 1)
        prices[-1] = 1.0
        demand = np.append(self.demand @ basis, np.zeros(len(chosen)))
        found = solve_relaxation(np.vstack(rows), demand, prices)
        if found is None:
            return None, []
        return replace(found, duals=basis @ found.duals[:width]), found.duals[width:].tolist()

    def packed(
        self, servers: IntArray, master: Master, shake: float, rng: np.random.Generator
    ) -> list[tuple[Source, IntArray]] | None:
        """Patterns that hold all adapters on this mix, filled one after the other by weight; None if some are left.

        `shake`: spread of the noise on the weights. Raises `OutOfTime`.
        """
        loads = self.classes.loads
        weights = np.maximum(master.duals, 1e-3 * loads / float(loads @ self.demand))
        weights = weights * np.exp(rng.normal(0.0, shake, len(weights)))
        carried = np.array([source.carried() for source in self.sources])
        order = np.repeat(np.arange(len(servers)), servers)
        order = order[
            np.argsort(-carried[order] * np.exp(rng.normal(0.0, 10.0 * shake, len(order))), kind="stable")
        ]
        left = self.demand.copy()
        chosen: list[tuple[Source, IntArray]] = []
        for k in order.tolist():
            source = self.sources[k]
            if source.mean.feasible(left[None, :])[0]:
                return [*chosen, (source, left)]
            bases = np.minimum(source.patterns, left)
            bases = bases[np.argsort(-(bases @ weights), kind="stable")[:4]]
            found = source.search(weights, bases, _DIVE_STARTS, left)
            if len(found):
                source.add(found[:1])
                chosen.append((source, found[0]))
                left = left - found[0]
        return None if left.any() else chosen
