"""`mixed`: which kinds of server, how many of each, and what is on them, for the lowest price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.solvers.base import Problem, Solution, used_gpus
from packer.solvers.by_model import merged, parts, rank, solved
from packer.solvers.classes import IntArray
from packer.solvers.confirm import confirmed_solution, mended
from packer.solvers.exact.master import Master
from packer.solvers.feasibility import OutOfTime, real_bins
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.greedy.solver import Greedy
from packer.solvers.greedy.top_up import top_up
from packer.solvers.limit import within_limit
from packer.solvers.mixed.mixes import Mixes, cheapest
from packer.solvers.mixed.source import Source
from packer.solvers.slots import SlotSearch

DEFAULT_S = 20.0
"""Time without a limit."""

_START_SHARE = 0.6
_ROUNDS = 8
"""How often mixes are tried that could not be packed before: with more patterns at hand."""
_PACKINGS = 4
"""Attempts to pack the adapters on a mix."""
_CHEAPER = 1e-9
_TOLERANCE = 1e-6


class Mixed:
    """The cheapest mix of kinds of server for each base model, by column generation and cuts on whole servers.

    Starts from greedy with all kinds and with each kind alone. The mixes of kinds that cost less are excluded one by
    one, by the duals of their relaxation over the patterns of every kind, or the adapters are packed on one. Without a
    time limit it takes at most about 20 s beyond greedy.
    """

    name = "mixed"
    joint = True

    def supports(self, problem: Problem) -> str | None:
        """Objectives that minimise GPUs or prices; no replicas, no replayed traces, no running plan."""
        objective = problem.objective
        if objective.fixed_gpus or objective.minimises not in ("gpus", "price"):
            return "it minimises GPUs or their price; for a given number take spread-refined"
        if not objective.symmetric or problem.old_bins:
            return "it counts adapters of equal rank, rate and lengths as one kind; take the solver greedy"
        if problem.max_replicas > 1:
            return "it does not split adapters over several GPUs (--max-replicas 1)"
        if problem.workload.arrivals.trace is not None:
            return "a replayed trace has no classes of equal adapters; use Poisson arrivals"
        return None

    def solve(self, problem: Problem) -> Solution:
        """The cheapest of the plans found, with the bound of the relaxation."""
        free = replace(problem, max_gpus=None)
        if free.time_limit_s is None:
            free = replace(free, time_limit_s=_elapsed(free) + DEFAULT_S)
        best = confirmed_solution(free.with_share(_START_SHARE), starting_plan)
        if best.unplaced:
            return within_limit(problem, best)
        return within_limit(problem, _Search(free, best).run())


def _elapsed(problem: Problem) -> float:
    return 1.0 - replace(problem, time_limit_s=1.0).remaining_s()


def starting_plan(problem: Problem) -> Solution:
    """Greedy with all kinds, or with one kind for each model where that is better; downsized."""
    found = parts(problem)
    whole = solved(problem, Greedy())
    options = [whole]
    if len(problem.profiles) > len(found) and not problem.stock and not problem.out_of_time():
        solutions = []
        for part in found:
            alone = [
                Greedy().solve(replace(part.problem, profiles=(profile,)))
                for profile in part.problem.profiles
            ]
            solutions.append(min(alone, key=lambda one: rank(part.problem, one)))
        options.append(merged(problem, found, solutions))
    options = [one if one.unplaced else replace(one, bins=downsized(problem, one.bins)) for one in options]
    return min(options, key=lambda one: rank(problem, one))


def downsized(problem: Problem, bins: Sequence[Bin]) -> tuple[Bin, ...]:
    """Each server on the cheapest kind that holds its adapters, if there are GPUs of that kind."""
    left = dict(problem.stock)
    for name, count in used_gpus(bins).items():
        if name in left:
            left[name] -= count
    made = []
    for item in bins:
        kinds = [p for p in problem.profiles if p.model.name == item.profile.model.name]
        weight = problem.objective.weight
        for profile in sorted(kinds, key=weight):
            gpus = profile.engine.tensor_parallel_size
            if weight(profile) >= weight(item.profile) - 1e-9 or problem.out_of_time():
                break
            if item.is_split or left.get(profile.gpu.name, gpus) < gpus:
                continue
            (found,) = real_bins(replace(problem, profiles=(profile,)), [item.adapters])
            if found is not None:
                for name, change in ((profile.gpu.name, -gpus), (item.profile.gpu.name, item.gpus)):
                    if name in left:
                        left[name] += change
                item = found
                break
        made.append(item)
    return tuple(made)


class _Search:
    """One run: the best servers of each model so far, in the numbers of its adapters."""

    def __init__(self, problem: Problem, first: Solution) -> None:
        self.problem = problem
        self.parts = parts(problem)
        self.mixes = [Mixes(part.problem, m) for m, part in enumerate(self.parts)]
        self.bins: list[tuple[Bin, ...]] = []
        for part in self.parts:
            number = {i: k for k, i in enumerate(part.adapters)}
            own = (item for item in first.bins if item.adapters[0] in number)
            self.bins.append(
                tuple(replace(item, adapters=tuple(number[i] for i in item.adapters)) for item in own)
            )
        self.first = self._price()

    def run(self) -> Solution:
        """The best plan with its bound, statistics among the details."""
        try:
            # a cut of every model before one takes its time: without it there is no bound
            if all(mixes.start(bins) for mixes, bins in zip(self.mixes, self.bins, strict=True)):
                for _ in range(_ROUNDS):
                    for m, mixes in enumerate(self.mixes):
                        mixes.doubts.clear()
                        self._mixed(m, self.problem.remaining_s() * (1.0 - 1.0 / (len(self.parts) - m)))
                    if self._bound(proven=False) >= self._price() - _CHEAPER:
                        break
            for mixes in self.mixes:
                mixes.prove()
        except OutOfTime:
            pass
        bound, surely = self._bound(proven=False), self._bound(proven=True)
        proven = surely >= bound - _CHEAPER
        claim = "relaxation over patterns for each mix of kinds of server"
        claim = (
            f"{claim}; every better pattern was excluded"
            if proven
            else f"estimate: {claim}, if the search missed no better one"
        )
        sources = [each for mixes in self.mixes for each in mixes.sources]
        statistics = {
            "greedy": self.first,
            "cuts": sum(len(each.cuts) for each in self.mixes),
            "patterns": sum(len(each.patterns) for each in sources),
            "classes": sum(len(each.classes) for each in self.mixes),
            "rounding_loss": max(each.classes.loss for each in self.mixes),
            "bins_evaluated": sum(f.evaluated for each in sources for f in {each.mean, each.light}),
        }
        return replace(
            merged(self.problem, self.parts, [Solution(bins) for bins in self.bins]),
            lower_bound=bound if bound > 0.0 else None,
            bound_source=claim if bound > 0.0 else "",
            proven=proven and bound > 0.0,
            details=statistics,
        )

    def _price(self, chosen: Sequence[Bin] | None = None) -> float:
        """Of these servers, of all if None."""
        bins = [item for own in self.bins for item in own] if chosen is None else chosen
        return sum(self.problem.objective.weight(item.profile) for item in bins)

    def _bound(self, *, proven: bool) -> float:
        """The price of the cheapest mixes that the cuts of all models leave; 0 if that is not known."""
        sources = [source for mixes in self.mixes for source in mixes.sources]
        cuts, first = [], 0
        for mixes, bins in zip(self.mixes, self.bins, strict=True):
            last = first + len(mixes.sources)
            used = [item.profile for item in bins]
            at_hand = np.array([used.count(source.mean.problem.profile) for source in mixes.sources])
            # a cut that the plan breaks missed a pattern, or the twin admits more than trees
            for cut in mixes.cuts:
                if (cut.proven or not proven) and cut.admits(at_hand):
                    most = np.zeros(len(sources))
                    most[first:last] = cut.most
                    cuts.append(replace(cut, most=most))
            first = last
        servers = cheapest(sources, cuts, self.problem.stock)
        return 0.0 if servers is None else float(servers @ [source.price for source in sources])

    def _stock(self, m: int) -> dict[str, int]:
        """GPUs at hand that other models leave."""
        used = used_gpus(item for k, own in enumerate(self.bins) for item in own if k != m)
        return {name: count - used.get(name, 0) for name, count in self.problem.stock.items()}

    def _mixed(self, m: int, until_s: float) -> None:
        """Mixes of a model by rising price: each is excluded, or its adapters are packed on it, or that fails."""
        mixes = self.mixes[m]
        prices = np.array([source.price for source in mixes.sources])
        rng = np.random.default_rng([self.problem.seed, m])
        while self.problem.remaining_s() > until_s:
            servers = cheapest(mixes.sources, [*mixes.cuts, *mixes.doubts], self._stock(m))
            if servers is None or servers @ prices >= self._price(self.bins[m]) - _CHEAPER:
                return
            for few in (True, False):
                master = mixes.relaxed(servers, until_s, few=few)
                if not mixes.admit(servers):
                    break
                if master is None:
                    return
                if self._packed(m, servers, master, rng):
                    break
                if not few:
                    mixes.doubt(master.duals, servers)

    def _packed(self, m: int, servers: IntArray, master: Master, rng: np.random.Generator) -> bool:
        """Take a plan on these servers of each kind if one is found."""
        for k in range(_PACKINGS if master.value <= 1.0 + _TOLERANCE else 0):
            rows = self.mixes[m].packed(servers, master, 0.02 * k, rng)
            if rows is not None and self._take(m, self._realised(m, rows)):
                return True
        return False

    def _take(self, m: int, found: Solution) -> bool:
        """Take servers of a model if they are cheaper, each on the cheapest kind that holds its adapters.

        They are confirmed, or mended: else the search would go on from a plan that does not hold.
        """
        problem = replace(self.parts[m].problem, stock=self._stock(m))
        if found.unplaced:
            return False
        bins = downsized(problem, found.bins)
        if self._price(bins) >= self._price(self.bins[m]) - _CHEAPER:
            return False
        evaluations = problem.evaluator.confirmed(problem.workload, bins)
        refused = np.flatnonzero(~problem.objective.admissible(evaluations)).tolist()
        holding = mended(problem, bins, refused) if refused else bins
        if holding is not None:
            self.bins[m] = holding
        return holding is not None

    def _realised(self, m: int, chosen: list[tuple[Source, IntArray]]) -> Solution:
        """Bins of the adapters of a model for patterns that hold all; what the predictor refuses is packed anew."""
        part, remaining = self.parts[m], self._stock(m)
        sets = self.mixes[m].classes.assign([row for _, row in chosen])
        bins: list[Bin] = []
        for (source, _), each in zip(chosen, sets, strict=True):
            made = _largest_part(source.mean.problem, each)
            bins += [made] if made is not None else []
        rest = _left(part.problem, bins)
        slots = SlotSearch(part.problem)
        for k in range(len(bins)):
            if rest.size:
                bins[k] = top_up(slots, bins[k], rest)
                rest = _left(part.problem, bins)
        for gpu, count in used_gpus(bins).items():
            if gpu in remaining:
                remaining[gpu] -= count
        fit = FirstFit(replace(part.problem, stock=remaining), rest)
        fit.run()
        return Solution((*bins, *fit.bins), tuple(fit.left))


def _left(problem: Problem, bins: Sequence[Bin]) -> IntArray:
    """Adapters without a server, by falling load."""
    placed = {i for item in bins for i in item.adapters}
    rest = np.array([i for i in range(len(problem.workload)) if i not in placed], dtype=np.int64)
    return rest[np.argsort(-problem.workload.offered_tok_s_by_adapter[rest], kind="stable")]


def _largest_part(problem: Problem, adapters: Sequence[int]) -> Bin | None:
    """A server of these adapters without the fewest of the lightest ones that it can't take."""
    loads = problem.workload.offered_tok_s_by_adapter
    order = sorted(adapters, key=lambda i: (-loads[i], i))
    low, high = 0, len(order) + 1  # so many fit, so many do not
    best: Bin | None = None
    tried = len(order)
    while high - low > 1:
        (made,) = real_bins(problem, [tuple(sorted(order[:tried]))])
        low, high, best = (low, tried, best) if made is None else (tried, high, made)
        tried = (low + high) // 2 if low else max(1, high * 9 // 10)
    return best
