"""Plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packer.fit.estimate import estimate_profile
from packer.fit.models import model_named
from packer.plan import Plan, Status
from packer.room import Room


@pytest.mark.parametrize(
    ("value", "bound", "gap"), [(4.0, 3.0, 0.25), (3.0, 3.0, 0.0), (3.0, 3.5, 0.0), (0.0, 0.0, 0.0)]
)
def test_gap(toy_plan: Callable[..., Plan], value: float, bound: float, gap: float) -> None:
    """The gap is (value − bound) / value, never below 0."""
    plan = replace(toy_plan(["a", "b"]), objective_value=(value,), lower_bound=bound)
    assert plan.gap == pytest.approx(gap)


def test_headroom_is_that_of_the_rooms(toy_plan: Callable[..., Plan]) -> None:
    """A search that ends once it has rooms gives a plan with their headroom: "none" would say that the plan breaks."""
    plan = replace(toy_plan(["a", "b"], gpus=2), rooms=(Room(1.1664), Room(None)))
    assert plan.headroom == (1.1664, None)
    assert plan.headroom_words == ["+17%", "none"]


def test_no_gap_without_a_bound_or_a_plan(toy_plan: Callable[..., Plan]) -> None:
    """Without a bound, or without a plan that serves everything, there is no gap."""
    plan = toy_plan(["a", "b"])
    assert replace(plan, lower_bound=None).gap is None
    assert replace(plan, status=Status.INFEASIBLE).gap is None
    assert plan.n_gpus == len(plan.bins)


@pytest.mark.parametrize(("stored", "said"), [(None, ""), ("fp8", " in fp8"), ("awq", " in awq")])
def test_the_servers_of_a_plan_are_named_with_how_their_weights_are_stored(
    stored: str | None, said: str, toy_plan: Callable[..., Plan]
) -> None:
    """A server of FP8 weights is another than one of bf16, whether vLLM quantises them or the repository does."""
    profile = estimate_profile(model_named("Qwen/Qwen3-8B"), "l40s", quantization=stored)
    plan = toy_plan(["a", "b"])
    plan = replace(plan, bins=tuple(replace(item, profile=profile) for item in plan.bins))
    assert f"L40S (Qwen3-8B{said}, vLLM " in plan.hardware
