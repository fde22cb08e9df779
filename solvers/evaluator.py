"""How all solvers evaluate bins: at every load of the objective, with the margin, and equal bins only once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np

from packer import checks
from packer.arrays import BoolArray, FloatArray, distinct
from packer.bin import Bin
from packer.errors import ValidationError
from packer.evaluation import FIGURES, SIMULATED, Evaluation, Evaluations
from packer.memo import Memo
from packer.objectives.base import Objective
from packer.predictors.api import evaluated, load_predictor
from packer.predictors.auto import AutoPredictor
from packer.predictors.bin_table import profiles_of
from packer.predictors.content import ContentCache, Factors
from packer.predictors.learned import LearnedPredictor
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.solvers.work import EVALUATED_S, FOREIGN_S, SIMULATED_S, Work
from packer.strategies import Predictor, TwinBased
from packer.twin.margin import DEFAULT_CONFIDENCE, LATENCY_SLACK, QUANTILES, UNCALIBRATED_MARGIN, error_key, rate_margin
from packer.words import listed
from packer.workload import Workload


class _Scaling(Protocol):
    """Evaluates bins at their rates times a factor."""

    def evaluate(self, workload: Workload, bins: Sequence[Bin], factors: Factors = 1.0) -> Evaluations: ...


Margin: TypeAlias = float | Mapping[Profile, float]
_ByProfile = Mapping[Profile | None, _Scaling]


class Evaluator:
    """Evaluates bins with a predictor, at the loads of an objective.

    A bin starves if it starves in one scenario; its other figures come from the first scenario. The margin raises all
    rates.

    `evaluate` is for searches. With the predictor "auto" it uses the trained trees, which may err. `report` evaluates
    the bins that a search found with the whole predictor, or with the twin alone if the objective has limits. If it
    refuses bins, `cautious` and `raised` make the next search more conservative.

    `predictors`: one for all bins, or one for each profile.
    `objective`: gives the scenarios; None: the fleet as it is.
    `margin`: share by which rates are raised, >= 0: one for all servers, or one for each profile.
    """

    def __init__(
        self,
        predictors: Predictor | Mapping[Profile, Predictor],
        objective: Objective | None = None,
        margin: Margin = 0.0,
    ) -> None:
        given: dict[Profile | None, Predictor] = (
            dict(predictors.items()) if isinstance(predictors, Mapping) else {None: predictors}
        )
        if objective is not None and objective.required & set(SIMULATED):  # which trained trees do not give
            given = {k: each.twin if isinstance(each, AutoPredictor) else each for k, each in given.items()}
        first = next(iter(given.values()))
        self.name = first.name
        self.confirms = isinstance(first, AutoPredictor) and first.imitates_twin
        """Whether `report` may refuse what `evaluate` admits."""
        self.fast = isinstance(first, LearnedPredictor) or self.confirms
        """Whether a bin takes microseconds: then searches evaluate more bins at once."""
        based = first if isinstance(first, TwinBased) else None
        self.twin_based, self.imitates_twin = based is not None, based is not None and based.imitates_twin
        # The class itself must declare it: a subclass may evaluate differently.
        self.monotone = all(vars(type(each)).get("monotone") is True for each in given.values())
        """Whether every bin at least as heavy as a refused one is refused too (`packer.strategies.Predictor`)."""
        self.objective = objective
        self.margins: Mapping[Profile | None, float] = (
            dict(margin.items()) if isinstance(margin, Mapping) else {None: margin}
        )
        self.raised: Mapping[Profile, float] = {}
        """Share by which `evaluate` raises the rates of servers of a profile beyond the margin."""
        self.work = Work()
        self._given = given
        self._twins = {twin for key in given if (twin := self.twin_of(key)) is not None}  # one may judge several kinds
        self._scaling = {k: _scaling(each) for k, each in given.items()}
        self.searching: _ByProfile = {
            k: each.for_search() if isinstance(each, AutoPredictor) else self._whole[k] for k, each in given.items()
        }
        self.scenarios = Memo((objective or Objective()).scenarios)
        """The loads at which bins of a fleet must hold, without the margin, by workload."""

    @classmethod
    def load(
        cls, predictor: str | Predictor, profiles: Sequence[Profile], *, seed: int = 0,
        objective: Objective | None = None, margin: Margin = 0.0,
    ) -> Evaluator:  # fmt: skip
        """An evaluator with the predictor of that name, one for each profile; an object is taken as it is."""
        if not isinstance(predictor, str):
            checks.instance("the predictor", predictor, Predictor, "packer.load_predictor(NAME, PROFILE)")
            return cls(predictor, objective, margin)
        loaded = {profile: load_predictor(predictor, profile, seed=seed) for profile in profiles}
        return cls(loaded if len(loaded) > 1 else next(iter(loaded.values())), objective, margin)

    @property
    def most_learned(self) -> int:
        """Most adapters on a server that searches evaluate with trained trees; `sys.maxsize` without such a limit."""
        given = [each for each in self._given.values() if isinstance(each, AutoPredictor)]
        most = [tree.most_adapters for each in given if (tree := each.learned or each.guide) is not None]
        return min(most, default=sys.maxsize) if self.confirms else sys.maxsize

    @property
    def simulates(self) -> bool:
        """Whether searches simulate more than one bin in 20, so that they should evaluate few bins."""
        for each in self.searching.values():
            if isinstance(each, TwinPredictor):
                return True
            if isinstance(each, AutoPredictor) and 20 * each.left_to_twin > each.requested:
                return True
        return False

    def margin_of(self, profile: Profile) -> float:
        """Share by which rates on servers of this profile are raised."""
        return self.margins[profile if profile in self.margins else None]

    def largest_margin(self, bins: Sequence[Bin] = ()) -> float:
        """The largest margin of these servers; without any, of all profiles."""
        return max((self.margin_of(item.profile) for item in bins), default=max(self.margins.values()))

    def with_more_margin(self, more: float) -> Evaluator:
        """A copy that shares the stored results, with every margin larger by `more`."""
        return self.changed(margins={profile: own + more for profile, own in self.margins.items()})

    def of(self, objective: Objective) -> Evaluator:
        """A copy that shares the stored results, at the loads of another objective."""
        return self.changed(objective=objective, scenarios=Memo(objective.scenarios))

    def changed(self, **changes: object) -> Evaluator:
        """A copy that shares the stored results, with other attributes. With `confirms` = False, `judged` uses the
        predictor of the search, for a search that repairs its own bins."""
        other = copy(self)
        vars(other).update(changes)
        return other

    @property
    def _whole(self) -> dict[Profile | None, _Scaling]:
        """Predictors that confirm bins: with latency limits the twin alone, as trees are only certain of starvation."""
        limited = self.objective is not None and bool(self.objective.limits)
        return {
            k: each.twin if limited and isinstance(each, AutoPredictor) else self._scaling[k]
            for k, each in self._given.items()
        }

    def cautious(self) -> Evaluator:
        """A copy whose searches refuse bins unless the trained trees are certain that they do not starve."""
        if not self.confirms:
            return self
        cautious = {
            k: each.for_search(cautious=True) if isinstance(each, AutoPredictor) else self.searching[k]
            for k, each in self._given.items()
        }
        return self.changed(searching=cautious)

    def whole(self) -> Evaluator:
        """A copy whose searches use the whole predictor."""
        return self.changed(searching=self._whole, fast=False, confirms=False)

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures for a search, at the rates raised by the margin; one row per bin, in order."""
        return self._worst(self.searching, workload, bins, self._factors(bins, self.raised))

    def judged(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """As `evaluate`, but with the whole predictor and without `raised`."""
        if not self.confirms:
            return self.evaluate(workload, bins)
        return self._worst(self._whole, workload, bins, self._factors(bins))

    def _factors(self, bins: Sequence[Bin], raised: Mapping[Profile, float] = MappingProxyType({})) -> Factors:
        """Factors on rates by the margin, and by `raised` beyond it: one for all bins, or for each, float64 (n,)."""
        if not raised and len(self.margins) == 1:
            return 1.0 + self.largest_margin()
        own = {k: (1.0 + self.margin_of(k)) * (1.0 + raised.get(k, 0.0)) for k in profiles_of(bins)}
        return next(iter(own.values())) if len(own) == 1 else np.array([own[item.profile] for item in bins])

    def report(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures at the rates as given; a bin that starves there or in `judged` counts as starved."""
        nominal = _of_profiles(self._whole, workload, bins)
        plain = not any(self.margins.values()) and self.objective is None
        return nominal if plain else _worse(nominal, self.judged(workload, bins))

    def scaled(self, workload: Workload, bins: Sequence[Bin], factors: Factors = 1.0) -> Evaluations:
        """Figures for a search, of each bin at its rates times its factor, without scenarios and margin."""
        return self._counted(self.searching, workload, bins, factors)

    def _counted(self, predictors: _ByProfile, fleet: Workload, bins: Sequence[Bin], factors: Factors) -> Evaluations:
        """Each bin evaluated by the predictor of its profile, and counted as work; one row per bin, in order."""
        before = sum(twin.simulated for twin in self._twins)
        found = _of_profiles(predictors, fleet, bins, factors)
        simulated = sum(twin.simulated for twin in self._twins) - before
        each_s = EVALUATED_S if self.twin_based else FOREIGN_S
        self.work.add(each_s * len(bins) + SIMULATED_S * simulated)
        return found

    def twin_of(self, profile: Profile | None) -> TwinPredictor | None:
        """The twin that decides about bins of a profile; None if another predictor decides."""
        predictor = self._given.get(profile, self._given.get(None))
        if isinstance(predictor, AutoPredictor):
            return predictor.twin
        return predictor if isinstance(predictor, TwinPredictor) else None

    def _worst(self, predictors: _ByProfile, workload: Workload, bins: Sequence[Bin], factor: Factors) -> Evaluations:
        first, *others = self.scenarios(workload)
        found = self._counted(predictors, first.workload, bins, first.factor * factor)
        for other in others:
            found = _worse(found, self._counted(predictors, other.workload, bins, other.factor * factor))
        return self._with_nominal(found, workload, bins) if predictors == self._whole else found

    def _with_nominal(self, found: Evaluations, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """For bins that hold with the margin, raise each limited figure to its value at the rates as given, if larger.
        Simulated hours at other rates differ by chance: a bin may keep its limits with the margin and break them in
        `report`. The values at the rates as given may exceed the limits by `LATENCY_SLACK`."""
        if self.objective is None or not self.objective.limits or not any(self.margins.values()):
            return found
        kept = np.flatnonzero(self.objective.holds(found))
        if not kept.size:
            return found
        nominal = self._counted(self._whole, workload, [bins[k] for k in kept.tolist()], 1.0)
        eased = {name: getattr(nominal, name) / LATENCY_SLACK for name in self.objective.limits}
        columns = {name: np.array(getattr(found, name)) for name in FIGURES}
        own = Evaluations(**{name: column[kept] for name, column in columns.items()})
        worse = _worse(own, replace(nominal, **eased), self.objective.limits)
        for name, column in columns.items():
            column[kept] = getattr(worse, name)
        return Evaluations(**columns)

    def holds(self, workload: Workload, bins: Sequence[Bin]) -> BoolArray:
        """Which of the bins the objective admits, bool (n,)."""
        found = self.evaluate(workload, bins)
        return found.feasible if self.objective is None else self.objective.holds(found)


def _of_profiles(predictors: _ByProfile, fleet: Workload, bins: Sequence[Bin], factors: Factors = 1.0) -> Evaluations:
    """Each bin evaluated by the predictor of its profile; one row per bin, in order."""
    if len(predictors) == 1:
        (only,) = predictors.values()
        return only.evaluate(fleet, bins, factors)
    kinds = profiles_of(bins)
    if len(kinds) == 1:
        return predictors[kinds[0]].evaluate(fleet, bins, factors)
    scale = np.broadcast_to(np.asarray(factors, dtype=np.float64), len(bins))
    rows: dict[int, Evaluation] = {}
    for profile in kinds:
        mine = [k for k, item in enumerate(bins) if item.profile == profile]
        found = predictors[profile].evaluate(fleet, [bins[k] for k in mine], scale[mine])
        rows |= zip(mine, found, strict=True)
    return Evaluations.of([rows[k] for k in range(len(bins))])


def _scaling(predictor: Predictor) -> _Scaling:
    """The predictor itself if it scales rates and stores results; else a wrapper that does both."""
    if isinstance(predictor, TwinBased):
        return predictor

    def evaluate(workload: Workload, bins: Sequence[Bin], factors: FloatArray) -> Evaluations:
        rows: dict[int, Evaluation] = {}
        for factor in distinct(factors).tolist():
            mine = np.flatnonzero(factors == factor).tolist()
            fleet = workload if factor == 1.0 else workload.scaled(factor)
            found = evaluated(predictor, fleet, [bins[k] for k in mine])
            rows |= zip(mine, found, strict=True)
        return Evaluations.of([rows[k] for k in range(len(bins))])

    return ContentCache(evaluate)


def _worse(figures: Evaluations, other: Evaluations, highest: Iterable[str] = ()) -> Evaluations:
    """`figures`, starved or failing where `other` is too; each figure in `highest` is the larger known value."""
    larger = {name: np.fmax(getattr(figures, name), getattr(other, name)) for name in highest}
    return replace(
        figures,
        **larger,
        starved=figures.starved | other.starved,
        memory_error=figures.memory_error | other.memory_error,
        starvation_probability=np.maximum(figures.starvation_probability, other.starvation_probability),
    )


def rate_margin_for(profile: Profile, *, confidence: float | None = None, margin: float | None = None) -> float:
    """Share by which rates are raised when servers are evaluated: given, or from the profile's held-out errors, by
    default a calibrated profile's margin at 95 % confidence, and 10 % for a profile that carries no errors."""
    if margin is not None:
        if confidence is not None:
            raise ValidationError("Expected a confidence or a margin, got both.")
        return checks.real("the margin", margin, low=0.0, high=10.0)
    if confidence is not None:
        return rate_margin(profile, confidence)
    known = sum(error_key(q) in profile.errors for q in QUANTILES)
    return rate_margin(profile, DEFAULT_CONFIDENCE) if known >= 2 else UNCALIBRATED_MARGIN


def margins_for(
    profiles: Sequence[Profile], *, confidence: float | None = None, margin: Margin | None = None
) -> dict[Profile, float]:
    """`rate_margin_for` each profile; `margin`: one for all, or each. Raises `ValidationError`: a profile has none."""
    own = margin if isinstance(margin, Mapping) else dict.fromkeys(profiles, margin)
    if without := [profile.name for profile in profiles if profile not in own]:
        raise ValidationError(f"Expected a margin for each kind of server, got none for {listed(without)}.")
    return {each: rate_margin_for(each, confidence=confidence, margin=own[each]) for each in profiles}


def raised_words(margins: Mapping[Profile, float], bins: Sequence[Bin], most: float | None = None) -> tuple[str, ...]:
    """A sentence with the margin of each kind of server in `bins`; () if no two differ. `most`: the largest of them
    after repairs, which raise all of them alike; None: as in `margins`."""
    used = {item.profile: margins[item.profile] for item in bins}
    if len(set(used.values())) < 2:
        return ()
    more = 0.0 if most is None else most - max(used.values())
    each = (f"{100 * (margin + more):.3g} % on {profile.name}" for profile, margin in used.items())
    return (f"Rates are raised by {listed(each)}.",)
