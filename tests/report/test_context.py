"""The page and the terminal name the traffic with which a plan was simulated at the end, and no more of it than was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packer.arrival import Arrivals
from packer.cli.plan_table import plan_lines
from packer.plan import Plan
from packer.report.context import resimulated
from packer.report.page import render_report

DAY = Arrivals("piecewise", period_s=3600.0, factors=(1.0, 2.0) * 12)
ODD = Arrivals("piecewise", period_s=800.0, factors=(1.0, 2.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("objective", "arrivals", "evaluated_s", "words"),
    [
        ("gpus", Arrivals(), None, "with a fresh seed"),
        ("recommend", Arrivals(), None, "on a fresh hour"),
        ("recommend", DAY, None, "on 24 fresh hours"),
        ("recommend", ODD, None, "on a fresh run of 4,000 s"),
        ("gpus", ODD, 0.0, "for 4,000 s"),
        ("gpus", Arrivals(), 0.0, "for an hour"),
        ("recommend", Arrivals(), 60.0, "for 60 s"),
    ],
)
def test_an_hour_is_named_where_one_was_simulated(
    toy_plan: Callable[..., Plan], objective: str, arrivals: Arrivals, evaluated_s: float | None, words: str
) -> None:
    """Only the default objective and `evaluate` simulate hours; other plans are simulated until the result is clear."""
    plan = toy_plan(["a", "b"])
    plan = replace(plan, objective=objective, evaluated_s=evaluated_s, workload=plan.workload.with_arrivals(arrivals))
    for verified, result in ((True, "it holds"), (False, "it breaks")):
        told = replace(plan, verified=verified)
        assert resimulated(told) == f"re-simulated {words}: {result}"
        assert any(resimulated(told) in line for line in plan_lines(told) if isinstance(line, str))
        assert render_report(told).count(resimulated(told)) == 2
    assert resimulated(replace(plan, verified=None)) == "re-simulated: not done"
