"""Whether a server is starved."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import packer
from packer.adapter import Adapter
from packer.lengths import Lengths
from packer.profile import FrontEndSpec, Profile
from packer.twin.simulate import simulate
from packer.twin.until_clear import evaluation_of
from packer.workload import Workload


def test_an_idle_server_is_never_starved(toy_profile: Profile) -> None:
    """Few requests vary in number and length: that says nothing about a server that is busy 1 % of the time."""
    fleet = Workload([Adapter("a", 8, 0.005)])
    for seed in range(20):
        run = simulate(fleet, toy_profile, max_loras=1, seed=seed)
        assert run.busy_share < 0.05
        assert not run.starved


@pytest.mark.parametrize("rate", [0.005, 40.0])
def test_simulation_and_predictor_agree(toy_profile: Profile, rate: float) -> None:
    """`Run.starved` and the evaluation made of the same run are one definition."""
    run = simulate(Workload([Adapter("a", 8, rate)]), toy_profile, max_loras=1, duration_s=600, seed=3)
    assert evaluation_of([run]).starved == run.starved
    assert evaluation_of([run]).total_token_throughput == pytest.approx(run.served_share * run.offered_tok_s)


@pytest.mark.parametrize("seed", range(3))
def test_hours_without_requests_are_those_of_an_idle_server(toy_profile: Profile, seed: int) -> None:
    """Plans with latency limits keep an adapter that nobody uses, whichever hours are simulated."""
    run = simulate(Workload([Adapter("a", 8, 0.0)]), toy_profile, max_loras=1, seed=seed)
    assert (run.sent, evaluation_of([run]).worst_adapter_ttft_ms) == (0, 0.0)


def test_requests_under_way_at_the_end_of_a_short_run_are_no_backlog(toy_profile: Profile) -> None:
    """Most requests of half a minute are open at its end: they say nothing about a server that is hardly busy."""
    fleet = Workload([Adapter("a", 8, 1.0)], output_tokens=Lengths.constant(1500))
    run = simulate(fleet, toy_profile, max_loras=1, duration_s=30)
    assert (run.completed < 0.7 * run.sent, run.served_share) == (True, 1.0)
    assert simulate(fleet.scaled(1e3), toy_profile, max_loras=1, duration_s=30).starved


@pytest.mark.parametrize(("requests", "tokens"), [(30, 40_000), (12, 40_000)])
def test_requests_under_way_at_the_end_of_an_hour_are_no_backlog(
    toy_profile: Profile, requests: int, tokens: int
) -> None:
    """Where few or long requests are sent in an hour, those that run at its end are more than a tenth of its tokens:
    they say nothing about a server that is mostly idle. One that gets more than it can serve starves."""
    profile = replace(toy_profile, engine=replace(toy_profile.engine, max_model_len=100_000))
    fleet = Workload([Adapter("a", 8, requests / 3600.0)], Lengths.constant(10), Lengths.constant(tokens))
    runs = [simulate(fleet, profile, max_loras=1, seed=seed) for seed in range(20)]
    completed = [run.total_token_throughput * run.duration_s / run.sent_tokens for run in runs]
    assert min(completed) < 0.9
    assert not any(run.starved for run in runs)
    assert simulate(fleet.scaled(5.0 / fleet.rate), profile, max_loras=1).starved


def test_an_hour_does_not_excuse_requests_that_last_longer(toy_profile: Profile) -> None:
    """Where answers take more than an hour, none ends in it, and the KV cache only begins to fill: an hour says nothing
    about a server that starves in ten hours. It was said to serve all of its load."""
    profile = replace(
        toy_profile, engine=replace(toy_profile.engine, max_model_len=100_000),
        latency=replace(toy_profile.latency, coefficients={**toy_profile.latency.coefficients, "base_ms": 50.0}),
    )  # fmt: skip
    fleet = Workload([Adapter("a", 8, 6 / 3600.0)], Lengths.constant(10), Lengths.constant(90_000))
    runs = [simulate(fleet, profile, max_loras=1, seed=seed) for seed in range(8)]
    assert min(run.mean_kv_usage for run in runs) < 1.0 / 3.0
    assert not any(run.completed for run in runs)
    assert all(run.starved for run in runs)
    assert simulate(fleet, profile, max_loras=1, duration_s=36_000.0).starved


def test_an_hour_does_not_excuse_long_requests_in_few_places(toy_profile: Profile) -> None:
    """Four places carry 12 requests of 20 minutes an hour. With 18, three of twelve hours, which begin empty, were said
    to serve all of them; in ten hours the server starves."""
    engine = replace(toy_profile.engine, max_model_len=100_000, max_num_seqs=4)
    latency = replace(toy_profile.latency, coefficients={"base_ms": 40.0})
    profile = replace(toy_profile, engine=engine, latency=latency)
    fleet = Workload([Adapter("a", 8, 18 / 3600.0)], Lengths.constant(10), Lengths.constant(30_000))
    assert all(simulate(fleet, profile, max_loras=1, seed=seed).starved for seed in range(12))
    assert simulate(fleet, profile, max_loras=1, duration_s=36_000.0).starved


def test_an_hour_does_not_excuse_long_requests_on_a_server_that_fills() -> None:
    """72 requests of 20,000 tokens an hour fill the KV cache in some hours and queue for hours then, which an hour that
    begins empty hides: the plan has the two servers that keep the goal in every one of other hours."""
    fleet = Workload(
        [Adapter(f"a{k}", 16, 0.0004) for k in range(50)], Lengths.gamma(300, 1.0), Lengths.gamma(20_000, 0.5),
        length_correlation=0.0,
    )  # fmt: skip
    plan = packer.recommend(fleet, packer.load_profile("h100-64gb/llama-3.1-8b-instruct"))
    assert plan.n_gpus == 2
    assert all(packer.evaluate_plan(plan, seed=6000 + k).holds for k in range(3))


def test_a_server_that_does_not_start_is_starved(toy_profile: Profile) -> None:
    """Nothing is served, so the share is 0."""
    memory = replace(toy_profile.memory, kv_budget_bytes=0.0)
    run = simulate(Workload([Adapter("a", 8, 1.0)]), replace(toy_profile, memory=memory), max_loras=1)
    assert (run.served_share, run.starved) == (0.0, True)


def test_one_token_answers_have_no_gaps(toy_profile: Profile) -> None:
    """As in `vllm bench serve` their mean ITL is 0; where nothing completes there is none."""
    single = Workload([Adapter("a", 8, 0.5)], output_tokens=Lengths.constant(1))
    found = evaluation_of([simulate(single, toy_profile, max_loras=1, duration_s=600)])
    assert (found.mean_itl_ms, found.p99_itl_ms, found.mean_tpot_ms) == (0.0, 0.0, 0.0)
    assert found.mean_ttft_ms > 0.0
    memory = replace(toy_profile.memory, kv_budget_bytes=0.0)
    none = evaluation_of([simulate(single, replace(toy_profile, memory=memory), max_loras=1)])
    assert math.isnan(none.mean_itl_ms)


def test_chunks_that_all_leave_together_have_no_gaps(toy_profile: Profile) -> None:
    """A front end that stands still for longer than every request runs sends each answer in one chunk."""
    stalled = replace(toy_profile, frontend=FrontEndSpec(first_use_ms=275.0))
    fleet = Workload([Adapter(f"a{i}", 8, 2.0) for i in range(60)], Lengths.constant(16), Lengths.constant(2))
    run = simulate(fleet, stalled, max_loras=60, duration_s=10)
    assert math.isnan(run.mean_itl_ms)
    found = evaluation_of([run])
    assert (found.mean_itl_ms, found.mean_tpot_ms) == (0.0, 0.0)
    assert found.mean_ttft_ms > 1000.0
