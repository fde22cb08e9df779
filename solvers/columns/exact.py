"""`exact`: the pattern model with column generation, rounded and repaired, with its proven bound."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.solvers.base import Problem, Solution, start
from packer.solvers.bound import Bound, limited
from packer.solvers.candidates import EVERY, tried_words
from packer.solvers.classes import FEW_BINS, Classes, aggregate
from packer.solvers.columns.enumeration import cheapest_cover, packed
from packer.solvers.columns.master import solve_integer
from packer.solvers.columns.prices import features
from packer.solvers.columns.relaxation import SEARCHED_MARGIN, Relaxation
from packer.solvers.columns.rounding import dive, realise
from packer.solvers.feasibility import Feasibility, OutOfTime
from packer.solvers.limit import within_limit
from packer.solvers.support import counts_gpus

START_SHARE = 0.4
"""Of the time for the plan that the search starts from."""

_PROOF_SHARE, _COLUMNS_SHARE = 0.5, 0.4
"""Of the time that is left, for columns that raise the bound, and for more of them in each round of whole numbers."""

_UNMERGED = 160
"""So many kinds of adapters are classes of their own; more are merged into `classes.MAX_CLASSES`."""

FEW_SIMULATED = 100
"""So many different bins are simulated one by one for a bound alone; the search simulates some hundreds."""

_ROUNDS = 40
_INTEGER_S = 10.0
_EVALUATED_BEYOND = 20_000


class Exact:
    """Fewest GPUs by column generation over classes; stops at gap 0, the time limit or when nothing helps."""

    name = "exact"
    supports = staticmethod(counts_gpus)

    def solve(self, problem: Problem) -> Solution:
        """Greedy's bins or fewer, with the bound."""
        first = start(problem.with_share(START_SHARE))
        if first.unplaced:
            return within_limit(problem, first)
        search = ExactSearch(problem, first.bins)
        search.run()
        return search.solution(first)


