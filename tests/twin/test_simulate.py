"""What a simulation must keep whatever the server, and cases that are easily computed by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster
from packer.errors import IncompatibleError, ValidationError
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import LatencySpec, LoadingSpec, Profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

MakeProfile = Callable[..., Profile]


def _trace(*requests: tuple[float, int, int, int], adapters: int = 2) -> Workload:
    """A workload that replays (time, adapter, input tokens, output tokens)."""
    times, owner, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    trace = RequestTrace(times.astype(float), owner, prompt, output)
    fleet = [Adapter(f"a{i}", 8, 1.0) for i in range(adapters)]
    return Workload(fleet, arrivals=Arrivals("trace", trace=trace))


def _fleet(n: int, rate: float, arrivals: Arrivals | None = None) -> Workload:
    lengths = Lengths.gamma(80, 1.0), Lengths.gamma(40, 1.0)
    return Workload([Adapter(f"a{i}", 8, rate) for i in range(n)], *lengths, -0.2, arrivals)


# ---- by hand


def test_one_request(make_profile: MakeProfile) -> None:
    """Alone, a request waits for the steps of its prompt, then a step for each further token."""
    law = LatencySpec("linear", {"base_ms": 8.0, "per_prefill_token_ms": 0.5, "per_decode_ms": 2.0})
    sim = simulate(_trace((1.0, 0, 40, 5)), make_profile(latency=law), max_loras=1, duration_s=10.0)
    assert (sim.sent, sim.completed, sim.engine_steps) == (1, 1, 5)
    assert sim.ttft_ms == pytest.approx([8 + 20])
    assert sim.tpot_ms == pytest.approx([8 + 2])
    assert sim.mean_itl_ms == pytest.approx(10.0)
    assert sim.total_token_throughput == pytest.approx(4.5)
    assert sim.offered_tok_s == pytest.approx(4.5)


def test_prompt_beyond_the_budget_is_cut(make_profile: MakeProfile) -> None:
    """A prompt of 700 tokens takes two steps of at most 512."""
    law = LatencySpec("linear", {"base_ms": 8.0, "per_prefill_token_ms": 0.5})
    sim = simulate(_trace((1.0, 0, 700, 2)), make_profile(latency=law), max_loras=1, duration_s=10.0)
    assert sim.ttft_ms == pytest.approx([2 * 8 + 350])
    assert sim.tpot_ms == pytest.approx([8.0])


def test_two_requests(make_profile: MakeProfile) -> None:
    """The second comes during the first one's prefill, joins the next step and slows one of its tokens."""
    law = LatencySpec("linear", {"base_ms": 8.0, "per_prefill_token_ms": 0.5, "per_decode_ms": 2.0})
    workload = _trace((1.0, 0, 40, 4), (1.01, 1, 20, 3))
    sim = simulate(workload, make_profile(latency=law), max_loras=2, duration_s=10.0)
    # steps end at 28 (prefill 1), 48 (decode 1 + prefill 2), 60 (two decodes), 72 (two decodes) ms after 1 s
    assert sim.ttft_ms == pytest.approx([28.0, 38.0])
    assert sim.tpot_ms == pytest.approx([(20 + 12 + 12) / 3, 12.0])
    assert sim.mean_itl_ms == pytest.approx((20 + 12 + 12 + 12 + 12) / 5)


def test_one_slot_serves_adapters_in_turn(make_profile: MakeProfile) -> None:
    """With one slot the second adapter's request waits for the first one's end, then for its load."""
    loading = LoadingSpec(host_base_ms=5.0, disk_base_ms=20.0, cold_start=True)
    workload = _trace((1.0, 0, 40, 4), (1.001, 1, 20, 3), (1.002, 0, 20, 2))
    sim = simulate(workload, make_profile(loading=loading), max_loras=1, duration_s=10.0)
    # adapter 0: load 25 ms, four steps of 10 ms (65 ms), the third request joins the second step and ends in
    # the third; adapter 1: load 25 ms and a step
    assert sim.ttft_ms == pytest.approx([35.0, 65 - 1 + 35, 45 - 2])
    assert (sim.adapter_loads, sim.disk_loads) == (2, 2)


