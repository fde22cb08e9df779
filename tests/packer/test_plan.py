"""Plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packer.plan import Plan, Status


@pytest.mark.parametrize(
    ("value", "bound", "gap"), [(4.0, 3.0, 0.25), (3.0, 3.0, 0.0), (3.0, 3.5, 0.0), (0.0, 0.0, 0.0)]
)
def test_gap(toy_plan: Callable[..., Plan], value: float, bound: float, gap: float) -> None:
    """The gap is (value − bound) / value, never below 0."""
    plan = replace(toy_plan(["a", "b"]), objective_value=(value,), lower_bound=bound)
    assert plan.gap == pytest.approx(gap)


def test_no_gap_without_a_bound_or_a_plan(toy_plan: Callable[..., Plan]) -> None:
    """Without a bound, or without a plan that serves everything, there is no gap."""
    plan = toy_plan(["a", "b"])
    assert replace(plan, lower_bound=None).gap is None
    assert replace(plan, status=Status.INFEASIBLE).gap is None
    assert plan.n_gpus == len(plan.bins)
