"""Asking the predictor about the bins that a solver thinks of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluation, Evaluations
from packer.checks import slot_rank_for
from packer.profile import Profile
from packer.solvers.base import Problem
from packer.solvers.candidates import max_loras_candidates


class Probe:
    """Makes the bins of one solver run, with the right slots, and asks whether they are admissible."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._ranks = problem.workload.ranks

    def make(
        self,
        adapters: Sequence[int],
        max_loras: int,
        profile: Profile | None = None,
        shares: Sequence[float] = (),
    ) -> Bin:
        """A bin whose slots hold its largest adapter; without shares every adapter is whole."""
        rank = slot_rank_for(int(self._ranks[list(adapters)].max()))
        profile = profile or self.problem.profile
        return Bin(tuple(adapters), profile.settings(max_loras, rank), profile, tuple(shares))

    def evaluate(self, bins: Sequence[Bin]) -> tuple[Evaluations, npt.NDArray[np.bool_]]:
        """Evaluations, and which of the bins are admissible, bool (n,)."""
        found = self.problem.predictor.evaluate(self.problem.workload, bins)
        return found, self.problem.objective.admissible(found)

    def admissible(self, bins: Sequence[Bin]) -> list[bool]:
        """Which of the bins are admissible."""
        admissible: list[bool] = self.evaluate(bins)[1].tolist()
        return admissible

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

        Asks about `hint` slots first and climbs from there: the share of the load that is served rises with
        the slots, until they take too much of the KV cache. Without a hint, or if `thorough` and the climb
        ended below, every candidate is asked.
        """
        candidates = max_loras_candidates(len(adapters))
        bins = [self.make(adapters, p, profile, shares) for p in candidates]
        climb = _Climb(self, bins)
        if hint is not None:
            found = climb.run(_nearest(candidates, hint), until_admissible=True)
            if found is not None or not thorough:
                return found
        return climb.all()

    def best(self, bin_: Bin) -> Bin:
        """The same adapters with the number of slots that serves them best, near the one they have."""
        candidates = sorted({*max_loras_candidates(len(bin_.adapters)), bin_.max_loras})
        bins = [self.make(bin_.adapters, p, bin_.profile, bin_.shares) for p in candidates]
        climb = _Climb(self, bins)
        return climb.run(candidates.index(bin_.max_loras), until_admissible=False) or bin_


class _Climb:
    """Hill climbing over the slots of otherwise equal bins, asking about both neighbours at once."""

    def __init__(self, probe: Probe, bins: Sequence[Bin]) -> None:
        self.probe, self.bins = probe, bins
        self.score: dict[int, tuple[float, ...]] = {}
        self.admissible: set[int] = set()

    def run(self, start: int, *, until_admissible: bool) -> Bin | None:
        """The best admissible bin on the way up, the first one if that is enough; None if there is none."""
        at = start
        self._ask([at])
        while not (until_admissible and self.admissible):
            self._ask([k for k in (at - 1, at + 1) if 0 <= k < len(self.bins)])
            top = max(self.score, key=lambda k: (self.score[k], -abs(k - start)))
            if top == at:
                break
            at = top
        return self._best()

    def all(self) -> Bin | None:
        """The best admissible bin of all."""
        self._ask(range(len(self.bins)))
        return self._best()

    def _ask(self, chosen: Sequence[int]) -> None:
        new = [k for k in chosen if k not in self.score]
        if not new:
            return
        found, admissible = self.probe.evaluate([self.bins[k] for k in new])
        for row, (k, ok) in zip(found, zip(new, admissible.tolist(), strict=True), strict=True):
            served = (0.0, row.served_share) if not row.feasible else (1.0, *(-x for x in quality(row)))
            self.score[k] = (float(ok), *served)
            if ok:
                self.admissible.add(k)

    def _best(self) -> Bin | None:
        top = max(self.admissible, key=lambda k: (self.score[k], -k), default=None)
        return None if top is None else self.bins[top]


def _nearest(candidates: Sequence[int], hint: int) -> int:
    return min(range(len(candidates)), key=lambda k: (abs(candidates[k] - hint), k))


def quality(evaluation: Evaluation) -> tuple[float, float, float]:
    """How well a server does, smaller is better: risk of starving in steps of 5 %, time per request, TTFT."""
    risk = round(evaluation.starvation_probability * 20) / 20
    tokens = evaluation.mean_ttft_ms + 100.0 * evaluation.mean_itl_ms
    return (risk, np.nan_to_num(tokens, nan=np.inf), np.nan_to_num(evaluation.mean_ttft_ms, nan=np.inf))