def test_preempted_request_keeps_its_ttft(make_profile: MakeProfile) -> None:
    """When blocks run out the latest admitted request starts over, but its first token has been seen."""
    profile = make_profile(kv_budget_bytes=64.0)  # four blocks of 16 tokens
    sim = simulate(_trace((1.0, 0, 30, 20), (1.0, 0, 30, 4)), profile, max_loras=1, duration_s=10.0)
    # both prefill in the first step (two blocks each); at 33 tokens each needs a third block in the fourth
    # step
    assert sim.preemptions == 1
    assert sim.ttft_ms == pytest.approx([10.0, 10.0])
    # the first runs on to its end at 200 ms; the second has 3 tokens, starts over and ends a step later
    assert sim.raw.finish_s == pytest.approx([1.2, 1.21])


def test_full_client_refuses(make_profile: MakeProfile) -> None:
    """Beyond max_outstanding requests are refused: sent and unfinished, but never served."""
    workload = _trace((1.0, 0, 10, 5), (1.0, 1, 10, 5), (1.0, 0, 10, 5), (2.0, 1, 10, 5))
    sim = simulate(workload, make_profile(), max_loras=2, duration_s=10.0, max_outstanding=2)
    assert (sim.sent, sim.refused, sim.completed) == (4, 1, 3)
    assert sim.sent_tokens == 60
    assert sim.per_adapter["sent"].to_list() == [2, 2]
    assert sim.per_adapter["completed"].to_list() == [1, 2]
    assert sim.penalized_mean_ttft_ms == pytest.approx((3 * 10 + 10_000) / 4)


def test_closed_loop_keeps_its_requests_open(make_profile: MakeProfile) -> None:
    """With a concurrency of 2 a request is sent when another one finishes: the server is never short of work."""
    one = {"concurrency": 2, "max_loras": 2, "duration_s": 0.16}
    workload = _trace(*[(60.0 + k, k % 2, 10, 5) for k in range(9)])
    sim = simulate(workload, make_profile(), **one)
    assert sim.raw.requests.time_s == pytest.approx([0, 0, 0.05, 0.05, 0.1, 0.1, 0.15, 0.15])
    assert (sim.sent, sim.completed, sim.starved, sim.stable) == (8, 6, False, True)
    assert sim.offered_tok_s == pytest.approx(8 * 15 / 0.16)
    paced = simulate(workload, make_profile(), **{**one, "duration_s": 100.0}, paced=True)
    assert paced.raw.requests.time_s.tolist() == [60.0 + k for k in range(9)]
    at_once = _trace(*[(0.0, k % 2, 10, 5) for k in range(9)])
    late = simulate(at_once, make_profile(), **one, paced=True)
    assert late.raw.requests.time_s.tolist() == sim.raw.requests.time_s.tolist()
    assert (late.sent, late.refused, late.held_back, late.starved) == (9, 0, 1, True)


@pytest.mark.parametrize(("client", "refused", "held_back"), [
    ({"concurrency": 2, "paced": True}, 0, 3), ({"concurrency": 2}, 0, 0), ({"max_outstanding": 2}, 7, 0),
])  # fmt: skip
def test_requests_are_completed_refused_held_back_or_open(
    make_profile: MakeProfile, client: dict[str, Any], refused: int, held_back: int
) -> None:
    """What a paced client still holds back is nothing that anybody refused; both count as sent, once each."""
    workload = _trace(*[(0.0, k % 2, 10, 5) for k in range(9)])
    sim = simulate(workload, make_profile(), max_loras=2, duration_s=0.12, **client)
    assert (sim.refused, sim.held_back) == (refused, held_back)
    left = sim.raw.server.running + sim.raw.server.waiting
    assert sim.per_adapter["sent"].sum() == sim.sent == sim.completed + refused + held_back + left
    assert ("held_back" in sim.to_dict()) == bool(client.get("paced"))


def test_base_model_alone_has_lora_off(make_profile: MakeProfile) -> None:
    """A server of requests without an adapter has no slots, and costs what the base model costs."""
    law = LatencySpec("linear", {"base_ms": 8.0, "first_adapter_ms": 2.0, "per_slot_ms": 0.5, "per_rank_ms": 0.25})
    base, one = Workload([Adapter("base", 0, 1.0)]), _trace((1.0, 0, 40, 5), adapters=1)
    base = base.with_arrivals(one.arrivals)
    for slots in (0, 4):
        sim = simulate(base, make_profile(latency=law), max_loras=slots, duration_s=10.0)
        assert (sim.max_loras, sim.adapter_loads) == (0, 0)
        assert sim.tpot_ms == pytest.approx([8.0])
    both = replace(one, adapters=(*base.adapters, *_fleet(1, 1.0).adapters))
    for version, tpot_ms in (("0.8.5", 8 + 2 + 2 * 0.5), ("0.32.0", 8.0)):
        profile = make_profile(latency=law)
        profile = replace(profile, engine=replace(profile.engine, version=version))
        assert simulate(both, profile, max_loras=2, duration_s=10.0).tpot_ms == pytest.approx([tpot_ms])
    with pytest.raises(ValidationError, match="max_loras"):
        simulate(one, make_profile(), max_loras=0, duration_s=10.0)


