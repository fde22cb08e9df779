"""A latency goal holds, whatever the objective of the plan and the way in which it is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import packer
from packer.errors import IncompatibleError, ValidationError
from packer.objectives.base import limits_of, load_objective
from packer.twin.simulate import simulate

SERVER = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
FLEET = packer.Workload([packer.Adapter(f"a{i}", (8, 16, 32)[i % 3], 0.3 + 0.02 * i) for i in range(40)])


def judged(plan: packer.Plan) -> list[float]:
    """How much of the goal each server of a plan uses in its own hour."""
    return [
        simulate(
            item.workload(plan.workload), item.profile, max_loras=item.max_loras,
            max_lora_rank=item.max_lora_rank, seed=plan.seed,
        ).slo_used
        for item in plan.bins
    ]  # fmt: skip


def test_an_objective_slo_is_gpus_within_that_goal() -> None:
    """`slo:…` and fewest GPUs with the same goal give the same servers and limits."""
    goal = packer.Goal.only({"p95_ttft_ms": 2000, "mean_itl_ms": 100})
    named = packer.solve(FLEET, SERVER, "slo:p95_ttft_ms=2000,mean_itl_ms=100")
    fewest = packer.solve(FLEET, SERVER, "gpus", slo=goal)
    assert named.bins == fewest.bins
    assert named.workload.slo == fewest.workload.slo == packer.Goal.parse("p95_ttft_ms=2000,mean_itl_ms=100")
    assert named.limits == fewest.limits == {"slo_used": 1.0, "mean_itl_ms": 100.0}
    assert max(judged(fewest)) <= 1.0
    assert packer.solve(FLEET, SERVER, "gpus").n_gpus < fewest.n_gpus


def test_the_lowest_price_keeps_the_goal() -> None:
    """Several kinds of server: the cheapest mix within a goal keeps it, which the cheapest of all does not."""
    slow = replace(SERVER, name="slow", engine=replace(SERVER.engine, max_num_seqs=48))
    kinds = [packer.GpuKind(SERVER, 4.0), packer.GpuKind(slow, 1.0)]
    few = FLEET.subset(range(8)).scaled(3.2)
    free, kept = (packer.solve(few, kinds, "cost", slo=slo) for slo in (None, "p95_ttft_ms=2000"))
    assert free.status is not packer.Status.INFEASIBLE
    assert kept.status is not packer.Status.INFEASIBLE
    assert kept.objective_value > free.objective_value
    assert max(judged(kept)) <= 1.0
    assert max(judged(replace(free, workload=kept.workload))) > 1.0


def test_limits_without_a_figure_need_a_simulation() -> None:
    """A predictor without requests takes limits whose figure of a server it has, and refuses others by name."""
    server = load_objective("gpus:mean_ttft_ms=500,server.p99_itl_ms=80")
    assert server.limits == {"mean_ttft_ms": 500.0, "p99_itl_ms": 80.0, "slo_used": 1.0}
    assert server.required == {"mean_ttft_ms", "p99_itl_ms"}
    assert limits_of(packer.Goal.parse("ttft_ms=500,chat:tpot_ms=9")) == {"slo_used": 1.0}
    assert limits_of(packer.Goal.parse("none")) == {}
    with pytest.raises(IncompatibleError, match="no slo_used for the limits p90_e2e_ms"):
        packer.solve(FLEET, SERVER, "gpus:p90_e2e_ms=5000", predictor="boosting")
    plan = packer.solve(FLEET, SERVER, "gpus:mean_ttft_ms=900", predictor="boosting")
    assert np.isnan(plan.evaluations.slo_used).all() or (plan.evaluations.slo_used <= 1.0).all()
    assert (plan.evaluations.mean_ttft_ms <= 900).all()


def test_an_slo_class_needs_limits_in_every_plan_for_a_goal() -> None:
    """`solve` refuses a goal without limits for the class of an adapter, as `recommend` and `frontier` do."""
    fleet = packer.Workload([packer.Adapter("a", 8, 1.0, slo_class="gold")])
    for plan in (packer.solve, packer.recommend, packer.frontier):
        with pytest.raises(ValidationError, match="slo_class 'gold' of adapter 'a'"):
            plan(fleet, SERVER, slo="p95_ttft_ms=300")
    assert packer.solve(fleet, SERVER).n_gpus == 1  # for throughput alone
    assert packer.solve(fleet, SERVER, slo="p95_ttft_ms=300; gold:p95_ttft_ms=200").n_gpus == 1


def test_all_classes_without_limits_are_named_at_once() -> None:
    """One message names each class that lacks limits, with an adapter of it, and the options that give them."""
    adapters = [packer.Adapter(f"a{k}", 8, 1.0, slo_class=name) for k, name in enumerate(("gold", "iron", "gold"))]
    said = r"slo_class 'gold' of adapter 'a0'(,| and) 'iron' of adapter 'a1'.*--slo gold:p95.* --slo iron:p95"
    with pytest.raises(ValidationError, match=said):
        packer.solve(packer.Workload(adapters), SERVER, slo="p95_ttft_ms=300")


def test_figures_of_a_plan_that_holds_keep_its_limits(server: packer.Profile) -> None:
    """Parts of an adapter that keep the limits in one hour, but not in the hours that are shown, are no plan, also if
    they come from a search without the running servers."""
    fleet = packer.Workload(
        [packer.Adapter("hot", 64, 2.836)],
        input_tokens=packer.Lengths.gamma(mean=6000.0, cv=0.5),
        output_tokens=packer.Lengths.gamma(mean=800.0, cv=1.04),
        length_correlation=-0.2,
    )
    goal: dict[str, Any] = {"objective": "slo:p95_ttft_ms=2000,mean_itl_ms=40", "max_replicas": 8}
    plan = packer.solve(fleet, server, **goal)
    again = packer.solve(fleet, server, **goal, old_plan=plan)
    assert again.n_gpus == plan.n_gpus
    for found in (plan, again):
        assert found.status is not packer.Status.INFEASIBLE
        assert found.verified
        assert found.evaluations.slo_used.max() <= 1.0
