"""`mixed`: which kinds of server, how many of each, and what is on them, for the lowest price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.profile import Profile
from packer.solvers.base import Problem, Solution, used_gpus
from packer.solvers.by_model import Part, merged, parts, rank, solved
from packer.solvers.classes import IntArray
from packer.solvers.confirm import lacking
from packer.solvers.exact.master import solve_integer
from packer.solvers.feasibility import OutOfTime, real_bins
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.greedy.solver import Greedy
from packer.solvers.greedy.top_up import top_up
from packer.solvers.limit import within_limit
from packer.solvers.mixed.columns import Columns, Source
from packer.solvers.mixed.repack import Repack
from packer.solvers.slots import SlotSearch

DEFAULT_S = 20.0
"""Time without a limit."""

_START_SHARE = 0.4
_HARDENINGS = 3
_COLUMNS_SHARE = 0.3
_REPACK_SHARE = 0.7
"""Of what column generation leaves; the rest is for whole numbers of its patterns."""
_INTEGER_S = 2.0


class Mixed:
    """Column generation with a kind and a price for each pattern, over all base models at once.

    Starts from greedy with all kinds and with each kind alone, prices patterns of every model on every kind against
    the duals of the pattern model, solves it in whole numbers (HiGHS), and packs a few
    servers at a time anew on cheaper mixes of kinds. Without a time limit it takes at most about 20 s beyond greedy.
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
        free, best = _confirmed_start(free)
        if best.unplaced:
            return within_limit(problem, best)
        best, bound, proven, details = _Search(free, best).run()
        source = (
            "linear relaxation over patterns of each kind of server; every better pattern was excluded"
            if proven
            else "estimate: linear relaxation over patterns of each kind of server, if the search missed no better one"
        )
        known = bound > 0.0
        found = replace(
            best,
            lower_bound=bound if known else None,
            bound_source=source if known else "",
            proven=proven,
            details=details,
        )
        return within_limit(problem, found)


def _elapsed(problem: Problem) -> float:
    return 1.0 - replace(problem, time_limit_s=1.0).remaining_s()


