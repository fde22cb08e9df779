"""What the error of estimated profiles does to the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packer import Adapter, Workload
from packer.io.profiles import load_profile
from packer.planning.band import capacity_band, with_band
from packer.planning.explore import Frontier
from packer.planning.frontier import FrontierPoint
from packer.planning.recommend import Deployment
from packer.planning.solve import solve
from packer.profile import Profile
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.twin.margin import BAND_KEYS

ESTIMATE = replace(small_profile(), errors=dict(zip(BAND_KEYS, (0.5, 2.0), strict=True)))


def test_an_estimate_says_between_which_numbers_the_answer_lies() -> None:
    """At half and at twice its capacity the fleet takes more and fewer GPUs, as many as at other rates."""
    fleet = random_fleet(80, seed=1)
    given = {"predictor": AnalyticPredictor(), "margin": 0.0, "verify": False}
    plan = solve(fleet, ESTIMATE, **given)  # type: ignore[arg-type]
    band = plan.estimate_band
    assert band["fewest"]["gpus"] < plan.n_gpus < band["most"]["gpus"]
    assert band["most"]["gpus"] == solve(fleet.scaled(2.0), small_profile(), **given).n_gpus  # type: ignore[arg-type]


def test_calibrated_profiles_have_no_band() -> None:
    """Their error is in the margin."""
    known = load_profile("h100-64gb/llama-3.1-8b-instruct")
    assert capacity_band([known, small_profile()]) is None
    assert capacity_band([known, ESTIMATE]) == (0.5, 2.0)


def test_a_plan_that_breaks_in_fresh_hours_has_no_band() -> None:
    """Plans at other rates are not tried in fresh hours: fewer GPUs than break the goal there would seem enough."""
    plan = solve(random_fleet(80, seed=1), ESTIMATE, predictor=AnalyticPredictor(), verify=False)
    assert with_band(plan, lambda _fleet: plan).estimate_band
    broken = replace(plan, verified=False, estimate_band={})
    assert not with_band(broken, lambda _fleet: plan).estimate_band


def test_a_plan_whose_margin_covers_an_end_is_the_dearest_there() -> None:
    """With rates raised twofold the plan is one at half of the capacity, where greedy finds none with fewer GPUs."""
    fleet = random_fleet(80, seed=1)
    plan = solve(fleet, ESTIMATE, predictor=AnalyticPredictor(), margin=1.0, verify=False)
    band = plan.estimate_band
    assert band["fewest"]["gpus"] < band["most"]["gpus"] <= plan.n_gpus
    asked = list[float]()

    def again(other: Workload) -> None:
        asked.append(other.rate)

    assert with_band(plan, again).estimate_band["most"] == band["most"]
    assert asked == [fleet.rate / 2.0]  # none for rates that the margin covers, which it would raise again


def test_an_end_of_the_band_needs_no_plans_on_more_gpus(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The band says how many GPUs a fleet takes, not what more of them would give: their plans took as long again."""
    real, made = Frontier.at, list[int]()

    def at(job: Frontier, n_gpus: int, following: int | None = None) -> FrontierPoint:
        made.append(n_gpus)
        return real(job, n_gpus, following)

    fleet = Workload([Adapter(f"a{i}", 8, 0.5) for i in range(12)])
    monkeypatch.setattr(Frontier, "at", at)
    found = Deployment(Frontier(fleet, server)).at_rates(fleet.scaled(2.0))
    assert found is not None
    assert max(made) == found.n_gpus
