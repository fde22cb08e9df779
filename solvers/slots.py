"""Servers for sets of adapters: which number of slots lets a set hold, or serves it best."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray
from packer.bin import Bin, indices, whole
from packer.checks import slot_rank_for
from packer.evaluation import Evaluations
from packer.predictors.bin_table import SLOT_RANK_FOR, BinTable, ones
from packer.profile import Profile
from packer.solvers.base import Problem
from packer.solvers.candidates import candidates_of, max_loras_candidates, most_slots_of

_WIDE = 3
"""Neighbours of a climb where a call costs more than the evaluation of a bin."""
Quality = tuple[float, float, float]
"""See `qualities`."""
_COARSE = 3
"""Where evaluations are simulations, one candidate in so many is evaluated before those near the best."""
_BATCH = 15
"""Sizes of a bin that a search evaluates at once where none is simulated."""


class SlotSearch:
    """Makes the bins of one solver run, with the right slots, and evaluates whether they hold."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        evaluator = problem.evaluator
        self.width = _WIDE if evaluator.fast else 1
        """How many neighbours on either side a climb evaluates at once."""
        self.batch = _BATCH if evaluator.fast and not evaluator.confirms else 1
        """How many sizes of a bin a search evaluates at once."""

    def make(
        self,
        adapters: Sequence[int],
        max_loras: int,
        profile: Profile | None = None,
        shares: Sequence[float] = (),
    ) -> Bin:
        """A bin whose slots hold its largest adapter; without shares every adapter is whole."""
        held, profile = tuple(adapters), profile or self.problem.profile
        rank = int(np.maximum.reduce(self.problem.workload.ranks[indices(held)]))
        settings = profile.settings(max_loras, slot_rank_for(rank))
        return Bin.unchecked(held, settings, profile, tuple(shares) or whole(len(held)))

    def like(self, adapters: Sequence[int], other: Bin) -> Bin:
        """A bin of whole adapters, with at most as many slots as another unless each has its own there."""
        return self.make(adapters, min(most_slots(other), len(adapters)), other.profile)

    def first(
        self,
        adapters: IntArray,
        sizes: Sequence[int],
        max_loras: Sequence[int],
        profile: Profile | None = None,
        shares: FloatArray | None = None,
    ) -> BinTable:
        """As `make`, bins of the first so many adapters of a list."""
        end, last = np.array(sizes), max(sizes)
        held, share = adapters[:last], ones(last) if shares is None else shares[:last]
        ranks = SLOT_RANK_FOR[np.maximum.accumulate(self.problem.workload.ranks[held])[end - 1]]
        slots = np.array(max_loras, dtype=np.float64)
        return BinTable(profile or self.problem.profile, np.zeros_like(end), end, held, share, slots, ranks)

    def evaluate(self, bins: Sequence[Bin]) -> tuple[Evaluations, BoolArray]:
        """Evaluations, and which of the bins hold, bool (n,)."""
        found = self.problem.evaluator.evaluate(self.problem.workload, bins)
        return found, self.problem.objective.holds(found)

    def holds(self, bins: Sequence[Bin]) -> list[bool]:
        """Which of the bins hold."""
        admitted: list[bool] = self.evaluate(bins)[1].tolist()
        return admitted

    def feasible(
        self,
        adapters: Sequence[int],
        profile: Profile | None = None,
        shares: Sequence[float] = (),
        hint: int | None = None,
        *,
        thorough: bool = False,
    ) -> Bin | None:
        """A bin that holds, of these adapters, or None.

        Evaluates `hint` slots first and climbs from there: the share of the load that is served rises with the
        slots, until they take too much of the KV cache. Without a hint, or if `thorough` and the climb ended
        below, `any_slots` looks among all candidates.
        """
        like = self.make(adapters, 1, profile, shares)
        if hint is None:
            return self.any_slots(like)
        like = like.with_slots(min(candidates_of(like), key=lambda slots: abs(slots - hint)))
        climb = _Climb(like, self.width, until_holds=True)
        self._run([climb])
        if thorough and climb.best is None:
            return self.any_slots(like)
        return climb.best

    def any_slots(self, bin_: Bin) -> Bin | None:
        """The same adapters with whichever number of slots serves them best, or None if none holds.

        Every candidate is evaluated where that takes microseconds, else one in `_COARSE`, and those near the best.
        """
        candidates = max_loras_candidates(len(bin_.adapters), bin_.profile, bin_.max_lora_rank)
        spread = range(len(candidates) - 1, -1, -1 if self.width > 1 else -_COARSE)
        climb = _Climb(bin_.with_slots(candidates[-1]), self.width, first=spread)
        self._run([climb])
        return climb.best

    def best(self, bin_: Bin) -> Bin:
        """The same adapters with the number of slots that serves them best, near the one they have."""
        return (self.climbed([bin_])[0] or [bin_])[0]

    def climbed(self, bins: Sequence[Bin]) -> tuple[list[Bin], list[Quality]]:
        """The adapters of each bin with the slots that serve them best, near those it has, and their `qualities`.

        Nothing if one of them does not hold.
        """
        climbs = [_Climb(item, self.width) for item in bins]
        self._run(climbs)
        found = [climb.best for climb in climbs]
        made = [item for item in found if item is not None]
        return (made, [climb.quality for climb in climbs]) if len(made) == len(bins) else ([], [])

    def _run(self, climbs: Sequence[_Climb]) -> None:
        """Climb a step of each at a time, to the end, or to the first bin that holds; for better ones while there is
        time.
        """
        while wanted := [(climb, k) for climb in climbs for k in climb.wanted()]:
            found, holds = self.evaluate([climb.bin(k) for climb, k in wanted])
            for (climb, k), ok, score in zip(wanted, holds.tolist(), scores(found), strict=True):
                climb.score[k] = (float(ok), *score)
            if not climbs[0].until_holds and self.problem.out_of_time():
                break