def _confirmed_start(problem: Problem) -> tuple[Problem, Solution]:
    """Greedy's plan whose bins the whole predictor admits, and the problem with the rates raised that it took."""
    timed = problem.with_share(_START_SHARE)
    raised: dict[Profile, float] = dict(problem.evaluator.raised)
    best = starting_plan(timed)
    for _ in range(_HARDENINGS if problem.evaluator.confirms else 0):
        found = problem.evaluator.confirmed(problem.workload, best.bins)
        refused = np.flatnonzero(~problem.objective.admissible(found)).tolist()
        if best.unplaced or not refused or timed.out_of_time():
            break
        more = lacking(best.bins, found, refused)
        raised = {
            **raised,
            **{each: (1.0 + raised.get(each, 0.0)) * (1.0 + x) - 1.0 for each, x in more.items()},
        }
        problem = replace(problem, evaluator=problem.evaluator.hardened(raised))
        timed = replace(timed, evaluator=problem.evaluator)
        best = starting_plan(timed)
    return problem, best


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
    """One run: the best plan so far, in the numbers of the whole fleet."""

    def __init__(self, problem: Problem, first: Solution) -> None:
        self.problem, self.best = problem, first
        self.parts = parts(problem)
        self.rank = rank(problem, first)
        self.columns = Columns(problem, self.parts)
        self.found: dict[str, object] = {"greedy": self.rank[2] if len(self.rank) > 2 else None}

    def run(self) -> tuple[Solution, float, bool, dict[str, object]]:
        """The best plan, the bound, whether that is proven, and statistics."""
        columns, bound, proven = self.columns, 0.0, False
        try:
            if columns.start(self._patterns()):
                columns.run((1.0 - _COLUMNS_SHARE) * self.problem.remaining_s())
                bound, proven = columns.bound()
            self._repack(_REPACK_SHARE)
            if columns.master is not None:
                self._try("dive", columns.dive())
                self._integer()
        except OutOfTime:
            pass
        value = self.rank[2]
        statistics = self.found | {
            "relaxation": None if columns.master is None else columns.master.value,
            "converged": columns.converged,
            "patterns": sum(len(source.patterns) for source in columns.sources),
            "classes": sum(len(each) for each in columns.classes),
            "rounding_loss": max(each.loss for each in columns.classes),
            "bins_evaluated": sum(s.mean.evaluated + s.light.evaluated for s in columns.sources),
        }
        if bound > value * (1.0 + 1e-9):  # a search that missed a pattern can promise too much
            bound, proven = 0.0, False
        return self.best, bound, proven, statistics

    def _repack(self, share: float) -> None:
        """Each model's servers on cheaper mixes of kinds; with GPUs at hand shared by models, these keep theirs."""
        left = self.problem.remaining_s()
        solutions = []
        for m, part in enumerate(self.parts):
            number = {i: k for k, i in enumerate(part.adapters)}
            own = [item for item in self.best.bins if item.adapters[0] in number]
            others = [item for item in self.best.bins if item.adapters[0] not in number]
            used = used_gpus(others)
            stock = {name: count - used.get(name, 0) for name, count in self.problem.stock.items()}
            local = [replace(item, adapters=tuple(number[i] for i in item.adapters)) for item in own]
            search = Repack(replace(part.problem, stock=stock), local, self.problem.seed + m)
            for source in self.columns.sources:
                if source.part == m and len(source.patterns):
                    heaviest = float((source.patterns @ source.mean.classes.loads).max())
                    search.know(source.mean.problem.profile, heaviest)
            search.run(left * (1.0 - share * (m + 1) / len(self.parts)))
            solutions.append(Solution(tuple(search.bins)))
        self._take("repacked", merged(self.problem, self.parts, solutions))

    def _patterns(self) -> list[tuple[Source, IntArray]]:
        """The bins at hand as patterns of their source."""
        number = {i: (m, k) for m, part in enumerate(self.parts) for k, i in enumerate(part.adapters)}
        made = []
        for item in self.best.bins:
            m = number[item.adapters[0]][0]
            row = self.columns.classes[m].counts([number[i][1] for i in item.adapters])
            source = next(
                s for s in self.columns.sources if s.part == m and s.mean.problem.profile == item.profile
            )
            made.append((source, row))
        return made

    def _integer(self) -> None:
        patterns, prices, owners = self.columns.stacked()
        seconds = min(_INTEGER_S, max(0.1, self.problem.remaining_s() / 2))
        use, _ = solve_integer(patterns, self.columns.demand, time_limit_s=seconds, prices=prices)
        if use is None:
            return
        chosen = [owners[j] for j in np.flatnonzero(use).tolist() for _ in range(int(use[j]))]
        sources = self.columns.sources
        self._try("integer", [(sources[k], sources[k].patterns[row].copy()) for k, row in chosen])

    def _try(self, name: str, chosen: list[tuple[Source, IntArray]] | None) -> None:
        """Take a cover by patterns if its plan is better."""
        if chosen is None:
            return
        solutions = []
        left = dict(self.problem.stock)
        for m, part in enumerate(self.parts):
            own = [(source, row) for source, row in chosen if source.part == m]
            one = self._realised(part, self.columns.classes[m].demand, own, left)
            for gpu, count in used_gpus(one.bins).items():
                if gpu in left:
                    left[gpu] -= count
            solutions.append(one)
        self._take(name, merged(self.problem, self.parts, solutions))

    def _take(self, name: str, found: Solution) -> None:
        """Take a plan if it is better, each server on the cheapest kind that holds its adapters."""
        if not found.unplaced:
            found = replace(found, bins=downsized(self.problem, found.bins))
        reached = rank(self.problem, found)
        self.found[name] = None if found.unplaced else reached[2]
        if reached < self.rank:
            self.best, self.rank = found, reached

    def _realised(
        self, part: Part, demand: IntArray, chosen: list[tuple[Source, IntArray]], stock: dict[str, int]
    ) -> Solution:
        """Bins of the adapters of a part for a cover by patterns; what the predictor refuses is packed anew."""
        rows = np.array([row for _, row in chosen], dtype=np.int64).reshape(-1, len(demand))
        over = rows.sum(axis=0) - demand
        for k in np.flatnonzero(over > 0).tolist():
            while over[k] > 0:
                fullest = int(np.argmax(np.where(rows[:, k] > 0, rows.sum(axis=1), -1)))
                take = min(int(over[k]), max(1, int(rows[fullest, k]) // 4))
                rows[fullest, k] -= take
                over[k] -= take
        kept = [j for j in range(len(rows)) if rows[j].any()]
        classes = self.columns.classes[self.parts.index(part)]
        sets = classes.assign([rows[j] for j in kept])
        bins: list[Bin] = []
        for j, each in zip(kept, sets, strict=True):
            made = _largest_part(chosen[j][0].mean.problem, each)
            bins += [made] if made is not None else []
        rest = _left(part.problem, bins)
        slots = SlotSearch(part.problem)
        for k in range(len(bins)):
            if rest.size:
                bins[k] = top_up(slots, bins[k], rest)
                rest = _left(part.problem, bins)
        remaining = dict(stock)
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
    ordered: IntArray = rest[np.argsort(-problem.workload.offered_tok_s_by_adapter[rest], kind="stable")]
    return ordered


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