def test_trace_is_sent_exactly(make_profile: MakeProfile) -> None:
    """A replay sends every request of the trace at its time, to its adapter, with its lengths."""
    rng = np.random.default_rng(0)
    rows_ = [
        (t, int(rng.integers(3)), int(rng.integers(1, 99)), int(rng.integers(1, 99)))
        for t in np.sort(rng.random(200)) * 60
    ]
    workload = _trace(*rows_, adapters=3)
    sim = simulate(workload, make_profile(), max_loras=3, duration_s=3600.0)
    trace = workload.arrivals.trace
    assert trace is not None
    assert sim.completed == 200
    for column in ("time_s", "adapter", "input_tokens", "output_tokens"):
        assert getattr(sim.raw.requests, column).tolist() == getattr(trace, column).tolist()


def test_requests_beyond_the_model_are_cut(make_profile: MakeProfile) -> None:
    """A request never grows beyond max_model_len, nor beyond the KV cache."""
    for profile in (make_profile(max_model_len=100), make_profile(kv_budget_bytes=111.0)):
        sim = simulate(_trace((0.0, 0, 5000, 9), (0.0, 0, 60, 5000)), profile, max_loras=1, duration_s=60.0)
        longest = 100 if profile.engine.max_model_len == 100 else 96
        assert sim.raw.requests.input_tokens.tolist() == [longest - 1, 60]
        assert sim.raw.requests.output_tokens.tolist() == [1, longest - 60]
        assert sim.completed == 2


# ---- whatever the server


@st.composite
def simulations(draw: st.DrawFn) -> tuple[Workload, dict[str, int], int, dict[str, float]]:
    """A workload of any kind on a server of any tightness."""
    kind = draw(st.sampled_from(["poisson", "lognormal", "unpredictable", "piecewise"]))
    factors = (0.5, 2.0) if kind == "piecewise" else ()
    arrivals = Arrivals(kind, cv=2.0, period_s=10.0, factors=factors)  # type: ignore[arg-type]
    workload = _fleet(draw(st.integers(1, 12)), draw(st.sampled_from([0.05, 0.5, 2.0])), arrivals)
    server = {
        "max_loras": draw(st.integers(1, 12)),
        "seed": draw(st.integers(0, 1000)),
        "max_outstanding": draw(st.sampled_from([5, 50, 10**6])),
    }
    seqs = draw(st.sampled_from([4, 32]))
    engine = {"max_num_seqs": seqs, "max_num_batched_tokens": draw(st.sampled_from([32, 256]))}
    return workload, server, draw(st.sampled_from([700, 3000])), engine


FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(simulations())
@FAST
def test_requests_are_conserved(
    make_profile: MakeProfile, case: tuple[Workload, dict[str, int], int, dict[str, float]]
) -> None:
    """What was sent was refused, completed, or is still running or waiting; blocks never exceed capacity."""
    workload, server, kv_tokens, engine = case
    law = LatencySpec("linear", {"base_ms": 15.0, "per_decode_ms": 0.5})
    profile = make_profile(kv_budget_bytes=float(kv_tokens), latency=law, **engine)
    sim = simulate(workload, profile, duration_s=40.0, timeline_bin_s=1.0, **server)
    totals, table = sim.raw.server, sim.timeline
    left = totals.running + totals.waiting
    assert sim.sent == sim.refused + sim.completed + left
    assert sim.per_adapter["sent"].sum() == sim.sent
    assert totals.peak_blocks <= kv_tokens // 16
    assert table["kv_usage"].max() <= 1 + 1e-9
    assert sim.max_running <= engine["max_num_seqs"]
    assert table["active_adapters"].max() <= min(server["max_loras"], len(workload)) + 1e-9
    assert left <= server["max_outstanding"]
    assert sim.total_token_throughput * sim.duration_s <= sim.sent_tokens * (1 + 1e-9) or sim.refused
    assert np.all(sim.ttft_ms >= 14.999)


