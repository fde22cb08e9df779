"""Servers for sets of adapters: which number of slots makes a set admissible, or serves it best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isnan

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, indices, whole
from packer.checks import slot_rank_for
from packer.evaluation import Evaluations
from packer.profile import Profile
from packer.solvers.base import Problem
from packer.solvers.candidates import max_loras_candidates

_WIDE = 3
"""Neighbours of a climb where a call costs more than the evaluation of a bin."""


class SlotSearch:
    """Makes the bins of one solver run, with the right slots, and evaluates whether they are admissible."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.width = _WIDE if problem.evaluator.fast else 1
        """How many neighbours on either side a climb evaluates at once."""

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

    def evaluate(self, bins: Sequence[Bin]) -> tuple[Evaluations, npt.NDArray[np.bool_]]:
        """Evaluations, and which of the bins are admissible, bool (n,)."""
        found = self.problem.evaluator.evaluate(self.problem.workload, bins)
        return found, self.problem.objective.admissible(found)

    def admits(self, item: Bin) -> bool:
        """Whether a bin is admissible."""
        return bool(self.evaluate([item])[1][0])

    def feasible(
        self,
        adapters: Sequence[int],
        profile: Profile | None = None,
        shares: Sequence[float] = (),
        hint: int | None = None,
        *,
        thorough: bool = False,
    ) -> Bin | None:
        """An admissible bin of these adapters, or None.

        Evaluates `hint` slots first and climbs from there: the share of the load that is served rises with the
        slots, until they take too much of the KV cache. Without a hint, or if `thorough` and the climb ended
        below, every candidate is evaluated.
        """
        candidates = max_loras_candidates(len(adapters))
        climb = _Climb(self, candidates, self.make(adapters, candidates[0], profile, shares))
        if hint is not None:
            nearest = min(range(len(climb.candidates)), key=lambda k: abs(climb.candidates[k] - hint))
            found = climb.run(nearest, until_admissible=True)
            if found is not None or not thorough:
                return found
        return climb.all()

    def best(self, bin_: Bin) -> Bin:
        """The same adapters with the number of slots that serves them best, near the one they have."""
        candidates = sorted({*max_loras_candidates(len(bin_.adapters)), bin_.max_loras})
        climb = _Climb(self, candidates, bin_)
        return climb.run(candidates.index(bin_.max_loras), until_admissible=False) or bin_


class _Climb:
    """Hill climbing over the slots of otherwise equal bins, evaluating neighbours on both sides at once."""

    def __init__(self, slots: SlotSearch, candidates: Sequence[int], like: Bin) -> None:
        self.slots, self.candidates, self.like = slots, candidates, like
        self.bins: dict[int, Bin] = {}
        self.admitted: list[int] = []
        self.score: dict[int, tuple[float, ...]] = {}

    def run(self, start: int, *, until_admissible: bool) -> Bin | None:
        """The best admissible bin on the way up, the first one if that is enough; None if there is none."""
        at, width = start, self.slots.width
        if until_admissible:
            self._evaluate([at])
        while not (until_admissible and self.admitted):
            self._evaluate(range(max(0, at - width), min(len(self.candidates), at + width + 1)))
            top = max(self.score, key=lambda k: (self.score[k], -abs(k - start)))
            if top == at:
                break
            at = top
        return self._best()

    def all(self) -> Bin | None:
        """The best admissible bin of all."""
        self._evaluate(range(len(self.candidates)))
        return self._best()

    def _evaluate(self, chosen: Iterable[int]) -> None:
        new = [k for k in chosen if k not in self.score]
        if not new:
            return
        for k in new:
            self.bins[k] = self.like.with_slots(self.candidates[k])
        found, admissible = self.slots.evaluate([self.bins[k] for k in new])
        for k, ok, score in zip(new, admissible.tolist(), scores(found), strict=True):
            self.score[k] = (float(ok), *score)
            if ok:
                self.admitted.append(k)

    def _best(self) -> Bin | None:
        top = max(self.admitted, key=lambda k: (self.score[k], -k), default=None)
        return None if top is None else self.bins[top]


def scores(found: Evaluations) -> list[tuple[float, ...]]:
    """How well each server does, larger is better: feasible ones by `qualities`, others by the share served."""
    loads = (found.feasible, found.total_token_throughput, found.offered_tok_s)
    rows = zip(qualities(found), *(column.tolist() for column in loads), strict=True)
    return [
        (1.0, -risk, -request, -ttft) if feasible else (0.0, served / offered if offered else 1.0)
        for (risk, request, ttft), feasible, served, offered in rows
    ]


def qualities(found: Evaluations) -> list[tuple[float, float, float]]:
    """How well each server does, smaller is better: risk of starving in steps of 5 %, time per request, TTFT."""
    columns = found.starvation_probability, found.mean_ttft_ms, found.mean_itl_ms
    return [_quality(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _quality(chance: float, ttft: float, itl: float) -> tuple[float, float, float]:
    risk, request = chance if isnan(chance) else round(chance * 20) / 20, ttft + 100.0 * itl
    return risk, inf if isnan(request) else request, inf if isnan(ttft) else ttft
