"""`exact`: the pattern model with column generation, rounded and repaired, with its proven bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.solvers.base import Bound, Problem, Solution, start
from packer.solvers.candidates import EVERY, tried_words
from packer.solvers.classes import FEW_BINS, aggregate
from packer.solvers.columns.enumeration import cheapest_cover, packed
from packer.solvers.columns.generation import BOUND, SEARCHED_MARGIN, TO_THE_END, Columns, Schedule, promise
from packer.solvers.columns.master import solve_integer
from packer.solvers.columns.proof import Certificate, certify
from packer.solvers.columns.rounding import realise
from packer.solvers.columns.source import Source
from packer.solvers.feasibility import Feasibility, OutOfTime
from packer.solvers.limit import within_limit
from packer.solvers.support import counts_gpus

START_SHARE = 0.4  # Share of the time for the plan from which the search starts.
_PROOF_SHARE, _COLUMNS_SHARE = 0.5, 0.4
"""Shares of the remaining time: for columns that raise the bound, and for more columns in each integer round."""

_UNMERGED = 160  # Up to this number, each kind of adapter is a class; more kinds are merged into `classes.MAX_CLASSES`.
FEW_SIMULATED = 100  # Up to so many different bins, each is simulated for a bound alone; a search takes hundreds.

_ROUNDS = 40
_EPSILON = 1e-6
_ONE = np.ones(1, dtype=np.int64)
_EVALUATED_BEYOND = 20_000


def limited(problem: Problem, first: Solution, bound: Bound, details: dict[str, object]) -> Solution:
    """The solution with its bound, cut down to the GPUs available; a solution that is cut down is infeasible."""
    weight = problem.objective.weight(problem.profile)
    # A bound of one GPU is trivial. A bound above the plan is wrong: its search missed a bin.
    known = bound.value > weight or len(first.bins) <= 1
    known &= bound.value <= len(first.bins) * weight
    found = replace(
        first, lower_bound=bound.value if known else None, bound_source=bound.source if known else "",
        proven=known and bound.proven, details={**first.details, **details},
    )  # fmt: skip
    cut = within_limit(problem, found)
    if problem.max_gpus is None or cut is found or problem.objective.minimises != "gpus":
        return cut
    if bound.value <= problem.max_gpus:
        return cut
    necessary = f"At least {bound.value:.0f} GPUs are necessary ({bound.source})"
    return replace(cut, reasons=(*cut.reasons, necessary))


class Exact:
    """Fewest GPUs by column generation over classes; stops at gap 0, the time limit or when nothing helps.

    `start_share`: share of the time for the plan from which the search starts. `bound_alone`: see `ExactSearch.run`.
    """

    name = "exact"
    supports = staticmethod(counts_gpus)
    start_share = START_SHARE
    bound_alone = False

    def solve(self, problem: Problem) -> Solution:
        """Greedy's bins or fewer, with the bound."""
        first = start(problem.with_share(self.start_share))
        if first.unplaced:
            return within_limit(problem, first)
        search = ExactSearch(problem, first.bins)
        search.run(bound_alone=self.bound_alone)
        return search.solution(first)