@given(simulations())
@FAST
def test_each_adapter_is_served_in_order(
    make_profile: MakeProfile, case: tuple[Workload, dict[str, int], int, dict[str, float]]
) -> None:
    """Of one adapter, an earlier request never gets its first token after a later one."""
    workload, server, kv_tokens, engine = case
    sim = simulate(workload, make_profile(kv_budget_bytes=float(kv_tokens), **engine), duration_s=40.0, **server)
    first = np.where(np.isnan(sim.raw.first_s), math.inf, sim.raw.first_s)
    for adapter in range(len(workload)):
        mine = first[sim.raw.requests.adapter == adapter]
        assert np.all(mine[1:] >= mine[:-1])


@given(simulations())
@FAST
def test_same_seed_same_bytes(
    make_profile: MakeProfile, case: tuple[Workload, dict[str, int], int, dict[str, float]]
) -> None:
    """The same call gives the same bytes."""
    workload, server, kv_tokens, engine = case
    profile = make_profile(kv_budget_bytes=float(kv_tokens), **engine)
    one, two = (simulate(workload, profile, duration_s=20.0, **server) for _ in range(2))
    assert one.to_dict() == two.to_dict()
    assert one.raw.first_s.tobytes() == two.raw.first_s.tobytes()
    assert one.timeline.equals(two.timeline)
    assert one.per_adapter.equals(two.per_adapter)


@pytest.mark.parametrize("seed", range(4))
def test_more_slots_never_lose_requests(make_profile: MakeProfile, seed: int) -> None:
    """If slots cost nothing, more of them complete at least as many requests, but for single steps."""
    slow = make_profile(latency=LatencySpec("linear", {"base_ms": 40.0}))
    done = []
    for slots in (1, 2, 4, 8, 16):
        sim = simulate(_fleet(16, 0.5), slow, max_loras=slots, duration_s=300.0, seed=seed)
        done.append(sim.completed)
    assert all(more >= fewer - 3 for fewer, more in itertools.pairwise(done))
    assert done[0] < 0.85 * done[-1]


def test_light_server_completes_its_offered_load(make_profile: MakeProfile) -> None:
    """Where nothing queues, throughput is the offered load and nothing starves."""
    sim = simulate(_fleet(4, 0.5), make_profile(), max_loras=4, duration_s=2000.0)
    assert sim.total_token_throughput == pytest.approx(sim.offered_tok_s, rel=0.05)
    assert not sim.starved
    assert sim.mean_waiting < 0.1
    assert sim.offered_tok_s == pytest.approx(4 * 0.5 * 120)


def test_overloaded_server_starves(make_profile: MakeProfile) -> None:
    """At five times what a server can do it is starved, busy all the time, and its queue grows."""
    law = LatencySpec("linear", {"base_ms": 10.0, "per_decode_ms": 2.0, "per_prefill_token_ms": 1.0})
    sim = simulate(_fleet(8, 4.0), make_profile(latency=law), max_loras=8, duration_s=120.0)
    waiting = sim.timeline["waiting"].to_numpy()
    assert sim.starved
    assert sim.busy_share > 0.99
    assert waiting[-1] > 2 * waiting[3] > 10


@pytest.mark.parametrize("seed", range(3))
def test_bursts_queue_longer_than_poisson(make_profile: MakeProfile, seed: int) -> None:
    """On a server near its limit unpredictable arrivals wait longer than Poisson ones of the same rates."""
    law = LatencySpec("linear", {"base_ms": 10.0, "per_decode_ms": 1.0, "per_prefill_token_ms": 0.4})
    mean_ttft = {}
    for kind in ("poisson", "unpredictable"):
        arrivals = Arrivals(kind, cv=4.0, period_s=100.0, span=2.0)  # type: ignore[arg-type]
        sim = simulate(_fleet(6, 1.6, arrivals), make_profile(latency=law), max_loras=6, duration_s=1500.0, seed=seed)
        mean_ttft[kind] = sim.mean_ttft_ms
    assert mean_ttft["unpredictable"] > 1.5 * mean_ttft["poisson"]


