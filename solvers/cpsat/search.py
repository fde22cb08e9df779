"""Large-neighbourhood search: the present plan, and the choice of servers whose adapters are packed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.evaluation import Evaluation, Evaluations
from packer.moves import match, moved
from packer.solvers.base import Problem, used_gpus
from packer.solvers.classes import Classes, aggregate
from packer.solvers.cpsat.model import Aim, Refused, Repacking, ServerOption
from packer.solvers.cpsat.surrogate import LoadedKind, fitted_latencies, fitted_limits, latency_of
from packer.solvers.slots import SlotSearch
from packer.solvers.work import PACKED_S

_TOLERANCE = 1.03  # First limit of the estimated fill of a server.
_TIGHTER, _LOOSER = 0.995, 1.002
_ATTEMPTS = 4
_WORK = {Aim.EMPTY: 0.06, Aim.STAY: 0.15, Aim.WORST: 0.03, Aim.SUM: 0.06}
_LEAST_WORK = 0.005
_CLASSES, _MOST_FREED = 40, 1500
_PATIENCE, _STICKY, _REFITTED = 60, 8, 6
_REMEMBERED = 40
_HOPELESS = 1.1
_LONGEST = 5
_LEAST = 1e-3


@dataclass(frozen=True)
class _State:
    bins: tuple[Bin, ...]
    rows: tuple[Evaluation, ...]
    key: tuple[float, ...]


class NeighbourhoodSearch:
    """Large-neighbourhood search over a complete plan.

    Each step frees a few servers. CP-SAT packs their adapters again by a linear estimate of how full each server is.
    The predictor evaluates the new servers, and a refused server becomes a cut. `best` is never worse than the start.
    """

    def __init__(self, problem: Problem, bins: Sequence[Bin]) -> None:
        self.problem, self.slots = problem, SlotSearch(problem)
        self.rng = np.random.default_rng(problem.seed)
        self.latency = problem.objective.fixed_gpus
        self.first = self.state = self.best = self._state(tuple(bins), ())
        self.kinds: list[LoadedKind] = []
        self.limits: list[float] = []
        self.refused: list[tuple[frozenset[int], int]] = []
        self.work, self.neighbourhoods, self.improvements, self.cuts = 0.0, 0, 0, 0
        self.emptied: Bin | None = None

    def run(self, work: float) -> tuple[Bin, ...]:
        """The best plan once `work` is done, the time is up, or no step has found a better plan for long."""
        idle = 0
        while len(self.state.bins) > 1 and idle < _PATIENCE and self.work < work:
            if self.problem.out_of_time():
                break
            if not self.kinds or (self.latency and self.neighbourhoods % _REFITTED == 0):
                self._fit()
                if not self.kinds:
                    break
            if self._full():
                break
            before = self.state
            self._step(idle)
            idle = 0 if self.state.key < before.key else idle + 1
            self.problem.progress(f"cpsat: {len(self.best.bins)} servers", self.neighbourhoods, 0)
        return self.best.bins

    def _fit(self) -> None:
        fitted = fitted_latencies(self.problem, self.state.bins, self.rng) if self.latency else None
        self.kinds = fitted_limits(self.problem, self.rng) if fitted is None else fitted
        self.limits = [0.995 if self.latency else _TOLERANCE] * len(self.kinds)

    def _state(self, bins: tuple[Bin, ...], known: Sequence[tuple[Bin, Evaluation]]) -> _State:
        """A plan with the evaluation of each server; `known`: evaluations that are not repeated."""
        seen = {id(item): row for item, row in known}
        new = [item for item in bins if id(item) not in seen]
        found = self.problem.evaluator.judged(self.problem.workload, new) if new else ()
        seen |= {id(item): row for item, row in zip(new, found, strict=True)}
        rows = tuple(seen[id(item)] for item in bins)
        every = Evaluations.of(rows)
        bad = float((~self.problem.objective.holds(every)).sum())
        return _State(bins, rows, (bad, *self.problem.objective.key(self.problem.workload, bins, every)))

    def _aim(self, idle: int) -> Aim:
        if self.latency:
            worst = getattr(self.problem.objective, "statistic", "worst") == "worst"
            return Aim.WORST if worst else Aim.SUM
        # After two steps that sent no adapter home, one step tries to save a server.
        return Aim.STAY if self.problem.old_bins and idle % 3 != 2 else Aim.EMPTY

    def _step(self, idle: int) -> None:
        aim = self._aim(idle)
        chosen = self._neighbourhood(aim)
        made = self._task(aim, chosen)
        if made is None:
            return
        task, classes, freed = made
        self.neighbourhoods += 1
        for _ in range(_ATTEMPTS):
            if self.problem.out_of_time():
                return
            # one draw for each attempt, so that the seed determines the plan
            found = task.solve(seed=int(self.rng.integers(2**31)), work=_WORK[aim], seconds=self.problem.wall_s)
            self.work += (done := _LEAST_WORK + (0.0 if found is None else found[2]))
            self.problem.evaluator.work.add(PACKED_S * done)
            if found is None or not self._judged(task, classes, freed, chosen, *found[:2]):
                return

    def _full(self) -> bool:
        """Whether no server can be saved, allowing for the error of the estimate, and nothing else is minimised."""
        problem = self.problem
        if self.latency or problem.old_bins or len(problem.profiles) > 1:
            return False
        least = np.min([kind.shares for kind in self.kinds], axis=0)
        return float(least.sum()) > _HOPELESS * (len(self.state.bins) - 1)

    def _fill(self, item: Bin) -> float:
        """Estimated fill of a server; 1 if its kind is not known."""
        k = self._kind(item)
        return 1.0 if k is None else self.kinds[k].base + float(self.kinds[k].shares[list(item.adapters)].sum())

    def _kind(self, item: Bin) -> int | None:
        pairs = ((kind.profile, kind.slot_rank) for kind in self.kinds)
        return next((k for k, pair in enumerate(pairs) if pair == (item.profile, item.max_lora_rank)), None)

    def _neighbourhood(self, aim: Aim) -> list[int]:
        """Servers to free. The first one is to be emptied, relieved, or left by adapters that ran elsewhere."""
        bins, rng = self.state.bins, self.rng
        able = [k for k, item in enumerate(bins) if not item.is_split]
        fills = {k: self._fill(bins[k]) for k in able}
        if len(able) < 2:
            return []
        first: list[int] = []
        if aim is Aim.STAY:
            first = [k for k in self._circle() if k in fills]
        elif aim is Aim.EMPTY:
            kept = [k for k in able if bins[k] is self.emptied]
            # It takes several steps to empty a server: mostly go on with the same one.
            if not kept or rng.random() < 1.0 / _STICKY:
                least = min(able, key=lambda k: (fills[k], k))
                kept = [least if rng.random() < 0.7 else int(rng.choice(able))]
            self.emptied, first = bins[kept[0]], kept
        elif rng.random() < 0.7:
            first = [max(able, key=lambda k: (latency_of(self.problem, bins[k], self.state.rows[k]), -k))]
        rest = [k for k in able if k not in first]
        room = np.array([max(0.02, 1.05 - fills[k]) for k in rest])
        most = 7 if aim is Aim.STAY else 5
        count = min(len(rest), int(rng.integers(1 if first else 2, most)))
        more = rng.choice(rest, count, replace=False, p=room / room.sum()).tolist() if rest else []
        chosen: list[int] = first + more
        while len(chosen) > 2 and sum(len(bins[k].adapters) for k in chosen) > _MOST_FREED:
            chosen.pop()
        return chosen

    def _circle(self) -> list[int]:
        """The server of a random adapter that moved, the server where it ran, and the servers between on a cycle. In
        the graph of servers, an edge leads from where an adapter is to where it ran: adapters on a cycle wait for room
        on each other's servers."""
        import networkx

        old, bins = self.problem.old_bins, self.state.bins
        becomes = {j: k for k, j in match(old, bins).items()}
        home = {i: becomes.get(j) for j, item in enumerate(old) for i in item.adapters}
        here = {i: k for k, item in enumerate(bins) for i in item.adapters}
        away = moved(old, bins)
        if not away:
            return []
        graph = networkx.DiGraph((here[i], home[i]) for i in away if home[i] is not None)
        chosen = int(self.rng.choice(away))
        now, then = here[chosen], home[chosen]
        if then is None:
            return [now]
        if networkx.has_path(graph, then, now):
            return list(dict.fromkeys([now, *networkx.shortest_path(graph, then, now)]))[:_LONGEST]
        return [now, then]

    def _task(self, aim: Aim, chosen: Sequence[int]) -> tuple[Repacking, Classes, IntArray] | None:
        """The repacking of these servers for CP-SAT; None if there are fewer than two, or a kind is not known."""
        bins = [self.state.bins[k] for k in chosen]
        used = [kind for item in bins if (kind := self._kind(item)) is not None]
        if len(bins) < 2 or len(used) < len(bins):
            return None
        problem = self.problem
        freed = np.array([i for item in bins for i in item.adapters])
        classes = aggregate(problem.workload.subset(freed.tolist()), max_classes=_CLASSES, unmerged=2 * _CLASSES)
        place = {i: k for k, i in enumerate(freed.tolist())}
        start = [classes.counts([place[i] for i in item.adapters]) for item in bins]
        several = len(problem.profiles) > 1 and aim is Aim.EMPTY
        if several:  # one large server may become two small ones
            used, start = [*used, -1], [*start, np.zeros_like(start[0])]
        running = [classes.counts([place[i] for i in each if i in place]) for each in self._ran(chosen)]
        running += [np.zeros_like(start[0])] * (len(start) - len(running))
        same = [[k for k, kind in enumerate(self.kinds) if kind.profile == item.profile] for item in bins]
        every = list(range(len(self.kinds)))
        options = [every] * len(start) if several else same
        ranks = classes.ranks
        kinds = [
            ServerOption(
                np.array([float(kind.shares[freed[each]].mean()) for each in classes.members]),
                kind.base, limit, ranks <= kind.slot_rank, problem.objective.weight(kind.profile),
                kind.profile.gpu.name, kind.profile.engine.gpus,
            )
            for kind, limit in zip(self.kinds, self.limits, strict=True)
        ]  # fmt: skip
        task = Repacking(
            aim, classes.demand, np.array(running), kinds, options, np.array(start), used,
            fixed=self.latency, stock={} if self.latency else self._stock(chosen), rates=classes.rates,
        )  # fmt: skip
        for held, option in self.refused[-_REMEMBERED:]:
            if held <= place.keys():
                counts = classes.counts([place[i] for i in held])
                task.refused.append(Refused(counts, option, problem.evaluator.monotone and not classes.loss))
        return task, classes, freed

    def _ran(self, chosen: Sequence[int]) -> list[tuple[int, ...]]:
        """For each of these servers, the adapters of the running server that it continues."""
        if not self.problem.old_bins:
            return []
        becomes = match(self.problem.old_bins, self.state.bins)
        return [self.problem.old_bins[becomes[k]].adapters if k in becomes else () for k in chosen]

    def _stock(self, chosen: Sequence[int]) -> dict[str, int]:
        """GPUs that these servers may take: the stock without the GPUs that other servers use."""
        others = used_gpus(item for k, item in enumerate(self.state.bins) if k not in set(chosen))
        left = {gpu: count - others.get(gpu, 0) for gpu, count in self.problem.stock.items()}
        if self.problem.max_gpus is not None:
            left[""] = self.problem.max_gpus - sum(others.values())
        return left

    def _judged(
        self, task: Repacking, classes: Classes, freed: IntArray, chosen: Sequence[int],
        held: IntArray, option: Sequence[int],
    ) -> bool:  # fmt: skip
        """Take the servers if the predictor admits them and the plan is better; True if some were refused and cut."""
        made: dict[int, Bin] = {}
        refused: dict[int, tuple[int, ...]] = {}
        thorough = not self.problem.evaluator.simulates
        hint = max(self.state.bins[k].max_loras for k in chosen)
        number = {i: k for k, i in enumerate(freed.tolist())}
        home = {number[i]: s for s, each in enumerate(self._ran(chosen)) for i in each if i in number}
        for s, own in enumerate(classes.assign(list(held), home)):
            if own:
                adapters = tuple(sorted(freed[list(own)].tolist()))
                profile = self.kinds[option[s]].profile
                item = self.slots.feasible(adapters, profile, hint=min(len(adapters), hint), thorough=thorough)
                if item is None:
                    refused[s] = adapters
                else:
                    made[s] = self.slots.best(item) if self.latency else item
        if not refused:
            kept = [k for k in range(len(self.state.bins)) if k not in set(chosen)]
            known = [(self.state.bins[k], self.state.rows[k]) for k in kept]
            state = self._state((*(item for item, _ in known), *made.values()), known)
            # The first entry is the number of servers that the objective refuses.
            if state.key[0] <= self.state.key[0]:
                self._take(task, state, made)
                return False
            admitted = self.problem.objective.holds(Evaluations.of(state.rows[len(kept) :])).tolist()
            refused = {s: item.adapters for (s, item), ok in zip(made.items(), admitted, strict=True) if not ok}
        for s, adapters in refused.items():
            self._cut(task, held[s], adapters, option[s])
        return True

    def _cut(self, task: Repacking, counts: IntArray, adapters: Sequence[int], option: int) -> None:
        """Store a refused server as a cut, and lower the fill limit of its kind."""
        self.cuts += 1
        self.refused.append((frozenset(adapters), option))
        task.refused.append(Refused(counts, option, self.problem.evaluator.monotone))
        kind = self.kinds[option]
        fill = kind.base + float(kind.shares[list(adapters)].sum())
        self.limits[option] = max(0.7, min(self.limits[option], fill) * _TIGHTER)
        task.kinds = [replace(each, limit=limit) for each, limit in zip(task.kinds, self.limits, strict=True)]

    def _take(self, task: Repacking, state: _State, made: Mapping[int, Bin]) -> None:
        """Take the new plan if it is better, or at the same price leaves less on the server to be emptied."""
        before, better = self.state.key, state.key < self.state.key
        if task.aim is Aim.EMPTY:
            self.emptied = made.get(0)
            was, shares = task.start[0], task.kinds[task.used[0]].shares
            left = 0.0 if 0 not in made else self._fill(made[0])
            emptier = left < float(shares @ was) - _LEAST
            better = state.key[1] < before[1] - _LEAST or (state.key[1] < before[1] + _LEAST and emptier)
        if not better:
            return
        self.state = state
        for item in made.values():
            k = self._kind(item)
            # A server near its limit was admitted, so the estimate may allow a little more.
            if k is not None and self._fill(item) > self.limits[k] - 0.01:
                self.limits[k] = min(1.3, self.limits[k] * _LOOSER)
        if self.state.key < self.best.key:
            self.best = self.state
            self.improvements += 1
