"""A closed loop over a cluster keeps exactly its requests open, whatever the router, and sends each as one ends."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.change import Change
from packer.cluster import Cluster
from packer.errors import IncompatibleError
from packer.io.profiles import load_profile
from packer.profile import Profile
from packer.twin.arrivals import draw_requests
from packer.twin.cluster.client import first_free_s, free_place, new_client, take_place
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(6)])


def _server(version: str, factor: float = 1.0) -> Profile:
    known = load_profile("h100-64gb/llama-3.1-8b-instruct")
    spec = known.frontend
    front = replace(spec, request_ms=factor * spec.request_ms, output_ms=factor * spec.output_ms)
    return replace(known, engine=replace(known.engine, version=version), frontend=front)


def _open(run: Run) -> np.ndarray:
    """Requests outstanding in each span in which their number does not change, up to the last one that was sent."""
    sent = run.raw.requests.time_s
    ends = np.sort(run.raw.finish_s[~np.isnan(run.raw.finish_s)])
    at = np.unique(np.concatenate([sent, ends[ends < sent[-1]]]))
    middle = (at[:-1] + at[1:]) / 2
    return np.searchsorted(np.sort(sent), middle) - np.searchsorted(ends, middle)


@pytest.mark.parametrize("version", ["0.8.5", "0.32.0"])
@pytest.mark.parametrize("factor", [0.0, 3.0])
def test_a_cluster_of_one_is_the_server(version: str, factor: float) -> None:
    """Every request is sent and ends when it does in `simulate`, also where the client sees ends late."""
    profile = _server(version, factor)
    one = simulate(FLEET, profile, max_loras=4, max_lora_rank=16, duration_s=60.0, concurrency=20)
    cluster = Cluster.of(profile, 1, max_loras=4, max_lora_rank=16)
    run = simulate_cluster(FLEET, cluster, router="most-idle", duration_s=60.0, concurrency=20)
    assert run.raw.requests.time_s.tolist() == one.raw.requests.time_s.tolist()
    np.testing.assert_array_equal(run.raw.finish_s, one.raw.finish_s)
    assert run.offered_tok_s == one.offered_tok_s
    assert run.closed_loop


@pytest.mark.parametrize("router", ["most-idle", "round-robin", "hrw"])
@pytest.mark.parametrize("seed", range(6))
def test_exactly_so_many_requests_are_open(case: Callable[..., Any], router: str, seed: int) -> None:
    """As long as a request is left to send, C are open; each is sent once, in the order of the trace."""
    given_case = case(seed)
    trace = given_case.workload.arrivals.trace
    assert trace is not None
    concurrency = 1 + seed * 3
    run = simulate_cluster(
        given_case.workload, given_case.cluster, router=router, duration_s=given_case.duration_s,
        concurrency=concurrency,
    )  # fmt: skip
    n = len(run.raw.requests)
    assert n == len(trace) or n >= concurrency
    assert run.raw.requests.adapter.tolist() == trace.adapter[:n].tolist()
    assert set(_open(run).tolist()) <= {min(concurrency, n)}
    if n < len(trace):
        assert n - run.completed == concurrency
    assert run.completed == sum(server.completed for server in run.servers)


def test_a_closed_loop_ends_with_the_last_request_of_a_trace() -> None:
    """A client that has sent a whole trace is done: the throughput is not spread over the time that is left."""
    profile, trace = _server("0.8.5"), draw_requests(FLEET, 20.0, 0)
    fleet = FLEET.replaying(trace)
    one = simulate(fleet, profile, max_loras=4, max_lora_rank=16, duration_s=1000.0, concurrency=20)
    cluster = Cluster.of(profile, 1, max_loras=4, max_lora_rank=16)
    run = simulate_cluster(fleet, cluster, duration_s=1000.0, concurrency=20)
    assert one.completed == run.completed == len(trace)
    assert one.duration_s == run.duration_s == one.raw.finish_s.max() < 100.0
    assert one.raw.finish_s.tolist() == run.raw.finish_s.tolist()
    assert one.busy_share > 0.9
    short = simulate(fleet, profile, max_loras=4, max_lora_rank=16, duration_s=2.0, concurrency=20)
    assert short.duration_s == 2.0


@pytest.mark.parametrize("version", ["0.8.5", "0.32.0"])
@pytest.mark.parametrize("concurrency", [1, 12])
def test_a_paced_cluster_of_one_is_the_server(version: str, concurrency: int) -> None:
    """Requests that wait at the client for a place are sent, end and are left when they are in `simulate`."""
    profile, how = _server(version), {"duration_s": 60.0, "concurrency": concurrency, "paced": True}
    one = simulate(FLEET, profile, max_loras=4, max_lora_rank=16, **how)
    run = simulate_cluster(FLEET, Cluster.of(profile, 1, max_loras=4, max_lora_rank=16), **how)
    n = len(one.raw.requests)
    assert run.raw.requests.time_s[:n].tolist() == one.raw.requests.time_s.tolist()
    np.testing.assert_array_equal(run.raw.finish_s[:n], one.raw.finish_s)
    counts = [(each.sent, each.refused, each.held_back, each.completed) for each in (run, one)]
    assert counts[0] == counts[1]
    assert (run.servers[0].refused, run.servers[0].held_back) == (0, 0)
    assert run.served_share == pytest.approx(one.served_share)
    assert (run.slo_attainment, run.per_adapter["slo_attainment"].to_list()) == (
        one.slo_attainment, one.per_adapter["slo_attainment"].to_list(),
    )  # fmt: skip
    assert not run.closed_loop


@pytest.mark.parametrize("router", ["most-idle", "round-robin", "hrw"])
@pytest.mark.parametrize("seed", range(4))
def test_paced_requests_wait_for_a_place_and_no_longer(case: Callable[..., Any], router: str, seed: int) -> None:
    """Each is sent at its own time or, later, when the client sees another end: the C-th last one to be open."""
    given_case, concurrency = case(seed), 1 + 2 * seed
    trace = given_case.workload.arrivals.trace
    assert trace is not None
    run = simulate_cluster(
        given_case.workload, given_case.cluster, router=router, duration_s=given_case.duration_s,
        concurrency=concurrency, paced=True,
    )  # fmt: skip
    sent, ends = run.raw.requests.time_s, np.sort(run.raw.finish_s[~np.isnan(run.raw.finish_s)])
    assert run.refused == 0
    left = len(sent) - int(run.held_back)
    for i, (own, at) in enumerate(zip(trace.time_s[:left].tolist(), sent[:left].tolist(), strict=True)):
        place = 0.0 if i < concurrency else float(ends[i - concurrency])
        assert at == max(own, place)
    assert left == len(sent) or left - run.completed == concurrency
    assert bool((sent[left:] >= trace.time_s[left : len(sent)]).all())


@pytest.mark.parametrize("router", ["most-idle", "round-robin"])
def test_a_request_waits_for_no_scrape_that_began_after_its_place_was_free(router: str) -> None:
    """A scrape of /metrics holds back tokens that come out meanwhile, not the end that a client has seen before."""
    known = _server("0.32.0")
    front = replace(known.frontend, scrape_interval_s=1.0, scrape_base_ms=400.0)
    profile = replace(known, frontend=front)
    one = simulate(FLEET, profile, max_loras=4, max_lora_rank=16, duration_s=60.0, concurrency=20, paced=True)
    cluster = Cluster.of(profile, 1, max_loras=4, max_lora_rank=16)
    run = simulate_cluster(FLEET, cluster, router=router, duration_s=60.0, concurrency=20, paced=True)
    assert run.raw.requests.time_s[: len(one.raw.first_s)].tolist() == one.raw.requests.time_s.tolist()
    np.testing.assert_array_equal(run.raw.finish_s[: len(one.raw.first_s)], one.raw.finish_s)


@pytest.mark.parametrize("client", [{"max_outstanding": 2}, {"concurrency": 2, "paced": True}])
def test_requests_that_get_no_server_count_as_cut(client: dict[str, Any]) -> None:
    """A server cuts requests to its longest; so counts the load of those that a client refuses or holds back."""
    known = _server("0.32.0")
    profile = replace(known, engine=replace(known.engine, max_model_len=300))
    run = simulate_cluster(FLEET, Cluster.of(profile, 1, max_loras=4), duration_s=20.0, **client)
    one = simulate(FLEET, profile, max_loras=4, duration_s=20.0, **client)
    drawn = draw_requests(FLEET, 20.0, 0)
    prompt = np.minimum(drawn.input_tokens, 299)
    assert run.sent_tokens == one.sent_tokens == (prompt + np.minimum(drawn.output_tokens, 300 - prompt)).sum()
    assert run.served_share == one.served_share


def test_the_load_follows_the_number_of_open_requests() -> None:
    """More open requests never serve less, and the servers share them."""
    cluster = Cluster.of(_server("0.32.0"), 3, max_loras=4, max_lora_rank=16)
    served = []
    for concurrency in (3, 24, 96):
        run = simulate_cluster(FLEET, cluster, router="most-idle", duration_s=60.0, concurrency=concurrency)
        served.append(run.total_token_throughput)
        counts = [server.sent for server in run.servers]
        assert max(counts) <= 1.4 * min(counts)
    assert served == sorted(served)


def test_what_has_no_closed_loop_is_refused() -> None:
    """Changes of servers and a network delay ends that only their server knows; they are named."""
    cluster = Cluster.of(_server("0.32.0"), 2, max_loras=4, max_lora_rank=16)
    with pytest.raises(IncompatibleError, match="without changes"):
        simulate_cluster(FLEET, cluster, concurrency=4, duration_s=10.0, changes=[Change(5.0, stop=(1,))])
    with pytest.raises(IncompatibleError, match="network_ms"):
        simulate_cluster(FLEET, replace(cluster, network_ms=1.0), concurrency=4, duration_s=10.0)
    with pytest.raises(IncompatibleError, match="max_outstanding"):
        simulate_cluster(FLEET, cluster, concurrency=4, max_outstanding=4, duration_s=10.0)


@pytest.mark.parametrize("paced", [False, True])
def test_a_client_that_waits_is_not_refused(paced: bool) -> None:
    """A full server would take the client's places one by one, so such a run is refused; one without is not."""
    profile = _server("0.32.0")
    limited = replace(profile, engine=replace(profile.engine, max_num_queued_reqs=3))
    cluster = Cluster.of(limited, 2, max_loras=4, max_lora_rank=16)
    how = {"router": "most-idle", "duration_s": 10.0, "paced": paced}
    assert simulate_cluster(FLEET, cluster, concurrency=6, **how).refused == 0  # type: ignore[arg-type]
    with pytest.raises(IncompatibleError, match="max_num_queued_reqs requests, got 12"):
        simulate_cluster(FLEET, cluster, concurrency=12, **how)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.one_of(st.none(), st.floats(0.0, 100.0)), max_size=40))
def test_places_are_taken_in_order_of_time(concurrency: int, steps: list[float | None]) -> None:
    """The ring of free places is a heap of their times: None takes the first one, a time gives one back."""
    client, oracle = new_client(concurrency, 1, np.zeros(0)), [0.0] * concurrency
    for step in steps:
        if step is None and oracle:
            assert first_free_s(client) == heapq.heappop(oracle)
            take_place(client)
        elif step is not None and len(oracle) < concurrency:
            heapq.heappush(oracle, step)
            free_place(client, step)
        assert first_free_s(client) == (oracle[0] if oracle else np.inf)