def test_unified_memory_trades_adapters_for_blocks(make_profile: MakeProfile) -> None:
    """Adapters in the KV pool push requests out when it is full; reserved slots of no cost don't."""
    tight: dict[str, float] = {"kv_budget_bytes": 1200.0}
    reserved = simulate(_fleet(12, 0.6), make_profile(**tight), max_loras=12, duration_s=200.0)
    unified = make_profile(**tight, policy="unified")
    heavy = replace(unified, model=replace(unified.model, lora_bytes_per_rank=8.0))
    pooled = simulate(_fleet(12, 0.6), heavy, max_loras=12, duration_s=200.0)
    assert pooled.adapter_loads > 2 * reserved.adapter_loads
    assert pooled.mean_running < reserved.mean_running or pooled.mean_waiting > reserved.mean_waiting
    huge = replace(unified, model=replace(unified.model, lora_bytes_per_rank=150.0))
    nothing = simulate(_fleet(12, 0.6), huge, max_loras=12, duration_s=200.0)
    assert nothing.status == "memory_error"
    assert "largest adapter" in nothing.status_reason


# ---- ends and errors


def test_memory_error_serves_nothing(make_profile: MakeProfile) -> None:
    """A server that does not start is a result: starved, nothing sent, latencies NaN, no frames."""
    sim = simulate(_fleet(2, 1.0), make_profile(slot_bytes_per_rank=1e6), max_loras=2, duration_s=60.0)
    assert (sim.status, sim.starved, sim.sent, sim.completed) == ("memory_error", True, 0, 0)
    assert math.isnan(sim.mean_ttft_ms)
    assert math.isnan(sim.p99_itl_ms)
    assert sim.timeline.is_empty()
    assert sim.per_adapter["mean_ttft_ms"].to_list() == [None, None]
    assert sim.to_dict()["mean_tpot_ms"] is None


def test_empty_hour(make_profile: MakeProfile) -> None:
    """Without requests nothing is served, nothing fails and the timeline is flat."""
    sim = simulate(_fleet(1, 1e-9), make_profile(), max_loras=1, duration_s=60.0)
    assert (sim.status, sim.sent, sim.engine_steps, sim.busy_share) == ("ok", 0, 0, 0.0)
    assert sim.timeline["running"].sum() == 0.0
    assert sim.penalized_mean_ttft_ms == 0.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_loras": 0},
        {"max_loras": 2.5},
        {"max_lora_rank": 12},
        {"max_lora_rank": 1},
        {"duration_s": 0.0},
        {"duration_s": math.nan},
        {"seed": -1},
        {"max_outstanding": 0},
        {"concurrency": 0},
        {"concurrency": 1_000_001},
        {"timeline_bin_s": 1e-9},
    ],
)
def test_wrong_arguments_are_refused(make_profile: MakeProfile, wrong: dict[str, object]) -> None:
    """An argument out of its range is an error that names it."""
    arguments: dict[str, object] = {"max_loras": 2, "duration_s": 10.0} | wrong
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        simulate(_fleet(2, 1.0), make_profile(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"paced": True}, {"concurrency": 2, "max_outstanding": 2}])
def test_clients_that_exclude_each_other_are_refused(make_profile: MakeProfile, wrong: dict[str, int]) -> None:
    """A client either refuses or holds back, and only one that holds back has times of its own."""
    with pytest.raises(IncompatibleError, match=next(iter(wrong))):
        simulate(_fleet(2, 1.0), make_profile(), max_loras=2, duration_s=1.0, **wrong)  # type: ignore[arg-type]


def test_summary_names_are_those_of_the_benchmark(make_profile: MakeProfile) -> None:
    """The summary has the keys of `vllm bench serve`, so that existing tools read it."""
    sim: Run = simulate(_fleet(2, 1.0), make_profile(), max_loras=2, duration_s=60.0)
    summary = sim.to_dict()
    for key in ("completed", "duration", "request_throughput", "output_throughput", "total_token_throughput"):
        assert summary[key] > 0
    for metric in ("ttft", "tpot", "itl"):
        for statistic in ("mean", "median", "p99"):
            assert summary[f"{statistic}_{metric}_ms"] > 0


def test_what_reaches_the_client_after_the_end_is_not_completed() -> None:
    """A front end with seconds of work behind the engine's last steps: the client has not got their outputs."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.06) for i in range(256)])
    found = simulate(fleet, load_profile("h100-64gb/llama-3.1-8b-instruct"), max_loras=4, duration_s=20.0)
    late = found.raw.finish_s > 20.0
    assert late.any()
    assert not found.raw.finished[late].any()
    assert found.completed == (found.raw.finish_s <= 20.0).sum() > 0
    cluster = Cluster.of(found.profile, 1, max_loras=4, max_lora_rank=8)
    assert simulate_cluster(fleet, cluster, duration_s=20.0).completed == found.completed
