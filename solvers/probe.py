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
        shares: Sequence[float] | None = None,
    ) -> Bin:
        """A bin whose slots hold its largest adapter; shares that are all 1 are left out."""
        rank = slot_rank_for(int(self._ranks[list(adapters)].max()))
        split = shares is not None and any(share != 1.0 for share in shares)
        kept = tuple(shares) if split and shares is not None else None
        return Bin(tuple(adapters), max_loras, rank, profile or self.problem.profile, kept)

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
        shares: Sequence[float] | None = None,
        hint: int | None = None,
    ) -> Bin | None:
        """An admissible bin of these adapters, or None: tries `hint` slots first, then every candidate."""
        candidates = max_loras_candidates(len(adapters))
        if hint is not None:
            likely = min(candidates, key=lambda p: (abs(p - hint), p))
            first = self.make(adapters, likely, profile, shares)
            if self.admissible([first])[0]:
                return first
            candidates = tuple(p for p in candidates if p != likely)
        bins = [self.make(adapters, p, profile, shares) for p in candidates]
        return self._best(bins) if bins else None

    def best(self, bin_: Bin) -> Bin:
        """The same adapters with the number of slots that serves them best; `bin_` if nothing is better."""
        candidates = {*max_loras_candidates(len(bin_.adapters)), bin_.max_loras}
        bins = [self.make(bin_.adapters, p, bin_.profile, bin_.shares) for p in sorted(candidates)]
        return self._best(bins) or bin_

    def _best(self, bins: Sequence[Bin]) -> Bin | None:
        found, admissible = self.evaluate(bins)
        ranked = [(quality(found[k]), k) for k in np.flatnonzero(admissible).tolist()]
        return bins[min(ranked)[1]] if ranked else None


def quality(evaluation: Evaluation) -> tuple[float, float, float]:
    """How well a server does, smaller is better: risk of starving in steps of 5 %, time per request, TTFT."""
    risk = round(evaluation.starvation_probability * 20) / 20
    tokens = evaluation.mean_ttft_ms + 100.0 * evaluation.mean_itl_ms
    return (risk, np.nan_to_num(tokens, nan=np.inf), np.nan_to_num(evaluation.mean_ttft_ms, nan=np.inf))
