"""The engine can be stopped and resumed at any time, and be fed request by request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.lengths import Lengths
from packer.profile import LatencySpec, LoadingSpec, Profile
from packer.settings import Settings
from packer.twin.arrivals import Marks, draw_marks, draw_times
from packer.twin.engine import state as rows
from packer.twin.engine.advance import advance
from packer.twin.engine.arrive import offer
from packer.twin.engine.slots import largest_rank
from packer.twin.law.law import law_of
from packer.twin.server import Server, fill_inbox
from packer.workload import Workload

RUN_S = 20.0
BIG_FLEET = 40_000


@pytest.fixture(scope="module")
def server(make_profile: Callable[..., Profile]) -> Server:
    """Eight adapters in three slots, with too little KV cache and host memory: everything happens."""
    law = {"base_ms": 7.0, "per_decode_ms": 0.31, "per_prefill_token_ms": 0.013, "per_rank_ms": 0.07}
    profile = make_profile(
        latency=LatencySpec("linear", law | {"per_waiting_ms": 0.01}),
        loading=LoadingSpec(2.0, 0.1, 9.0, 0.2, cold_start=True),
        kv_budget_bytes=900.0,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_cpu_loras=5,
    )
    adapters = [Adapter(f"a{i}", 8 << i % 3, 0.6 + i) for i in range(8)]
    fleet = Workload(adapters, Lengths.gamma(40, 1.0), Lengths.gamma(20, 1.0))
    return Server(fleet, profile, Settings(3, 32), 900, None)


@pytest.fixture(scope="module")
def requests(server: Server) -> tuple[np.ndarray, Marks]:
    """Times and marks of what is sent in the run."""
    time_s, _ = draw_times(server.workload, RUN_S, 4)
    marks = draw_marks(server.workload, None, len(time_s), 4)
    longest = server.longest_request()
    prompt = np.minimum(marks.input_tokens, longest // 2)
    return time_s, Marks(marks.adapter, prompt, np.minimum(marks.output_tokens, longest // 2))


def _fresh(server: Server, requests: tuple[np.ndarray, Marks]) -> rows.ServerState:
    state = server.state(requests[1], RUN_S, 1.0, 0)
    # Rows are written when a request arrives: the rest is whatever memory held.
    state.links[: len(state.requests)] = 0
    return state


@pytest.fixture(scope="module")
def whole(server: Server, requests: tuple[np.ndarray, Marks]) -> rows.ServerState:
    """The state after one call that simulates everything."""
    state = _fresh(server, requests)
    fill_inbox(state, requests[0])
    advance(state, law_of(server.profile), RUN_S)
    preempted, disk = state.server.preemptions, state.server.disk_loads
    assert min(preempted, disk, state.server.waiting, np.sum(state.requests["status"] == rows.FINISHED)) > 5
    return state


def _assert_same(state: rows.ServerState, whole: rows.ServerState) -> None:
    """Every array of the two servers has the same bytes."""
    for name, mine, theirs in zip(rows.ServerState._fields, state, whole, strict=True):
        if name == "trees":
            continue  # none, or `requests`
        assert mine.tobytes() == theirs.tobytes(), name


@given(stops=st.lists(st.floats(0.0, RUN_S), max_size=40).map(sorted))
@settings(deadline=None, max_examples=40)
def test_stops_change_nothing(
    server: Server, requests: tuple[np.ndarray, Marks], whole: rows.ServerState, stops: list[float]
) -> None:
    """However a run is cut into calls, the bytes are those of one call."""
    state, law = _fresh(server, requests), law_of(server.profile)
    fill_inbox(state, requests[0])
    for stop in [*stops, RUN_S]:
        advance(state, law, stop)
    _assert_same(state, whole)


def test_requests_may_be_offered_one_by_one(
    server: Server, requests: tuple[np.ndarray, Marks], whole: rows.ServerState
) -> None:
    """Offering each request when it is sent gives the bytes of offering all at the start."""
    state, law = _fresh(server, requests), law_of(server.profile)
    for r, sent_s in enumerate(requests[0].tolist()):
        advance(state, law, sent_s)
        assert state.server.now_s <= sent_s
        state.requests[r].sent_s = sent_s
        offer(state, r)
    advance(state, law, RUN_S)
    _assert_same(state, whole)


def test_step_at_the_stop_waits_for_what_arrives_then(server: Server) -> None:
    """A step that would start exactly at the stop sees the requests that arrive at the stop."""
    marks = Marks(np.array([0, 1]), np.array([10, 10]), np.array([3, 3]))
    times = np.array([1.0, 1.0])
    together, apart = server.state(marks, RUN_S, 1.0, 0), server.state(marks, RUN_S, 1.0, 0)
    law = law_of(server.profile)
    fill_inbox(together, times)
    advance(together, law, RUN_S)
    for r in range(2):
        apart.requests[r].sent_s = 1.0
        offer(apart, r)
        advance(apart, law, 1.0)
        assert apart.server.sent == 0
    advance(apart, law, RUN_S)
    assert apart.requests.tolist() == together.requests.tolist()


def test_state_during_a_step_is_its_batch(server: Server, requests: tuple[np.ndarray, Marks]) -> None:
    """Between two stops a router reads the batch of the step in flight, and sums that fit it."""
    state, law = _fresh(server, requests), law_of(server.profile)
    fill_inbox(state, requests[0])
    in_flight = 0
    for stop in np.linspace(0.1, RUN_S - 0.1, 150):
        advance(state, law, float(stop))
        seen, adapters = state.server, state.adapters
        ranks = np.repeat(adapters["rank"], adapters["in_batch"])
        waiting = [r for r in range(seen.taken) if state.requests[r].status == rows.ACCEPTED and _waits(state, r)]
        assert seen.running == len(ranks)
        assert seen.request_ranks == ranks.sum()
        assert seen.active == (adapters["in_batch"] > 0).sum()
        assert largest_rank(seen, state.classes) == max(ranks, default=0)
        assert seen.waiting == len(waiting)
        outside = [*waiting, *range(seen.sent, len(requests[0]))]
        assert seen.waiting_prompt == state.requests["prompt"][outside].sum()
        assert seen.inbox_count + seen.sent == len(requests[0])
        if seen.in_flight:
            in_flight += 1
            assert seen.now_s <= stop < seen.end_s
    assert in_flight > 100


def _fifo(state: rows.ServerState, number: int) -> Iterator[int]:
    """Yield a waiting request, given by its number + 1, and those behind it."""
    while number > 0:
        yield number - 1
        number = int(state.requests["next"][number - 1])


def _waits(state: rows.ServerState, r: int) -> bool:
    """Whether request `r` is in the FIFO of its adapter."""
    return r in _fifo(state, int(state.adapters[state.requests[r].owner + 1].head))


def test_a_request_gets_one_further_key_while_it_waits(server: Server, requests: tuple[np.ndarray, Marks]) -> None:
    """A request that is passed over gets a key of its own, once; preemptions of others do not change it."""
    engine = replace(server.profile.engine, version="0.28.0", prefix_caching=False, async_scheduling=False)
    server = replace(server, profile=replace(server.profile, engine=engine))
    state, law = _fresh(server, requests), law_of(server.profile)
    fill_inbox(state, requests[0])
    keys: dict[int, set[int]] = {}
    passed = 0
    for stop in np.arange(0.0, RUN_S, 0.007):  # a step takes at least as long
        advance(state, law, float(stop))
        heads = state.adapters["head"][state.adapters["head"] > 0].tolist()
        waiting = [r for head in heads for r in _fifo(state, head)]
        keys = {r: keys.get(r, set()) | {int(state.requests[r].key)} for r in waiting}
        assert max(map(len, keys.values()), default=0) <= 2
        passed = max(passed, sum(len(found) == 2 for found in keys.values()))
    assert min(passed, state.server.preemptions) > 5


@pytest.mark.parametrize("places", [1, 3, 4])
def test_host_memory_is_never_exceeded(server: Server, requests: tuple[np.ndarray, Marks], places: int) -> None:
    """Host memory holds at most max_cpu_loras adapters, and never fewer than slots; the rest is on disk."""
    engine = replace(server.profile.engine, max_cpu_loras=places)
    state = _fresh(replace(server, profile=replace(server.profile, engine=engine)), requests)
    fill_inbox(state, requests[0])
    advance(state, law_of(server.profile), RUN_S)
    assert state.server.on_host_count == state.adapters["on_host"].sum() == max(places, 3)
    in_slots, on_host = state.adapters["resident"], state.adapters["on_host"]
    assert (in_slots <= on_host).all()
    assert state.server.disk_loads > 20


def test_servers_of_a_large_cluster_fit_into_memory() -> None:
    """64 servers of 40,000 adapters take less than 1 GB, without the requests."""
    adapters, classes = rows.adapters_of(np.full(BIG_FLEET, 8), np.zeros(BIG_FLEET, dtype=np.int64))
    settings = {"block_size": 16, "ring": 4098, "run_s": 3600.0, "bin_s": 10.0}
    state = rows.new_state(0, adapters, classes, settings)
    assert 64 * sum(array.nbytes for array in state if array is not None) < 1e9
    assert not any(adapters[name].any() for name in ("in_batch", "resident", "on_host", "head"))