class _Climb:
    """Hill climbing over the slots of otherwise equal bins, `width` neighbours on both sides at once.

    `until_holds`: up to the first bin that holds, which may be the one that is given. `first`: candidates to
    evaluate at first, by their place; those near the given one if there are none.
    """

    def __init__(
        self, like: Bin, width: int, *, until_holds: bool = False, first: Sequence[int] = ()
    ) -> None:
        self.like, self.width, self.until_holds, self.first = like, width, until_holds, first
        self.candidates = sorted({*candidates_of(like), like.max_loras})
        self.start = self.at = self.candidates.index(like.max_loras)
        self.score: dict[int, tuple[float, ...]] = {}

    def bin(self, k: int) -> Bin:
        """The bin with the slots of a candidate."""
        return self.like.with_slots(self.candidates[k])

    def wanted(self) -> list[int]:
        """Candidates to evaluate next; none at the end."""
        if self.score:
            self.at = max(self.score, key=lambda k: (self.score[k], -abs(k - self.start)))
        elif self.first:
            return [*self.first]
        if self.until_holds and (not self.score or self.score[self.at][0]):
            return [] if self.score else [self.at]
        near = range(max(0, self.at - self.width), min(len(self.candidates), self.at + self.width + 1))
        return [k for k in near if k not in self.score]

    @property
    def best(self) -> Bin | None:
        """The best bin that holds so far."""
        top = max(self.score, key=lambda k: (self.score[k], -k))
        return self.bin(top) if self.score[top][0] else None

    @property
    def quality(self) -> Quality:
        """That of the best bin, which holds."""
        _, _, risk, request, ttft = max(self.score.values())
        return -risk, -request, -ttft


def most_slots(like: Bin) -> int:
    """At most so many slots has a bin like another, with other adapters: one for each if that one has, or as many as
    leave enough KV cache.
    """
    each = like.max_loras == len(like.adapters)
    return most_slots_of(like.profile, like.max_lora_rank) if each else like.max_loras


def scores(found: Evaluations) -> list[tuple[float, ...]]:
    """How well each server does, larger is better: feasible ones by `qualities`, others by the share served."""
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