class ExactSearch:
    """One run: the best bins so far, and the best bound so far.

    `bins`: the best plan so far; always complete.
    `least`: no plan has fewer servers (relative to the predictor), by the argument `source`.
    `exhaustive`: the bound `least` is proven by enumeration up to dominance; otherwise a search found no better bin.
    `certain`: the predictor keeps this dominance, or the argument needs none.
    """

    def __init__(self, problem: Problem, bins: Sequence[Bin]) -> None:
        self.bins = tuple(bins)
        self.least, self.source = 1, "a fleet needs at least one server"
        self.exhaustive = self.certain = True
        self.classes = aggregate(problem.workload, unmerged=_UNMERGED)
        # The present plan must stay among the bins that are searched.
        most = max(problem.learned().most_adapters, max((len(item.adapters) for item in self.bins), default=0))
        self.problem = replace(problem, most_adapters=most)
        self.feasibility = Feasibility(self.problem, self.classes)
        rng = np.random.default_rng(problem.seed)
        self.columns = Columns([Source(1.0, self.feasibility, self.feasibility, rng)])

    @property
    def closed(self) -> bool:
        """Whether the plan meets a bound of an exhaustive search; an estimated bound does not end the search."""
        return self.exhaustive and len(self.bins) <= self.least

    @property
    def bound(self) -> Bound:
        """The bound, relative to the predictor that evaluates the plan; the search may use another predictor."""
        # If trees lead the search, its bound says nothing certain about the predictor that confirms the plan.
        proven = self.least <= 1 or (self.certain and not self.problem.evaluator.confirms)
        provided = ", if the predictor is monotone" if self.exhaustive and not self.certain else ""
        value = self.least * self.problem.objective.weight(self.problem.profile)
        return Bound(value, self.source if proven else f"estimate{provided}: {self.source}", proven)

    def run(self, *, bound_alone: bool = False) -> None:
        """Search until the gap is closed, the time is up, or a whole round changes nothing. `bound_alone`: if there are
        too many bins to evaluate each, only compute the bound of a few prices."""
        try:
            few = FEW_SIMULATED if bound_alone and self.problem.evaluator.simulates else FEW_BINS
            if self.closed or self._enumerate(few):
                return
            if not self.columns.start([self.classes.rows(self.bins)]):
                return
            self.columns.warm()
            if bound_alone:
                self._promise()
                return
            self._prove()
            self._settle()
            self._improve()
        except OutOfTime:
            self._promise()

    def resume(self, before: ExactSearch) -> None:
        """Search for a smaller plan only, with the bound and the patterns of a search by another evaluator."""
        self.least, self.source, self.exhaustive, self.certain = (
            before.least, before.source, before.exhaustive, before.certain,
        )  # fmt: skip
        known = before.columns.sources[0].patterns
        with suppress(OutOfTime):
            if self.columns.start([np.concatenate([self.classes.rows(self.bins), known])]):
                self._improve()

    def _promise(self) -> None:
        """Take the bound of the weights so far as an estimate."""
        if self.columns.priced:
            self._raise(self.columns.promised, self._argument(0, exhaustive=False), exhaustive=False)

    def solution(self, first: Solution) -> Solution:
        """The best plan with its bound and details."""
        master = self.columns.master
        details: dict[str, object] = {
            "classes": len(self.classes),
            "rounding_loss": self.classes.loss,
            "patterns": len(self.columns.sources[0].patterns),
            "relaxation": None if master is None else master.value,
            "bound_by_enumeration": self.certain,
            "bins_evaluated": self.feasibility.evaluated,
            **{f"dominance_{name}": getattr(self.feasibility, name) for name in ("checks", "violations")},
        }
        return limited(self.problem, replace(first, bins=self.bins), self.bound, details)

    def _raise(self, least: int, source: str, *, exhaustive: bool, every: bool = False) -> None:
        """Take a bound if it is higher, or equal and better proven; `every`: every possible bin was evaluated. A bound
        above the present plan is ignored: its search missed a bin."""
        known = every or self._exhausted(exhaustive)
        certain = every or (known and self.problem.evaluator.monotone)
        if (least, known, certain) > (self.least, self.exhaustive, self.certain) and least <= len(self.bins):
            self.least, self.source, self.exhaustive, self.certain = least, source, known, certain

    def _realise(self, rows: Sequence[IntArray]) -> bool:
        """Assign the real adapters to these patterns, and take the plan if it is smaller; returns whether it is."""
        bins = realise(self.problem, self.classes, rows)
        if bins is None or len(bins) >= len(self.bins):
            return False
        self.bins = bins
        self.problem.progress("exact: GPUs", len(bins), self.least)
        return True

    def _enumerate(self, most: int) -> bool:
        """Evaluate every possible bin, if there are at most `most`; True if the optimum is proven."""
        found = cheapest_cover([self.feasibility], np.ones(1), most=most, time_limit_s=self._seconds)
        if found is None:
            return False
        self._realise(list(found.rows))
        if found.proven:
            name = self.problem.evaluator.name
            source = f"{self._most}every possible bin was evaluated by the predictor {name!r}"
            self._raise(len(found.rows), source, exhaustive=True, every=True)
        return found.proven

    def _generate(self, schedule: Schedule, share: float) -> None:
        """Generate columns until none improves the bound or a share of the time is up."""
        over = self.problem.with_share(share).out_of_time
        # if the bound is an estimate anyway, better weights prove nothing more
        estimated = self.problem.evaluator.confirms or self.classes.loss > 0.0

        def enough() -> bool:
            columns = self.columns
            if self.closed or over() or schedule is TO_THE_END:
                return self.closed or over()
            # no weights give all adapters more than the optimum over some of the patterns
            master = columns.master
            columns.converged |= estimated and master is not None and promise(master.value) <= self.least
            return columns.converged or (columns.priced and columns.promised > self.least)

        self.columns.run(_ONE, schedule, enough)

    def _improve(self) -> None:
        """Solve integer programs over more and more patterns until a round changes nothing."""
        for step in range(_ROUNDS):
            if self.closed:
                return
            self._generate(TO_THE_END, _COLUMNS_SHARE)
            if self.closed or not self._round(step):
                return

    def _prove(self) -> None:
        """Generate columns and certify until the relaxation's bound is reached, or half the time is up."""
        over = self.problem.with_share(_PROOF_SHARE).out_of_time
        while not self.closed:
            self._generate(BOUND, _PROOF_SHARE)
            if over():
                self._promise()
                return
            sound = self._certified()
            self._dive(0.0)
            if sound and self.columns.converged:
                return

    def _certified(self) -> bool:
        """Search for bins that violate the bound of the weights; False if one was found (generate columns again). A
        bound above the number of servers of the present plan is not worth proving."""
        columns, value, target = self.columns, self.columns.value, len(self.bins)
        # The relaxation's bound holds if no bin weighs more than 1, this one even if searches missed a bit.
        searched = min(target, columns.promised)
        for bins in sorted({min(target, math.ceil(value - _EPSILON)), searched}, reverse=True):
            if bins < self.least or (bins == self.least and self.exhaustive):
                continue
            # If every bin is worth at most `most`, more than `bins` − 1 bins are necessary.
            most = value / max(bins - 1, _EPSILON) * (1.0 - 1e-9)
            # half of the slack for bins slightly heavier than known ones, half for rounded counts
            above = (1.0 + most) / 2.0
            found = Certificate(False, 0)
            if most > 1.0 + _EPSILON:
                found = certify(
                    self.feasibility, columns.weights, above=above, slack=most - above,
                    budget=_EVALUATED_BEYOND, known=columns.sources[0].patterns,
                )  # fmt: skip
            if found.counterexample is not None:
                columns.refute(found.counterexample)
                return False
            if found.exhaustive or bins == searched:
                argument = self._argument(found.evaluated, exhaustive=found.exhaustive)
                self._raise(bins, argument, exhaustive=found.exhaustive)
                return True
        return True

    def _settle(self) -> None:
        """While the bound is exhaustive, find a plan that meets it, or prove that there is none and raise it by one."""
        columns = self.columns
        for _ in range(_ROUNDS):
            if self.closed or not columns.priced or not self._exhausted(self.exhaustive):
                return
            found = packed(
                self.feasibility, columns.weights, self.least,
                budget=_EVALUATED_BEYOND, time_limit_s=self._seconds,
            )  # fmt: skip
            if found.heavier is not None:
                columns.refute(found.heavier)
                self._generate(BOUND, _PROOF_SHARE)
            elif found.bins is not None:
                columns.sources[0].add(found.bins)
                # Classes of weight 0 were left out, so the bins may not hold all of their adapters.
                if np.all(found.bins.sum(axis=0) >= columns.demand):
                    self._realise(list(found.bins))
                return
            elif found.excluded and self._exhausted(True):
                name = self.problem.evaluator.name
                said = f"{self._most}no {self.least:,} bins that pass the predictor {name!r} hold the fleet,"
                source = f"{said} by an integer program over all that such a plan may consist of, {self._dominance}"
                self._raise(self.least + 1, source, exhaustive=True)
            else:
                return

    def _exhausted(self, exhaustive: bool) -> bool:
        """Whether an exhaustive search over classes holds for the fleet: none is rounded, no check broke dominance."""
        return exhaustive and self.classes.loss == 0.0 and not self.feasibility.violations

    @property
    def _most(self) -> str:
        """Which bins the search leaves out, in words."""
        most, slots = self.problem.most_adapters, self.feasibility.most_slots
        fewer = f"at most {most:,} adapters on a GPU; " if most < len(self.problem.workload) else ""
        return fewer + (tried_words(slots) if slots > EVERY else "")

    @property
    def _dominance(self) -> str:
        """The assumption behind an exhaustive search over classes, in words."""
        found = self.feasibility
        failed = f", which {found.violations} of {found.checks} checks contradict"
        return "as a bin at least as heavy as an infeasible one is infeasible" + (failed if found.violations else "")

    def _argument(self, evaluated: int, *, exhaustive: bool) -> str:
        """Why the weights give a bound, in words; `evaluated`: number of bins evaluated beyond the bound."""
        name = self.problem.evaluator.name
        text = f"linear relaxation of the pattern model: {self.columns.value:.3f} bins; {self._most}"
        if exhaustive:
            return text + (
                f"no plan with fewer GPUs passes the predictor {name!r}, {self._dominance} "
                f"({evaluated:,} bins evaluated beyond it)"
            )
        return text + (
            f"no plan with fewer GPUs passes the predictor {name!r}, unless the search missed a bin worth "
            f"{SEARCHED_MARGIN:.2%} more than the best one ({evaluated:,} bins evaluated beyond)"
        )

    def _round(self, step: int) -> bool:
        """Dive, then solve an integer program over all patterns; False if neither helps nor adds patterns."""
        columns, (source,) = self.columns, self.columns.sources
        before, improved = len(source.patterns), self._dive(0.0 if step == 0 else 0.05)
        if not self.closed:
            pool, work = source.patterns, self.problem.evaluator.work
            use, _ = solve_integer(pool, columns.demand, time_limit_s=self._seconds, work=work)
            if use is not None and use.sum() < len(self.bins):
                improved |= self._realise(list(np.repeat(pool, use, axis=0)))
        if not improved and not self.closed:
            columns.diversify(len(self.bins) - 1)
        return improved or len(source.patterns) > before

    def _dive(self, shake: float) -> bool:
        """Round the relaxation bin by bin; returns whether that gave a smaller plan."""
        found = self.columns.dive(_ONE * (len(self.bins) - 1), shake)
        if found is None:
            return False
        rows = [row for _, row in found]
        self.columns.sources[0].add(np.array(rows))
        return self._realise(rows)

    @property
    def _seconds(self) -> float:
        """Wall-clock limit of an integer program."""
        return self.problem.wall_s / 4.0
