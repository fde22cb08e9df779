"""Why adapters have no place, in words."""

from __future__ import annotations

import pytest

import packer
from packer import Adapter, Profile, Workload
from packer.testing.analytic import AnalyticPredictor


@pytest.mark.parametrize(
    ("objective", "said", "help_"),
    [
        ("gpus", "it starves even alone", "more --max-replicas, a lower rate, or a faster GPU"),
        ("slo:mean_ttft_ms=0.1", "the limits break even alone", "looser limits, or a faster GPU"),
    ],
)
def test_limits_are_named_only_where_there_are_any(server: Profile, objective: str, said: str, help_: str) -> None:
    """An adapter that no server serves at a hundredth of its rate starves; one whose limits no server keeps needs
    looser ones."""
    rate = 1e5 if objective == "gpus" else 0.1
    plan = packer.solve(
        Workload([Adapter("hot", 8, rate)]),
        server,
        objective,
        predictor=AnalyticPredictor(),
        verify=False,
        with_headroom=False,
    )
    assert plan.unplaced == (0,)
    assert f"adapter 'hot' (rank 8, {rate:g} req/s): {said} at a hundredth of the rate" in plan.reasons[0]
    assert f"What would help: {help_}" in plan.reasons[0]
