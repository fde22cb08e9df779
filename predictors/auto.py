"""The learned judge everywhere, the twin where it hesitates or has no experience."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from packer.bin import Bin, Evaluations
from packer.predictors.learned import BoostingPredictor, LearnedPredictor
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.workload import Workload

HESITANT = (0.05, 0.95)


class AutoPredictor:
    """Asks `learned` about every bin, and `twin` where the probability of starvation is in ]low, high[.

    The twin is also asked about servers outside the range of what the learned judge was trained on, and always
    about arrivals other than Poisson, which it was not trained on at all.

    Parameters
    ----------
    learned, twin
        The judges; the twin remembers its answers by content.
    low, high
        Between which probabilities the learned one hesitates.
    """

    name = "auto"

    def __init__(
        self,
        learned: LearnedPredictor,
        twin: TwinPredictor,
        *,
        low: float = HESITANT[0],
        high: float = HESITANT[1],
    ) -> None:
        self.learned, self.twin = learned, twin
        self.low, self.high = low, high
        self.questions = 0
        """Bins that it was asked about."""
        self.asked_twin = 0
        """Of these, how many it passed on to the twin."""

    @classmethod
    def for_profile(cls, profile: Profile, *, seed: int = 0) -> AutoPredictor:
        """The shipped boosted trees and the twin."""
        return cls(BoostingPredictor.for_profile(profile), TwinPredictor(seed=seed))

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin; one row per bin, in order."""
        self.questions += len(bins)
        if workload.arrivals.kind != "poisson":
            self.asked_twin += len(bins)
            return self.twin.evaluate(workload, bins)
        found = self.learned.evaluate(workload, bins)
        chance = found.starvation_probability
        strange = self.learned.extrapolates(workload, bins)
        hesitant = (chance > self.low) & (chance < self.high)
        unsure = np.flatnonzero((hesitant | strange) & ~found.memory_error).tolist()
        if not unsure:
            return found
        self.asked_twin += len(unsure)
        better = self.twin.evaluate(workload, [bins[i] for i in unsure])
        columns = {}
        for field in fields(Evaluations):
            columns[field.name] = getattr(found, field.name).copy()
            columns[field.name][unsure] = getattr(better, field.name)
        return Evaluations(**columns)

    def summary(self) -> str:
        """How often the twin was asked, in words."""
        return (
            f"{self.asked_twin} of {self.questions} questions went to the twin, which simulated "
            f"{self.twin.simulated} servers"
        )
