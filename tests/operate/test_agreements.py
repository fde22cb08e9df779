"""Entry points that answer one question agree: plans for a goal, a plan evaluated or simulated as a cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import packer
from packer.bin import Bin
from packer.operate.evaluate import holds_routed
from packer.operate.predict import predict
from packer.planning.explore import Frontier
from packer.planning.frontier import point_of

SERVER = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")


def fleet(n: int, rate: float, skew: float) -> packer.Workload:
    """Adapters of three ranks whose rates fall with their number."""
    return packer.Workload([packer.Adapter(f"a{i}", (8, 16, 32)[i % 3], rate / (1 + i) ** skew) for i in range(n)])


@pytest.mark.parametrize("workload", [fleet(12, 0.5, 0.0), fleet(40, 0.7, 0.0), fleet(60, 3.0, 0.7)])
def test_recommend_takes_no_more_gpus_than_the_objective(workload: packer.Workload) -> None:
    """The plan to deploy needs at most the GPUs that `solve` finds for the same goal, and keeps it as well."""
    goal = "p95_ttft_ms=2000,mean_itl_ms=100"
    found = packer.recommend(workload, SERVER, slo=goal)
    asked = packer.solve(workload, SERVER, "gpus", slo=goal)
    assert found.status is not packer.Status.INFEASIBLE
    assert found.n_gpus <= asked.n_gpus
    assert found.workload.slo == asked.workload.slo


@pytest.mark.parametrize("workload", [fleet(30, 0.4, 0.0), fleet(40, 0.9, 0.0), fleet(60, 4.0, 0.8)])
def test_a_plan_is_the_cluster_of_its_servers(workload: packer.Workload) -> None:
    """`evaluate` and the cluster that routes as the plan does give the same answers, other requests apart."""
    plan = packer.recommend(workload, SERVER, verify=False)
    alone = packer.evaluate_plan(plan, seed=5, duration_s=1800.0)
    run = packer.simulate_cluster(workload, plan.cluster(), router="plan", seed=5, duration_s=1800.0)
    rows = alone.plan.evaluations
    assert [server.starved for server in run.servers] == rows.starved.tolist()
    for name, tolerance in (("mean_itl_ms", 0.05), ("total_token_throughput", 0.05), ("mean_ttft_ms", 0.25)):
        figures = [getattr(server, name) for server in run.servers]
        np.testing.assert_allclose(figures, getattr(rows, name), rtol=tolerance, err_msg=name)
    (point,) = (row for row in plan.frontier if row["n_gpus"] == plan.n_gpus)
    assert point["mean_itl_ms"] == pytest.approx(run.mean_itl_ms, rel=0.05)
    assert holds_routed(plan, run) == (not alone.over_limits)
    assert alone.holds == (holds_routed(plan, run) and not run.starved)


@pytest.mark.parametrize("predictor", ["twin", "auto"])
def test_one_server_is_evaluated_as_it_is_simulated(predictor: str) -> None:
    """Where the twin evaluates a server, its figures are those of the simulated hour, whatever the entry point."""
    engine = replace(SERVER.engine, version="0.11.0")  # for which no trees were trained
    server = replace(SERVER, engine=engine)
    workload = fleet(24, 0.5, 0.0)
    found = packer.evaluate_server(workload, server, max_loras=24, predictor=predictor, seed=3)
    assert predict(workload, server, predictor, max_loras=24, seed=3).figures == found
    run = packer.simulate(workload, server, max_loras=24, seed=3)
    for name in ("mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "slo_attainment", "starved", "stable"):
        assert getattr(found, name) == getattr(run, name), name
    assert found.total_token_throughput == pytest.approx(run.served_share * workload.offered_tok_s)


def test_mean_itl_of_a_plan_is_that_of_all_gaps() -> None:
    """A server whose requests have few output tokens counts with their gaps, as in a run of the whole cluster."""
    long, short = packer.Lengths.constant(3000), packer.Lengths.constant(20)
    workload = packer.Workload(
        [packer.Adapter(f"long-{k}", 8, 0.12, long, short) for k in range(10)]
        + [packer.Adapter(f"chat-{k}", 64, 0.5, short, packer.Lengths.constant(400)) for k in range(10)]
    )
    bins = [
        Bin(tuple(range(first, first + 10)), SERVER.settings(10, rank), SERVER) for first, rank in ((0, 8), (10, 64))
    ]
    job = Frontier(workload, SERVER)
    point = point_of(job, bins)
    servers = job.hours.all(bins, workload)
    run = packer.simulate_cluster(workload, point.plan.cluster(), router="plan", seed=1)
    assert servers[1].figures.mean_itl_ms > 1.3 * servers[0].figures.mean_itl_ms
    assert point.mean_itl_ms == pytest.approx(run.mean_itl_ms, rel=0.03)
