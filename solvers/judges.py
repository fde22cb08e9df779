"""Who judges: the predictor by name, remembered, and once more at rates raised by the margin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer import checks
from packer.bin import Bin, Evaluation, Evaluations
from packer.errors import ValidationError
from packer.objectives.base import Objective
from packer.predictors.api import load_predictor
from packer.predictors.base import Predictor
from packer.profile import Profile
from packer.solvers.cache import CachedPredictor
from packer.solvers.margin import MarginPredictor
from packer.twin.margin import QUANTILES, error_key, rate_margin
from packer.workload import Workload

DEFAULT_CONFIDENCE = 0.95
UNCALIBRATED_MARGIN = 0.1
"""Margin for profiles that don't know their own error."""


class ByProfile:
    """A predictor for each GPU type; every bin goes to that of its own."""

    def __init__(self, predictors: dict[Profile, Predictor]) -> None:
        self.predictors = predictors
        self.name = next(iter(predictors.values())).name

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin; one row per bin, in order."""
        rows: list[Evaluation | None] = [None] * len(bins)
        for profile, predictor in self.predictors.items():
            mine = [k for k, item in enumerate(bins) if item.profile == profile]
            found = predictor.evaluate(workload, [bins[k] for k in mine]) if mine else ()
            for k, row in zip(mine, found, strict=True):
                rows[k] = row
        return Evaluations.of([row for row in rows if row is not None])


@dataclass(frozen=True)
class Judges:
    """`nominal` reports figures at the rates as given; `search` decides what is admissible."""

    nominal: Predictor
    search: Predictor
    margin: float
    plain: Predictor
    wrap: Callable[[Predictor], Predictor]

    @classmethod
    def of(cls, plain: Predictor, margin: float, wrap: Callable[[Predictor], Predictor]) -> Judges:
        """Judges around a plain predictor, each wrapped as the objective wants."""
        raised = MarginPredictor(plain, 1.0 + margin) if margin > 0 else plain
        return cls(wrap(plain), wrap(raised), margin, plain, wrap)

    def with_margin(self, margin: float) -> Judges:
        """The same predictor, and what it remembers, at another margin."""
        return Judges.of(self.plain, margin, self.wrap)

    def report(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures at the nominal rates; a bin that starves at either load counts as starved."""
        figures = self.nominal.evaluate(workload, bins)
        verdicts = self.search.evaluate(workload, bins)
        return replace(
            figures,
            starved=figures.starved | verdicts.starved,
            memory_error=figures.memory_error | verdicts.memory_error,
            starvation_probability=np.maximum(
                figures.starvation_probability, verdicts.starvation_probability
            ),
        )


def judges(
    predictor: str | Predictor,
    profiles: Sequence[Profile],
    objective: Objective,
    *,
    seed: int = 0,
    margin: float = 0.0,
) -> Judges:
    """The predictor wrapped for a search at rates raised by the margin."""
    wrap = getattr(objective, "judge", _as_it_is)
    return Judges.of(CachedPredictor(load_judge(predictor, profiles, seed)), margin, wrap)


def _as_it_is(predictor: Predictor) -> Predictor:
    return predictor


def load_judge(predictor: str | Predictor, profiles: Sequence[Profile], seed: int) -> Predictor:
    """The predictor by name, one for each GPU type; an object is taken as it is."""
    if not isinstance(predictor, str):
        return predictor
    loaded = {profile: load_predictor(predictor, profile, seed=seed) for profile in profiles}
    return ByProfile(loaded) if len(loaded) > 1 else next(iter(loaded.values()))


def rate_margin_for(
    profiles: Sequence[Profile], *, confidence: float | None = None, margin: float | None = None
) -> float:
    """Share by which rates are raised when bins are judged: given, or from the profiles' held-out errors.

    With neither a margin nor a confidence, a calibrated profile's margin at 95 % confidence is taken, and
    10 % for a profile that carries no errors.
    """
    if margin is not None:
        if confidence is not None:
            raise ValidationError("Expected a confidence or a margin, got both.")
        return checks.real("the margin", margin, low=0.0, high=10.0)
    if confidence is not None:
        return max(rate_margin(profile, confidence) for profile in profiles)
    return max(_default_margin(profile) for profile in profiles)


def _default_margin(profile: Profile) -> float:
    known = sum(error_key(q) in profile.errors for q in QUANTILES)
    return rate_margin(profile, DEFAULT_CONFIDENCE) if known >= 2 else UNCALIBRATED_MARGIN
