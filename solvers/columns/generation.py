"""Column generation: patterns (sets of adapters that a server can carry), and weights of adapters that give bounds.

Give each adapter any weight. If no server of kind k can carry more than the weight M_k, the numbers of servers n_k of a
plan satisfy Σ n_k M_k >= the weight of all adapters. The best weights are the duals of the linear relaxation over all
patterns; patterns are generated when they are needed. With one kind, the weight of all adapters over M is a lower
bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.solvers.columns.master import Master, solve_relaxation
from packer.solvers.columns.source import Source
from packer.solvers.feasibility import OutOfTime
from packer.solvers.work import ENTRY_S

SEARCHED_MARGIN = 5e-3  # Without an enumeration, the bound allows for bins worth so much more than the best found.
MISSED = 0.1  # Share by which the first rounds may miss the heaviest bin; searches to the end showed 5 %.

Schedule = Sequence[tuple[float, int]]
"""Steps (share, starts): the share of the best weights in the weights that are priced, and the starts of the search for
patterns. The next step follows if a search finds nothing, or after one round if the share is 1."""
BOUND: Schedule = ((1.0, 24), (0.6, 24), (0.0, 24))
"""Prices at means of the duals and the best weights, which converges much faster than prices at the duals (A. Pessoa et
al.: Automation and combination of linear-programming based stabilization techniques in column generation, 2018)."""
TO_THE_END: Schedule = ((0.0, 24),)  # Prices at the duals alone: for patterns rather than for the bound.
_WARM: Schedule = ((0.0, 6), (0.0, 24))
_WARM_ROUNDS = 60
_NEW_COLUMNS = 12
_EPSILON = 1e-6
_SPREAD, _TIES = 0.1, 1e-4  # Noise on prices that leads to other bins, and noise that only breaks ties.
_EACH = 3
_DIVE_STARTS = 6


class Columns:
    """The column generation over the adapters of one base model.

    `sources`: the kinds of server, with the patterns found so far.
    `weights`: weight of an adapter of each class, float64 (K,), scaled so that the servers priced so far carry at most
    1 together. `value`: the weight of all adapters: the least share of those servers that holds them.
    `master`: the last optimum of the relaxation. `pools`, `uses`: its patterns of each kind, and their use.
    `worth`: the dual of a server of each kind (S,).
    `priced`: a search for heavier patterns was run. `converged`: none is worth more than a server at the duals.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.classes = sources[0].mean.classes
        self.demand = self.classes.demand
        self.weights, self.value = np.zeros(len(self.demand)), 0.0
        self.master: Master | None = None
        self.pools: list[IntArray] = []
        self.uses: list[FloatArray] = []
        self.worth = np.zeros(len(sources))
        self.priced = self.converged = False

    def start(self, held: Sequence[IntArray]) -> bool:
        """Start with the feasible rows of `held`, (m, K) of each kind, and the fullest pattern of each class that they
        don't hold; False if a class fits no kind. Raises `OutOfTime`."""
        for source, rows in zip(self.sources, held, strict=True):
            source.start(rows)
        return bool(self.held(np.ones(len(self.sources))).all())

    def held(self, servers: IntArray | FloatArray) -> IntArray:
        """The most adapters of each class in a pattern of the kinds in use (K,)."""
        most = [s.patterns.max(axis=0, initial=0) for s, n in zip(self.sources, servers, strict=True) if n]
        return np.asarray(np.max([np.zeros_like(self.demand), *most], axis=0))

    def run(
        self, servers: IntArray, schedule: Schedule, enough: Callable[[], bool], *,
        basis: FloatArray | None = None, rounds: float = math.inf,
    ) -> None:  # fmt: skip
        """Generate patterns for `servers` of each kind (S,) until none improves the relaxation, or `enough()` is true.
        `basis`, (K, D): only consider weights `basis` @ prices, with D prices. Raises `OutOfTime`."""
        step = done = 0
        self.converged = False
        self._rescale(servers)
        while done < rounds:
            self._solve(servers, basis)
            self.converged = self.master is None
            if self.converged or enough():
                return
            share, starts = schedule[step]
            added = self._price(servers, share, starts)
            if share == 1.0 or not added:
                step += 1
            done += 1
            if step == len(schedule):
                self.converged = True
                return

    def warm(self, known: int | None = None) -> None:
        """Generate patterns of one kind for weights that are sums of a few prices (`Classes.features`).

        Feasibility mainly depends on the load, the number of adapters and their ranks, so a few prices come close to
        the best weights in a few rounds, for any number of classes. With a `known` bound the search ends once the
        optimum can promise no more than `known` (more columns lower the optimum, which no weights exceed), or no more
        than the weights already promise, even if bins `MISSED` heavier than those found exist.
        """

        def enough() -> bool:
            assert self.master is not None
            safe = promise((1.0 - MISSED) * self.value) if self.priced else 0
            return known is not None and promise(max(self.master.value, self.value)) <= max(known, safe)

        self.run(np.ones(1, dtype=np.int64), _WARM, enough, basis=self.classes.features, rounds=_WARM_ROUNDS)

    @property
    def promised(self) -> int:
        """The bound on servers of one kind by the weights, if the search for the heaviest bin missed little."""
        return promise(self.value)

    def refute(self, pattern: IntArray) -> None:
        """Add a pattern of the one kind that weighs more than 1, and scale the weights down."""
        self.sources[0].add(pattern[None, :])
        self._scaled(self.weights, float(pattern @ self.weights))

    def _rescale(self, servers: IntArray) -> None:
        """Scale the weights for these servers; the first weights are the share of a server that an adapter takes."""
        if not self.weights.any():
            self.weights = np.min([source.sizes() for source in self.sources], axis=0)
        most = [float((source.patterns @ self.weights).max(initial=0.0)) for source in self.sources]
        if not self.priced or float(servers @ most) > 1.0:
            self._scaled(self.weights, float(servers @ most))

    def _scaled(self, weights: FloatArray, carried: float) -> None:
        if carried > 0.0:
            self.weights = weights / carried
            self.value = float(self.weights @ self.demand)

    def _solve(self, servers: IntArray, basis: FloatArray | None) -> None:
        """Solve the relaxation over the known patterns: the least share of these servers that holds all adapters."""
        problem = self.sources[0].mean.problem
        if problem.out_of_time():
            raise OutOfTime
        kinds = np.flatnonzero(servers).tolist()
        rows, demand = [self.sources[k].patterns for k in kinds], self.demand
        priced = [each if basis is None else each @ basis for each in rows]
        width, one = priced[0].shape[1], np.eye(len(kinds))
        # One more row of the program for each kind: its patterns in use are at most its servers × the share.
        wide = [np.hstack([each, -one[[k] * len(each)]]) for k, each in enumerate(priced)]
        last = np.append(np.zeros(width), servers[kinds])  # the share of the servers in use
        prices = np.append(np.zeros(sum(map(len, rows))), 1.0)
        total: FloatArray = demand.astype(np.float64) if basis is None else demand @ basis
        needed = np.concatenate([total, np.zeros(len(kinds))])
        matrix = np.vstack([*wide, last[None, :]])
        found = solve_relaxation(matrix, needed, prices, time_limit_s=problem.wall_s)
        problem.evaluator.work.add(ENTRY_S * matrix.size)
        if found is None and problem.out_of_time():
            raise OutOfTime
        self.master = found
        if found is not None:
            duals = found.duals[:width] if basis is None else basis @ found.duals[:width]
            self.master = Master(found.value, found.use[:-1], duals)
            self.worth = np.zeros(len(servers))
            self.worth[kinds] = found.duals[width:]
            ends = np.cumsum([len(s.patterns) * (n > 0) for s, n in zip(self.sources, servers, strict=True)])
            self.uses = np.split(self.master.use, ends[:-1])
            self.pools = [s.patterns[: len(use)] for s, use in zip(self.sources, self.uses, strict=True)]

    def _price(self, servers: IntArray, share: float, starts: int) -> int:
        """Search for patterns at weights between the best weights and the duals; returns the number added."""
        assert self.master is not None
        duals, added = self.master.duals, 0
        at = share * self.weights + (1.0 - share) * duals
        carried, before = 0.0, 0.0
        for k in np.flatnonzero(servers).tolist():
            source, use = self.sources[k], self.uses[k]
            found = source.search(at, source.patterns[use > 0.0], starts)
            every = np.concatenate([found, source.patterns])
            carried += int(servers[k]) * float((every @ at).max(initial=0.0))
            before += int(servers[k]) * float((every @ self.weights).max(initial=0.0))
            # Only a pattern worth more than its server at the duals can improve the relaxation.
            better = found[found @ duals > self.worth[k] * (1.0 + _EPSILON)]
            added += source.add(better[:_NEW_COLUMNS])
        self.priced = True
        # New patterns may weigh more at the best weights, which are then scaled down to stay a bound.
        self._scaled(self.weights, max(1.0, before))
        # Any weights give a bound once they are scaled: keep the best ones.
        if carried > 0.0 and float(at @ self.demand) / carried > self.value:
            self._scaled(at, carried)
        return added

    def dive(self, servers: IntArray, shake: float, *, rounded: bool = True) -> list[tuple[Source, IntArray]] | None:
        """Patterns that hold all adapters on `servers` of each kind (S,); None if some adapters are left. If `rounded`,
        the relaxation is rounded down first. Then servers are filled one after the other, best value first. `shake`:
        spread of the noise on the values. Raises `OutOfTime`."""
        if self.master is None or not self.master.duals.any():
            return None
        left, free, rng = self.demand.copy(), servers.copy(), self.sources[0].rng
        chosen: list[tuple[Source, IntArray]] = []
        for k, (source, pool, use) in enumerate(zip(self.sources, self.pools, self.uses, strict=True)):
            whole = np.floor(use * rounded + _EPSILON).astype(np.int64)
            for pattern in np.repeat(pool, whole, axis=0)[: int(free[k])]:
                row = np.minimum(pattern, left)
                if row.any():
                    chosen.append((source, row))
                    left, free[k] = left - row, free[k] - 1
        loads, duals = self.classes.loads, self.master.duals
        carried = np.array([source.carried() for source in self.sources])
        order = np.repeat(np.arange(len(free)), free)
        noise = np.exp(rng.normal(0.0, 10.0 * shake, len(order)))
        # Kinds that carry most are filled first; noise gives each dive another order.
        order = order[np.argsort(-carried[order] * noise, kind="stable")]
        # Adapters of classes whose dual is 0 must be packed as well: they are worth a little.
        least = np.maximum(1e-3 * loads / float(loads @ self.demand), 1e-6 * float(duals.max()))
        for n, k in enumerate(order.tolist()):
            source = self.sources[k]
            if source.mean.feasible(left[None, :])[0]:
                return [*chosen, (source, left)] if left.any() else chosen
            # What is left is worth more than the free servers can carry together.
            if float(left @ duals) > float(self.worth[order[n:]].sum()) * (1.0 + _EPSILON):
                return None
            weights = np.maximum(duals, least) * np.exp(rng.normal(0.0, shake, len(left)))
            bases = np.minimum(source.patterns, left)
            bases = bases[np.argsort(-(bases @ weights), kind="stable")[:8]]
            found = source.search(weights, bases, _DIVE_STARTS, left)
            if not len(found) or not found[0].any():
                return None
            chosen.append((source, found[0]))
            left = left - found[0]
        return None if left.any() else chosen

    def diversify(self, target: int) -> int:
        """Add patterns of one kind that may be part of a plan of `target` servers; returns the number of new ones.

        Searches at the mean of the duals and the best weights, with noise, and with an adapter of each class in turn.
        If no bin is worth more than 1, every bin of such a plan is worth at least 1 − (`target` − worth of all
        adapters): patterns worth less are left out.
        """
        if self.master is None or not self.priced:
            return 0
        (source,), rng = self.sources, self.sources[0].rng
        at, demand = (self.master.duals + self.weights) / 2.0, self.demand
        weights = at * np.exp(rng.normal(0.0, _SPREAD, len(at)))
        rows = source.search(weights, self.pools[0][self.uses[0] > _EPSILON], 24)
        if not source.mean.problem.evaluator.simulates:
            held = np.repeat(np.flatnonzero(at > _EPSILON), _EACH).tolist()
            ties = np.exp(rng.normal(0.0, _TIES, (len(held), len(at))))
            rows = np.concatenate([rows, source.knapsacks.alike(at * ties, demand, held)])
        slack = max(0.0, target - float(at @ demand))
        return source.add(rows[rows @ at >= 1.0 - slack - _EPSILON])


def promise(value: float) -> int:
    """A bound on servers of one kind by the weight of all adapters."""
    return math.ceil(value / (1.0 + SEARCHED_MARGIN) - _EPSILON)
