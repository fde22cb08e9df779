"""A plan that is evaluated with its own seed has the figures that it carries, which are those of a simulated hour."""

from __future__ import annotations

import numpy as np
import pytest

import packer
from packer import Workload
from packer.operate.evaluate import evaluate_plan
from packer.plan import Plan
from packer.profile import Profile


@pytest.fixture(scope="module", params=["gpus", "recommend"])
def plan(request: pytest.FixtureRequest, fleet: Workload, server: Profile) -> Plan:
    """A plan for the fewest GPUs, and one to deploy."""
    return packer.recommend(fleet, server) if request.param == "recommend" else packer.solve(fleet, server)


def test_figures_are_those_of_simulations(plan: Plan, fleet: Workload) -> None:
    """Every server of a plan has the mean TTFT, ITL and worst adapter of `packer.simulate` with the plan's seed."""
    for item, row in zip(plan.bins, plan.evaluations, strict=True):
        slots = {"max_loras": item.max_loras, "max_lora_rank": item.max_lora_rank}
        run = packer.simulate(item.workload(fleet), item.profile, seed=plan.seed, **slots)
        assert (row.mean_ttft_ms, row.mean_itl_ms) == (run.mean_ttft_ms, run.mean_itl_ms)
        assert row.worst_adapter_ttft_ms == run.worst_adapter_ttft_ms


def test_evaluated_again_they_are_the_same(plan: Plan) -> None:
    """With the seed of the plan, no figure of a server changes."""
    found = evaluate_plan(plan, seed=plan.seed)
    for name in (
        "total_token_throughput",
        "mean_ttft_ms",
        "mean_itl_ms",
        "worst_adapter_ttft_ms",
        "slo_used",
    ):
        np.testing.assert_array_equal(getattr(found.plan.evaluations, name), getattr(plan.evaluations, name))
