"""Measured traffic compared with a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packer.errors import ValidationError
from packer.operate.drift import drift
from packer.plan import Plan


def test_an_adapter_of_an_unknown_base_model_needs_another_plan(toy_plan: Callable[..., Plan]) -> None:
    """Where a plan has servers of two base models, an adapter that may be of either has no server, however few its
    requests."""
    plan = toy_plan(["a", "b"])
    profile, fleet = plan.bins[0].profile, plan.workload
    second = replace(profile, name="second", model=replace(profile.model, name="second"))
    models = (profile.model.name, "second")
    adapters = [replace(each, model=model) for each, model in zip(fleet.adapters, models, strict=True)]
    plan = replace(
        plan,
        workload=replace(fleet, adapters=tuple(adapters)),
        bins=(plan.bins[0], replace(plan.bins[1], profile=second)),
    )
    assert drift(plan, fleet).advice == "keep"
    new = replace(fleet.adapters[0], name="new", rate=0.001)
    found = drift(plan, replace(fleet, adapters=(*fleet.adapters, new)))
    assert (found.advice, found.new_adapters) == ("replan", ("new",))
    known = drift(plan, replace(fleet, adapters=(*fleet.adapters, replace(new, name="second"))))
    assert known.advice == "watch"


def test_an_idle_adapter_that_wakes_up_was_planned_without_requests(toy_plan: Callable[..., Plan]) -> None:
    """Its planned rate is 0, not the tiny one that stands for it."""
    plan, seen = toy_plan(["a", "b"]), toy_plan(["a", "b"]).workload
    idle = (replace(seen.adapters[0], rate=0.0), *seen.adapters[1:])
    (row,) = drift(replace(plan, workload=replace(seen, adapters=idle)), seen).drifted
    assert (row.planned, row.measured) == (0.0, seen.adapters[0].rate)


def test_an_idle_adapter_is_not_silent(toy_plan: Callable[..., Plan]) -> None:
    """Without requests it does what was planned: of 3,000 adapters of a log, its own plan called 2,524 silent."""
    plan = toy_plan(["a", "b", "c"])
    first, *others = plan.workload.adapters
    planned = replace(plan.workload, adapters=(replace(first, rate=0.0), *others))
    seen = replace(plan.workload, adapters=tuple(others[1:]))
    assert drift(replace(plan, workload=planned), seen).silent_adapters == (others[0].name,)


@pytest.mark.parametrize("tolerance", [float("nan"), -0.1, None])
def test_a_tolerance_is_a_share(toy_plan: Callable[..., Plan], tolerance: float) -> None:
    """A tolerance with which no rate, or every rate, would count as drifted is refused."""
    plan = toy_plan(["a", "b"])
    with pytest.raises(ValidationError, match=r"Expected tolerance to be a (finite )?number"):
        drift(plan, plan.workload, tolerance=tolerance)
