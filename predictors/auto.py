"""Evaluate servers with trained trees if these are certain, else with the twin."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields, replace
from functools import partial

import numpy as np

from packer.arrival import Arrivals
from packer.bin import Bin
from packer.errors import ModelError
from packer.evaluation import Evaluations
from packer.memo import Memo
from packer.predictors.content import Factors
from packer.predictors.learned import BoostingPredictor, LearnedPredictor
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.twin.engine_rules import caches_prefixes
from packer.twin.tuning.policy import trains
from packer.workload import Workload

UNCERTAIN = (0.05, 0.95)


def _independent(fleet: Workload, cached: bool) -> Workload:
    """The workload nearest to the training data: Poisson arrivals of independent requests."""
    return fleet.as_independent(cached=cached).with_arrivals(Arrivals())


class AutoPredictor:
    """Evaluates with `learned`, but with `twin` if the probability of starvation is in ]low, high[.

    The twin also evaluates servers outside the training range of `learned`, and all servers with arrivals other than
    Poisson, with sessions, with cached prefixes, or with fine-tuning beside their requests: `learned` does not know
    these.

    `learned`, `twin`: the predictors; if `learned` is None, the twin evaluates everything.
    `low`, `high`: `learned` is uncertain between these probabilities.
    `guesses`: let `learned` evaluate arrivals with bursts or a trend as if they were Poisson at their mean rates, and
    cached prefixes as if prompts were shorter.
    `guide`: replaces `learned` in searches if `learned` is None.
    """

    name = "auto"

    def __init__(
        self, learned: LearnedPredictor | None, twin: TwinPredictor, *, low: float = UNCERTAIN[0],
        high: float = UNCERTAIN[1], guesses: bool = False, guide: LearnedPredictor | None = None,
    ) -> None:  # fmt: skip
        self.learned, self.twin = learned, twin
        self.guide = guide
        self.imitates_twin = learned is not None or guide is not None
        self.low, self.high = low, high
        self.guesses = guesses
        self._as_learned = {each: Memo(partial(_independent, cached=each)) for each in (False, True)}
        self.requested = 0  # Number of bins evaluated so far.
        self.left_to_twin = 0  # Number of these bins that the twin evaluated.

    @classmethod
    def for_profile(cls, profile: Profile, *, seed: int = 0) -> AutoPredictor:
        """The twin, with the boosted trees shipped for the profile, or else with another profile's as guides."""
        learned = guide = None
        try:
            learned = BoostingPredictor.for_profile(profile)
        except ModelError:  # none is shipped for this profile, or for another state of it
            with suppress(ModelError):
                guide = BoostingPredictor.guide(profile)
        return cls(learned, TwinPredictor(seed=seed), guide=guide)

    def for_one(self) -> AutoPredictor:
        """Return the same predictors for one server, which the twin simulates whole."""
        found = self if self.twin.whole else copy(self)
        found.twin = self.twin.for_one()
        return found

    def for_search(self, *, cautious: bool = False) -> AutoPredictor:
        """Return the same predictors for a search whose result is evaluated again: the twin evaluates only servers
        outside the training range for which `learned` is not certain that they starve.

        `cautious`: a server counts as starved unless `learned` is certain that it does not starve.
        """
        leading, limit = self.learned or self.guide, self.low if cautious else 0.5
        return AutoPredictor(leading, self.twin, low=limit, high=limit, guesses=True, guide=self.guide)

    def evaluate(self, workload: Workload, bins: Sequence[Bin], factors: Factors = 1.0) -> Evaluations:
        """Figures of each bin at its rates times its factor; one row per bin, in order."""
        self.requested += len(bins)
        kind = workload.arrivals.kind
        shares = bool(bins) and caches_prefixes(workload, bins[0].profile)
        known = kind == "poisson" and not shares and not workload.has_sessions
        guessed = self.guesses and not known and kind in ("poisson", "piecewise", "bursty")
        if self.learned is None or trains(workload.fine_tuning) or not (known or guessed):
            self.left_to_twin += len(bins)
            return self.twin.evaluate(workload, bins, factors)
        fleet = self._as_learned[shares](workload) if guessed else workload
        if (mean := workload.arrivals.mean_factor) != 1.0:
            factors = mean * np.asarray(factors)
        found, outside = self.learned.evaluate_checked(fleet, bins, factors)
        chance = found.starvation_probability
        if self.high < 0.5:
            found = replace(found, starved=found.memory_error | (chance >= self.high))
        if self.guide is not None:  # no server of this profile is in its range
            return found
        uncertain = (chance > self.low) & (chance < self.high)
        if self.low == self.high:
            outside = outside & (chance < UNCERTAIN[1])
        unsure = np.flatnonzero((uncertain | outside) & ~found.memory_error)
        if not unsure.size:
            return found
        self.left_to_twin += len(unsure)
        scale = np.broadcast_to(np.asarray(factors, dtype=np.float64), len(bins))[unsure]
        better = self.twin.evaluate(workload, [bins[i] for i in unsure.tolist()], scale)
        columns = {}
        for field in fields(Evaluations):
            columns[field.name] = getattr(found, field.name).copy()
            columns[field.name][unsure] = getattr(better, field.name)
        return Evaluations(**columns)

    def summary(self) -> str:
        """Return how often the twin was needed, in words."""
        said = f"the twin evaluated {self.left_to_twin} of {self.requested} servers and simulated"
        return f"{said} {self.twin.simulated} of them"
