"""`mixed`: which kinds of server, how many of each, and what is on them, for the lowest price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.gpu import same_model
from packer.search import reach
from packer.solvers.base import Problem, Solution, used_gpus
from packer.solvers.by_model import merged, parts, rank, solved
from packer.solvers.classes import FEW_BINS
from packer.solvers.columns.enumeration import cheapest_cover
from packer.solvers.columns.exact import FEW_SIMULATED, ExactSearch
from packer.solvers.columns.mixes import Cut, Mixes, cheapest
from packer.solvers.columns.source import Source
from packer.solvers.confirm import repaired, solution_that_holds
from packer.solvers.feasibility import OutOfTime
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.greedy.solver import Greedy
from packer.solvers.greedy.top_up import top_up
from packer.solvers.limit import within_limit
from packer.solvers.slots import SlotSearch, real_bins
from packer.solvers.support import plain

DEFAULT_S = 20.0  # Work of a search without a time limit, s.
_START_SHARE = 0.6
_ROUNDS = 8  # Number of rounds; each tries mixes that could not be packed before again, with more patterns.
_PACKINGS = 4  # Attempts to pack the adapters on a mix.
_CHEAPER = 1e-9
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Mixed:
    """The cheapest mix of kinds of server for each base model, by column generation and cuts on whole servers.

    Starts from greedy with all kinds and with each kind alone. Then it tries cheaper mixes of kinds one by one: it
    excludes a mix by the duals of its relaxation over patterns, or packs the adapters on it.

    `work_s`: without a time limit it ends after so much work (`packer.solvers.work`), seconds on a usual server.
    """

    work_s: float = DEFAULT_S

    name = "mixed"
    joint = True

    def supports(self, problem: Problem) -> str | None:
        """Objectives that minimise GPUs or prices; no replicas, no replayed traces, no running plan."""
        objective = problem.objective
        if objective.fixed_gpus or objective.minimises not in ("gpus", "price"):
            return "it minimises GPUs or their price; for a given number take spread-refined"
        if not objective.symmetric or problem.old_bins:
            return "it counts adapters of equal rank, rate and lengths as one kind; take the solver greedy"
        return plain(replace(problem, profiles=problem.profiles[:1]))

    def solve(self, problem: Problem) -> Solution:
        """The cheapest of the plans found, with the bound of the relaxation."""
        free = replace(problem, max_gpus=None).within(self.work_s)
        best = solution_that_holds(free.with_share(_START_SHARE), starting_plan)
        if best.unplaced:
            return within_limit(problem, best)
        if len(problem.profiles) == 1 and not problem.stock:
            search = ExactSearch(free, best.bins)
            search.run()
            return within_limit(problem, search.solution(best))
        return within_limit(problem, _Search(free, best).run())


def starting_plan(problem: Problem) -> Solution:
    """Greedy with all kinds, or with the best single kind for each model if that is better; downsized."""
    found = parts(problem)
    options = [solved(problem, Greedy())]
    if len(problem.profiles) > len(found) and not problem.stock and not problem.out_of_time():
        solutions = []
        for part in found:
            alone = [Greedy().solve(replace(part.problem, profiles=(profile,))) for profile in part.problem.profiles]
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
        kinds = [p for p in problem.profiles if same_model(p.model, item.profile.model)]
        weight = problem.objective.weight
        for profile in sorted(kinds, key=weight):
            gpus = profile.engine.gpus
            # Kinds are sorted by weight: none of the rest is cheaper.
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
    """One run. `bins`: the best servers of each model so far; adapters are indices within the model."""

    def __init__(self, problem: Problem, first: Solution) -> None:
        self.problem = problem
        self.parts = parts(problem)
        self.mixes = [Mixes(part.problem, m) for m, part in enumerate(self.parts)]
        self.bins: list[tuple[Bin, ...]] = []
        for part in self.parts:
            number = {i: k for k, i in enumerate(part.adapters)}
            own = (item for item in first.bins if item.adapters[0] in number)
            self.bins.append(tuple(item.under(number) for item in own))
        self.packings: list[dict[tuple[int, ...], tuple[Bin, ...]]] = [{} for _ in self.parts]
        """For each model, the servers found by mix."""

    def run(self) -> Solution:
        """The best plan with its bound."""
        proven_price: float | None = None
        try:
            proven_price = self._enumerated()
            if proven_price is None:
                self._generated()
        except OutOfTime:
            pass
        bound = surely = proven_price if proven_price is not None else self._bound(proven=False)
        if proven_price is None:
            surely = self._bound(proven=True)
        elif bound > self._price() + _CHEAPER:  # the twin admits servers that the trees refuse
            bound = 0.0
        # trees that lead a search prove nothing about the twin that evaluates its plan
        proven = surely >= bound - _CHEAPER and not self.problem.evaluator.confirms
        claim = "every possible server was evaluated"
        if proven_price is None:
            claim = "relaxation over patterns for each mix of kinds of server"
        claim = (
            f"{claim}; every better pattern was excluded"
            if proven
            else f"estimate: {claim}, if the search missed no better one"
        )
        return replace(
            merged(self.problem, self.parts, [Solution(bins) for bins in self.bins]),
            lower_bound=bound if bound > 0.0 else None,
            bound_source=claim if bound > 0.0 else "",
            proven=proven and bound > 0.0,
        )

    def _enumerated(self) -> float | None:
        """The lowest price, by evaluating every possible server; None if there are too many, or a stock is given. The
        plan has this price, unless trees led the search and the twin refuses some servers. Raises `OutOfTime`."""
        if self.problem.stock:
            return None
        few = FEW_SIMULATED if self.problem.evaluator.simulates else FEW_BINS
        total = 0.0
        for m, mixes in enumerate(self.mixes):
            kinds = [source.mean for source in mixes.sources]
            cover = cheapest_cover(kinds, mixes.prices, most=few, time_limit_s=self.problem.wall_s / 2.0)
            if cover is None or not cover.proven:
                return None
            total += float(mixes.prices[cover.kinds].sum())
            chosen = [(mixes.sources[k], row) for k, row in zip(cover.kinds.tolist(), cover.rows, strict=True)]
            bins = self._realised(m, chosen, np.bincount(cover.kinds, minlength=len(mixes.sources)))
            if bins is not None and self._price(bins) < self._price(self.bins[m]) - _CHEAPER:
                self.bins[m] = bins
        return total

    def _generated(self) -> None:
        """Generate patterns and cuts until the plan attains its bound, or all rounds are done; raises `OutOfTime`."""
        # start with a cut for every model, before one model uses up the time: without a cut there is no bound
        if all(mixes.begin(bins) for mixes, bins in zip(self.mixes, self.bins, strict=True)):
            for _ in range(_ROUNDS):
                self._search()
                if self._bound(proven=False) >= self._price() - _CHEAPER:
                    break
                for mixes in self.mixes:
                    mixes.doubts.clear()
        for mixes in self.mixes:
            mixes.prove()

    def _price(self, chosen: Sequence[Bin] | None = None) -> float:
        """Price of these servers; None: of all servers of the plan."""
        bins = [item for own in self.bins for item in own] if chosen is None else chosen
        return sum(self.problem.objective.weight(item.profile) for item in bins)

    def _bound(self, *, proven: bool) -> float:
        """The price of the cheapest mixes that satisfy the cuts of all models; 0 if it is not known."""
        # ignore cuts that the plan violates: they missed a pattern, or the twin admits what trees refuse
        holding = [
            [cut for cut in mixes.cuts if (cut.proven or not proven) and cut.allows(mixes.counts(bins))]
            for mixes, bins in zip(self.mixes, self.bins, strict=True)
        ]
        servers = self._cheapest(holding)
        pairs = zip([] if servers is None else servers, self.mixes, strict=servers is not None)
        return sum(float(own @ mixes.prices) for own, mixes in pairs)

    def _cheapest(self, cuts: Sequence[Sequence[Cut]]) -> list[IntArray] | None:
        """Servers of each kind, for each model, that satisfy its cuts and the stock of GPUs at the lowest price."""
        sources = [source for mixes in self.mixes for source in mixes.sources]
        starts = np.cumsum([0, *(len(mixes.sources) for mixes in self.mixes)])
        wide = []
        for m, own in enumerate(cuts):
            for cut in own:
                most = np.zeros(len(sources))
                most[starts[m] : starts[m + 1]] = cut.most
                wide.append(replace(cut, most=most))
        servers = cheapest(sources, wide, self.problem.stock)
        return None if servers is None else np.split(servers, starts[1:-1])

    def _search(self) -> None:
        """Try mixes of all models in order of price: exclude each one, or pack the adapters on it, or give it up."""
        while not self.problem.out_of_time():
            servers = self._cheapest([[*mixes.cuts, *mixes.doubts] for mixes in self.mixes])
            if servers is None or not self._cheaper(servers):
                return
            packed = [self._packed(m, own) for m, own in enumerate(servers)]
            if all(own is not None for own in packed):
                self.bins = [own for own in packed if own is not None]

    def _cheaper(self, servers: Sequence[IntArray]) -> bool:
        """Whether these servers cost less than the present plan; without a stock, whether those of any model do."""
        less = [
            self._price(bins) - float(own @ mixes.prices)
            for own, mixes, bins in zip(servers, self.mixes, self.bins, strict=True)
        ]
        return (sum(less) if self.problem.stock else max(less)) > _CHEAPER

    def _packed(self, m: int, servers: IntArray) -> tuple[Bin, ...] | None:
        """Pack the adapters of a model on these servers of each kind; None if the mix is excluded or packing fails. A
        packing that is cheaper than the present servers of the model is taken at once."""
        mixes, key, price = self.mixes[m], tuple(servers.tolist()), float(servers @ self.mixes[m].prices)
        if np.array_equal(mixes.counts(self.bins[m]), servers) or (
            not self.problem.stock and price >= self._price(self.bins[m]) - _CHEAPER
        ):
            return self.bins[m]
        if key in self.packings[m]:
            return self.packings[m][key]
        for few in (True, False):
            if not mixes.relaxed(servers, few=few) or not mixes.admit(servers):
                return None
            assert mixes.master is not None
            # If the relaxation needs more than the mix, these patterns can not be packed on it either.
            for k in range(_PACKINGS if mixes.master.value <= 1.0 + _TOLERANCE else 0):
                rows = mixes.dive(servers, 0.02 * (k // 2), rounded=bool(k % 2))
                bins = None if rows is None else self._realised(m, rows, servers)
                if bins is None:
                    continue
                if self._price(bins) < self._price(self.bins[m]) - _CHEAPER and self._fits(m, bins):
                    self.bins[m] = bins
                if self._price(bins) <= price + _CHEAPER:
                    self.packings[m][key] = bins
                    return bins
            if not few:
                mixes.doubt(mixes.master.duals, servers)
        return None

    def _fits(self, m: int, bins: Sequence[Bin]) -> bool:
        """Whether the stock of GPUs suffices for these servers and the servers of the other models."""
        others = (item for k, own in enumerate(self.bins) for item in own if k != m)
        used = used_gpus([*bins, *others])
        return all(used.get(name, 0) <= count for name, count in self.problem.stock.items())

    def _realised(self, m: int, chosen: list[tuple[Source, IntArray]], servers: IntArray) -> tuple[Bin, ...] | None:
        """Turn patterns that hold all adapters of a model into bins, each on the cheapest kind that holds it. Adapters
        that don't fit are packed again. None if that fails, or takes more of the stock than the mix has."""
        mixes, problem = self.mixes[m], self.parts[m].problem
        # Bins may take only the GPUs that the mix gives this model: the others are for other models.
        stock = dict.fromkeys(problem.stock, 0)
        for source, count in zip(mixes.sources, servers.tolist(), strict=True):
            if source.gpu in stock:
                stock[source.gpu] += source.gpus * count
        problem = replace(problem, stock=stock)
        sets = mixes.classes.assign([row for _, row in chosen])
        bins: list[Bin] = []
        for (source, _), each in zip(chosen, sets, strict=True):
            made = _largest_part(source.mean.problem, each)
            bins += [made] if made is not None else []
        rest = _left(problem, bins)
        slots = SlotSearch(problem)
        for k in range(len(bins)):
            if rest.size:
                bins[k] = top_up(slots, bins[k], rest)
                rest = _left(problem, bins)
        used = used_gpus(bins)
        fit = FirstFit(replace(problem, stock={gpu: stock[gpu] - used.get(gpu, 0) for gpu in stock}), rest)
        fit.run()
        if fit.left:
            return None
        found = downsized(problem, (*bins, *fit.bins))
        evaluations = problem.evaluator.judged(problem.workload, found)
        refused = np.flatnonzero(~problem.objective.holds(evaluations)).tolist()
        return repaired(problem, found, refused) if refused else found


def _left(problem: Problem, bins: Sequence[Bin]) -> IntArray:
    """Adapters without a server, by falling load."""
    placed = {i for item in bins for i in item.adapters}
    rest = np.array([i for i in range(len(problem.workload)) if i not in placed], dtype=np.int64)
    return rest[np.argsort(-problem.workload.offered_tok_s_by_adapter[rest], kind="stable")]


def _largest_part(problem: Problem, adapters: Sequence[int]) -> Bin | None:
    """A server of these adapters after removing the fewest, lightest first, so that it holds; None if nothing helps."""
    loads = problem.workload.offered_tok_s_by_adapter
    order = sorted(adapters, key=lambda i: (-loads[i], i))
    made: dict[int, Bin | None] = {}

    def holds(n: int) -> bool:
        (made[n],) = real_bins(problem, [tuple(sorted(order[:n]))])
        return made[n] is not None

    return made.get(reach(holds, 1, len(order), len(order), -(-len(order) // 10))[0])
