"""The growth curves of a written page, beside the figures of the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packer
from packer.adapter import Adapter
from packer.fit.estimate import estimate_profile
from packer.plan import Plan
from packer.predictors.twin import TwinPredictor
from packer.report.growth import FACTORS
from packer.report.page import write_report
from packer.twin.hours import Hours
from packer.workload import Workload

FLEET = Workload([Adapter("a4", 8, 6.6), Adapter("a9", 8, 2.2)])


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two adapters on a server whose profile has no trees of its own, planned with "auto" and seed 3."""
    profile = estimate_profile("Qwen/Qwen3-8B", "l40s", max_model_len=8192)
    found = packer.solve(FLEET, profile, objective="gpus", seed=3)
    assert (found.predictor, found.seed, len(found.bins)) == ("auto", 3, 1)
    return found


def test_curves_go_on_from_the_plans_figures(plan: Plan, tmp_path: Path) -> None:
    """At growing rates a server has the figures of the simulated hours that gave the plan its own, of the same seed."""
    growth = write_report(plan, tmp_path / "page.html")
    assert growth is not None
    assert growth.predictor == "auto"
    hours = Hours(plan.seed)
    for k, factor in enumerate(FACTORS[: (growth.breaks_at(0) or len(FACTORS)) + 1]):
        (hour,) = hours.all(plan.bins, plan.workload.scaled(factor))
        assert growth.mean_ttft_ms[k, 0] == hour.figures.mean_ttft_ms
        assert growth.mean_itl_ms[k, 0] == hour.figures.mean_itl_ms
        assert growth.holds[k, 0] == hour.figures.feasible
    assert growth.mean_ttft_ms[0].tolist() == plan.evaluations.mean_ttft_ms.tolist()
    assert (np.diff(growth.mean_ttft_ms[:4, 0]) > 0).all()


def twin_gives(plan: Plan, path: Path) -> bool:
    """Whether the curves of a plan without simulated hours are the twin's, with seed 0 in place of the plan's."""
    growth = write_report(replace(plan, rooms=(), headroom=(None,), seed=5), path, seed=0)
    assert growth is not None
    found = TwinPredictor(seed=0).evaluate(plan.workload.scaled(FACTORS[1]), plan.bins)
    return growth.mean_ttft_ms[1].tolist() == found.mean_ttft_ms.tolist()


def test_curves_without_hours_are_never_another_profiles(plan: Plan, tmp_path: Path) -> None:
    """Where no hours were simulated the whole predictor evaluates growing rates, not the trees that guide searches."""
    assert twin_gives(plan, tmp_path / "page.html")


def test_curves_of_a_plan_with_limits_are_the_twins(tmp_path: Path) -> None:
    """A profile's own trees give the curves of a plan without limits; with limits, which the twin confirms, it does."""
    plan = packer.solve(FLEET, packer.load_profile("h100-64gb/llama-3.1-8b-instruct"), objective="gpus")
    assert not twin_gives(plan, tmp_path / "page.html")
    limited = replace(plan, limits={"p99_ttft_ms": 5000.0})
    assert twin_gives(limited, tmp_path / "page.html")


def test_another_predictor_gives_its_own_curves(plan: Plan, tmp_path: Path) -> None:
    """A predictor that is named evaluates all rates, today's included, whatever gave the plan its figures."""
    growth = write_report(plan, tmp_path / "page.html", predictor="twin", seed=5)
    assert growth is not None
    assert growth.predictor == "twin"
    found = TwinPredictor(seed=5).evaluate(plan.workload, plan.bins)
    assert growth.mean_ttft_ms[0].tolist() == found.mean_ttft_ms.tolist()
