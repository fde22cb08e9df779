"""Servers for sets of adapters: find a number of slots with which a set holds, or the one that serves it best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isnan

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray
from packer.bin import Bin, indices, whole
from packer.checks import slot_rank_for
from packer.evaluation import Evaluations
from packer.predictors.bin_table import BinTable, ones
from packer.profile import Profile
from packer.solvers.base import Problem
from packer.solvers.candidates import candidates_of, most_slots_of, nearest, slot_ranks
from packer.workload import Workload

_WIDE = 3  # Neighbours on each side that a climb evaluates at once, if a call costs more than the evaluation of a bin.
Quality = tuple[float, float, float]  # One row of `qualities`.
Score = tuple[float, ...]  # Whether a server holds (1 or 0), then how good it is: larger is better.
_COARSE = 3  # If evaluations are simulations, one candidate in this many is evaluated first, then those near the best.
_BATCH = 15  # Sizes of a bin that a search evaluates at once if none is simulated.


class SlotSearch:
    """Makes the bins of one solver run, with the right slots, and evaluates whether they hold."""

    def __init__(
        self, problem: Problem, evaluations: Callable[[Workload, Sequence[Bin]], Evaluations] | None = None
    ) -> None:
        """`evaluations`: evaluates bins of a fleet; None: `Evaluator.evaluate`."""
        self.problem = problem
        evaluator = problem.evaluator
        self._evaluations = evaluations or evaluator.evaluate
        self.width = _WIDE if evaluator.fast else 1  # How many neighbours on either side a climb evaluates at once.
        self.batch = _BATCH if evaluator.fast and not evaluator.confirms else 1
        """How many sizes of a bin a search evaluates at once."""

    def make(
        self, adapters: Sequence[int], max_loras: int, profile: Profile | None = None, shares: Sequence[float] = ()
    ) -> Bin:
        """A bin whose slots hold its largest adapter; without shares every adapter is whole."""
        held, profile = tuple(adapters), profile or self.problem.profile
        rank = int(np.maximum.reduce(self.problem.workload.ranks[indices(held)]))
        settings = profile.settings(max_loras, slot_rank_for(rank))
        return Bin.unchecked(held, settings, profile, tuple(shares) or whole(len(held)))

    def like(self, adapters: Sequence[int], other: Bin) -> Bin:
        """A bin of whole adapters with at most the `most_slots` of another bin, and no more slots than adapters."""
        return self.make(adapters, min(most_slots(other), len(adapters)), other.profile)

    def first(
        self, adapters: IntArray, sizes: Sequence[int], max_loras: Sequence[int],
        profile: Profile | None = None, shares: FloatArray | None = None,
    ) -> BinTable:  # fmt: skip
        """As `make`, one bin for each of the `sizes`: it holds that many of the first adapters of the list."""
        end, last = np.array(sizes), max(sizes)
        held, share = adapters[:last], ones(last) if shares is None else shares[:last]
        profile, largest = profile or self.problem.profile, self.problem.workload.ranks[held]
        ranks = slot_ranks(np.maximum.accumulate(largest)[end - 1], profile).astype(np.float64)
        slots = np.array(max_loras, dtype=np.float64)
        return BinTable(profile, np.zeros_like(end), end, held, share, slots, ranks)

    def evaluate(self, bins: Sequence[Bin]) -> tuple[Evaluations, BoolArray]:
        """Evaluations, and which of the bins hold, bool (n,)."""
        found = self._evaluations(self.problem.workload, bins)
        return found, self.problem.objective.holds(found)

    def holds(self, bins: Sequence[Bin]) -> list[bool]:
        """Which of the bins hold."""
        admitted: list[bool] = self.evaluate(bins)[1].tolist()
        return admitted

    def feasible(
        self, adapters: Sequence[int], profile: Profile | None = None, shares: Sequence[float] = (),
        hint: int | None = None, *, thorough: bool = False,
    ) -> Bin | None:  # fmt: skip
        """A bin of these adapters that holds, or None. Evaluates `hint` slots first and climbs from there: the share of
        the load that is served rises with the slots, until they take too much of the KV cache. Without a hint, or if
        `thorough` and the climb finds no bin that holds, `any_slots` searches all candidates."""
        like = self.make(adapters, 1, profile, shares)
        if hint is None:
            return self.any_slots(like)
        climb = Climb(like.with_slots(nearest(like, hint)[0]), self.width, until_holds=True)
        (found,) = search([climb], self.rated)
        return self.any_slots(like) if thorough and found is None else found

    def any_slots(self, bin_: Bin) -> Bin | None:
        """The same adapters with the number of slots that serves them best, or None if none holds. Evaluates every
        candidate if evaluations are fast, else one in `_COARSE` and those near the best."""
        first = candidates_of(bin_)[:: -1 if self.width > 1 else -_COARSE]
        climb = Climb(bin_.with_slots(first[-1]), self.width, [first])
        return search([climb], self.rated, self.problem.out_of_time)[0]

    def best(self, bin_: Bin) -> Bin:
        """The same adapters with the number of slots that serves them best, near the present number."""
        return (self.climbed([bin_])[0] or [bin_])[0]

    def climbed(self, bins: Sequence[Bin]) -> tuple[list[Bin], list[Quality]]:
        """The adapters of each bin with the slots that serve them best, near its present number, and their `qualities`.
        Two empty lists if one of the bins does not hold with any number of slots tried."""
        climbs = [Climb(item, self.width) for item in bins]
        found = search(climbs, self.rated, self.problem.out_of_time)
        made = [item for item in found if item is not None]
        if len(made) < len(climbs):
            return [], []
        marks = (climb.score[climb.top] for climb in climbs)
        return made, [(-risk, -request, -ttft) for _, _, risk, request, ttft in marks]

    def rated(self, bins: Sequence[Bin]) -> list[Score]:
        """Whether each bin holds, then its `scores`."""
        found, holds = self.evaluate(bins)
        return [(float(ok), *score) for ok, score in zip(holds.tolist(), scores(found), strict=True)]


class Climb:
    """The search for the slots of one server: proposes values of `max_loras`, and stores their scores.

    `first`: values to try first, stage by stage. After them the search tries the `width` candidates on both sides of
    the best value so far (initially the server's own) until none is better; 0: no others. `until_holds`: stop at the
    first value that holds; without `first`, the server's own value is tried alone first.
    """

    def __init__(
        self, like: Bin, width: int, first: Sequence[Sequence[int]] = (), *, until_holds: bool = False
    ) -> None:
        self.like, self.width, self.until_holds = like, width, until_holds
        self.stages = [*reversed(first)] or [(like.max_loras,)] * until_holds
        self.score: dict[int, Score] = {}
        """By value of `max_loras`: whether the server holds (1 or 0), then how good it is; larger is better."""

    def wanted(self) -> list[int]:
        """Values to evaluate next; none at the end."""
        if self.until_holds and self.best is not None:
            return []
        while self.stages:
            if new := [n for n in self.stages.pop() if n not in self.score]:
                return new
        if not self.width:
            return []
        candidates = sorted({*candidates_of(self.like), self.like.max_loras})
        at = candidates.index(self.top)
        near = candidates[max(0, at - self.width) : at + self.width + 1]
        return [n for n in near if n not in self.score]

    @property
    def top(self) -> int:
        """The best value so far, whether it holds or not; of equally good values the nearest to the server's own."""
        own = self.like.max_loras
        return max(self.score, key=lambda n: (self.score[n], -abs(n - own), -n), default=own)

    @property
    def best(self) -> Bin | None:
        """The server with the best value that holds so far."""
        return self.like.with_slots(self.top) if self.score and self.score[self.top][0] else None


def search(
    climbs: Sequence[Climb], rated: Callable[[list[Bin]], Sequence[Score]], over: Callable[[], bool] = lambda: False
) -> list[Bin | None]:
    """Take a step of every climb at a time until all are done, or `over` is true after a step; return each one's best.

    `rated`: returns for each server whether it holds (1 or 0), then how good it is; larger is better.
    """
    while wanted := [(climb, n) for climb in climbs for n in climb.wanted()]:
        found = rated([climb.like.with_slots(n) for climb, n in wanted])
        for (climb, n), score in zip(wanted, found, strict=True):
            climb.score[n] = score
        if over():
            break
    return [climb.best for climb in climbs]


def real_bins(problem: Problem, sets: Sequence[Sequence[int]], *, until_holds: bool = False) -> list[Bin | None]:
    """For each set of adapters the best bin over all candidates of a proof, or (`until_holds`) the bin with the most
    slots that holds; None if no candidate holds. The time limit does not stop it."""
    slots, climbs = SlotSearch(problem), []
    for each in sets:
        item = slots.make(each, 1)
        every = candidates_of(item, proof=True)
        stages = [[n] for n in reversed(every)] if until_holds else [every]
        climbs.append(Climb(item, 0, stages, until_holds=until_holds))
    return search(climbs, slots.rated)


def most_slots(like: Bin) -> int:
    """Most slots for a bin like this one: as many, or if it has one per adapter, all that leave enough KV cache."""
    each = like.max_loras == len(like.adapters)
    return most_slots_of(like.profile, like.max_lora_rank) if each else like.max_loras


def scores(found: Evaluations) -> list[tuple[float, ...]]:
    """How well each server does, larger is better: feasible servers by `qualities`, others by the share served."""
    loads = (found.feasible, found.total_token_throughput, found.offered_tok_s)
    rows = zip(qualities(found), *(column.tolist() for column in loads), strict=True)
    return [
        (1.0, -risk, -request, -ttft) if feasible else (0.0, served / offered if offered else 1.0)
        for (risk, request, ttft), feasible, served, offered in rows
    ]


def qualities(found: Evaluations) -> list[Quality]:
    """How well each server does, smaller is better: risk of starving in steps of 5 %, time per request, TTFT."""
    columns = found.starvation_probability, found.mean_ttft_ms, found.mean_itl_ms
    return [_quality(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _quality(chance: float, ttft: float, itl: float) -> Quality:
    risk, request = chance if isnan(chance) else round(chance * 20) / 20, ttft + 100.0 * itl
    return risk, inf if isnan(request) else request, inf if isnan(ttft) else ttft