class ExactSearch:
    """One run: the best bins so far, and the best bound so far.

    `bins`: the plan at hand; always complete.
    `bound`: no plan has fewer GPUs (relative to the predictor). Certain if it is proven by enumeration (up to
    dominance that no check contradicted), not by a search.
    """

    def __init__(self, problem: Problem, bins: Sequence[Bin]) -> None:
        self.bins = tuple(bins)
        self.bound = Bound(1, "a fleet needs at least one GPU", certain=True, always=True)
        self.classes = aggregate(problem.workload, unmerged=_UNMERGED)
        largest = max((len(item.adapters) for item in self.bins), default=0)
        most = max(problem.learned().most_adapters, largest)
        self.problem = replace(problem, most_adapters=most)
        self.relaxation = Relaxation(
            Feasibility(self.problem, self.classes), np.random.default_rng(problem.seed)
        )

    @property
    def closed(self) -> bool:
        """Whether the plan is as small as a bound by an exhaustive search; an estimate does not end the search."""
        return (self.bound.certain or bool(self.bound.provided)) and len(self.bins) <= self.bound.value

    def run(self, *, bound_alone: bool = False) -> None:
        """Search until the gap is closed, the time is up, or a whole round changes nothing.

        `bound_alone`: only for the bound, with few prices, where the bins are too many to evaluate each.
        """
        relaxation = self.relaxation
        try:
            few = FEW_SIMULATED if bound_alone and self.problem.evaluator.simulates else FEW_BINS
            if self.closed or self._enumerate(few):
                return
            if not relaxation.start(_counts(self.classes, self.bins)):
                return
            relaxation.warm(features(self.classes))
            if bound_alone:
                self._promise()
                return
            self._prove(relaxation)
            self._settle(relaxation)
            self._improve()
        except OutOfTime:
            self._promise()

    def resume(self, before: ExactSearch) -> None:
        """Search for a smaller plan alone, from the patterns of a search that another evaluator led."""
        self.bound = before.bound
        with suppress(OutOfTime):
            if self.relaxation.start(
                np.concatenate([_counts(self.classes, self.bins), before.relaxation.patterns])
            ):
                self._improve()

    def _promise(self) -> None:
        """Take the bound by the weights so far, as an estimate."""
        relaxation = self.relaxation
        if relaxation.priced and relaxation.weights is not None:
            relaxation.value = float(relaxation.weights @ relaxation.demand)
            relaxation.exhaustive = False
            self._raise(Bound(relaxation.promised, self._source(relaxation)))

    def solution(self, first: Solution) -> Solution:
        """What was found."""
        feasibility = self.relaxation.feasibility
        master = self.relaxation.master
        details: dict[str, object] = {
            "classes": len(self.classes),
            "rounding_loss": self.classes.loss,
            "patterns": len(self.relaxation.patterns),
            "relaxation": None if master is None else master.value,
            "bound_by_enumeration": self.bound.certain,
            "bins_evaluated": self.relaxation.feasibility.evaluated,
            "dominance_checks": feasibility.checks,
            "dominance_violations": feasibility.violations,
        }
        return limited(self.problem, replace(first, bins=self.bins), self.bound, details)

    def _raise(self, bound: Bound) -> None:
        """Take the bound if it is higher, or as high and certain where the old one was not."""
        # The bound of a search that missed a bin can be too high: a plan at hand refutes it.
        better = (bound.value, bound.certain) > (self.bound.value, self.bound.certain)
        if better and bound.value <= len(self.bins):
            self.bound = bound

    def _accept(self, bins: tuple[Bin, ...] | None) -> bool:
        if bins is None or len(bins) >= len(self.bins):
            return False
        self.bins = bins
        self.problem.progress("exact: GPUs", len(bins), self.bound.value)
        return True

    def _enumerate(self, most: int) -> bool:
        """Evaluate every possible bin, if these are at most `most`; True if that settled it."""
        feasibility, seconds = self.relaxation.feasibility, self._seconds(_INTEGER_S * 3)
        found = cheapest_cover([feasibility], np.ones(1), most=most, time_limit_s=seconds)
        if found is None:
            return False
        self._accept(realise(self.problem, self.classes, list(found.rows)))
        if found.proven:
            name = self.problem.evaluator.name
            source = f"{self._most}every possible bin was evaluated by the predictor {name!r}"
            self._raise(Bound(len(found.rows), source, certain=True))
        return found.proven

    def _improve(self) -> None:
        """Whole numbers over more and more patterns, until a round changes nothing."""
        for step in range(_ROUNDS):
            if self.closed:
                return
            over = self.problem.with_share(_COLUMNS_SHARE).out_of_time
            self.relaxation.run(lambda over=over: self.closed or over(), to_the_end=True)  # type: ignore[misc]
            if self.closed or not self._round(step):
                return

    def _prove(self, relaxation: Relaxation) -> None:
        """Generate columns and certify until the bound is that of the relaxation, or half the time is up."""
        over = self.problem.with_share(_PROOF_SHARE).out_of_time
        while not self.closed:
            relaxation.run(lambda: self.closed or over())
            if over():
                self._promise()
                return
            sound = relaxation.prove(len(self.bins), _EVALUATED_BEYOND)
            if relaxation.bound >= self.bound.value:
                self._raise(self._bounded(relaxation.bound, self._source(relaxation), relaxation.exhaustive))
            self._dive(0.0)
            if sound and relaxation.converged:
                return

    def _settle(self, relaxation: Relaxation) -> None:
        """As long as the bound is certain: find a plan of as many bins, or raise it by one as there is none."""
        feasibility, demand = relaxation.feasibility, relaxation.demand
        for _ in range(_ROUNDS):
            if self.closed or relaxation.weights is None or not self._exhausted(relaxation.exhaustive):
                return
            n_bins, seconds = self.bound.value, self._seconds(_INTEGER_S * 3)
            found = packed(
                feasibility, relaxation.weights, n_bins, budget=_EVALUATED_BEYOND, time_limit_s=seconds
            )
            if found.heavier is not None:
                relaxation.add(found.heavier[None, :])
                relaxation.weights = relaxation.weights / float(found.heavier @ relaxation.weights)
                relaxation.run(self.problem.with_share(_PROOF_SHARE).out_of_time)
            elif found.bins is not None:
                relaxation.add(found.bins)
                if np.all(found.bins.sum(axis=0) >= demand):
                    self._accept(realise(self.problem, self.classes, list(found.bins)))
                return
            elif found.excluded and self._exhausted(relaxation.exhaustive):
                name = self.problem.evaluator.name
                source = (
                    f"{self._most}no {n_bins:,} bins that pass the predictor {name!r} hold the fleet, by an integer "
                    f"program over all that such a plan may consist of, {self._dominance}"
                )
                self._raise(self._bounded(n_bins + 1, source, True))
            else:
                return

    def _exhausted(self, exhaustive: bool) -> bool:
        """Whether an exhaustive search of classes is one of the fleet, up to dominance that no check contradicted."""
        return exhaustive and self.classes.loss == 0.0 and not self.relaxation.feasibility.violations

    @property
    def _most(self) -> str:
        """Which bins the search leaves out, in words."""
        most, slots = self.problem.most_adapters, self.relaxation.feasibility.most_slots
        fewer = f"at most {most:,} adapters on a GPU; " if most < len(self.problem.workload) else ""
        return fewer + (tried_words(slots) if slots > EVERY else "")

    @property
    def _dominance(self) -> str:
        """What an exhaustive search of classes rests on, in words."""
        feasibility = self.relaxation.feasibility
        failed = f", which {feasibility.violations} of {feasibility.checks} checks contradict"
        return "as a bin at least as heavy as an infeasible one is infeasible" + (
            failed if feasibility.violations else ""
        )

    def _bounded(self, value: int, source: str, exhaustive: bool) -> Bound:
        """A bound that an exhaustive search proves if bins as heavy as infeasible ones are infeasible."""
        known, monotone = self._exhausted(exhaustive), self.problem.evaluator.monotone
        return Bound(value, source, known and monotone, "if the predictor is monotone" if known else "")

    def _source(self, relaxation: Relaxation) -> str:
        name = self.problem.evaluator.name
        text = f"linear relaxation of the pattern model: {relaxation.value:.3f} bins; {self._most}"
        if relaxation.exhaustive:
            return text + (
                f"no plan with fewer GPUs passes the predictor {name!r}, {self._dominance} "
                f"({relaxation.evaluated_beyond:,} bins evaluated beyond it)"
            )
        return text + (
            f"no plan with fewer GPUs passes the predictor {name!r}, unless the search missed a bin worth "
            f"{SEARCHED_MARGIN:.2%} more than the best one ({relaxation.evaluated_beyond:,} bins evaluated beyond)"
        )

    def _round(self, step: int) -> bool:
        """A dive, then whole numbers over the pool; False once neither helps nor adds patterns."""
        relaxation = self.relaxation
        before, improved = len(relaxation.patterns), self._dive(0.0 if step == 0 else 0.05)
        if not self.closed:
            pool, seconds = relaxation.patterns, self._seconds(_INTEGER_S)
            use, _ = solve_integer(pool, relaxation.demand, time_limit_s=seconds)
            if use is not None and use.sum() < len(self.bins):
                chosen = np.repeat(pool, use, axis=0)
                improved |= self._accept(realise(self.problem, self.classes, list(chosen)))
        if not improved and not self.closed:
            relaxation.diversify(len(self.bins) - 1)
        return improved or len(relaxation.patterns) > before

    def _dive(self, shake: float) -> bool:
        """Whether a plan by rounding the relaxation bin by bin is smaller."""
        rows = dive(self.relaxation, len(self.bins), shake)
        if rows is None:
            return False
        self.relaxation.add(np.array(rows))
        return self._accept(realise(self.problem, self.classes, rows))

    def _seconds(self, most: float) -> float:
        return min(most, max(0.1, self.problem.remaining_s() / 4))


def _counts(classes: Classes, bins: Sequence[Bin]) -> IntArray:
    rows = [classes.counts(each.adapters) for each in bins if not each.is_split]
    return np.array(rows, dtype=np.int64).reshape(-1, len(classes))
