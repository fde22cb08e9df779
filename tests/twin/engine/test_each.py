"""Servers with priorities or drafts: what is kept is what was said, clusters and verdicts know it, others refuse it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from naive_prefix import accepted, uniform

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster
from packer.errors import IncompatibleError, PackerError, ValidationError
from packer.io.profiles import load_profile
from packer.predictors.api import evaluate_server
from packer.profile import LatencySpec, MemorySpec, Profile
from packer.speculation import SpeculationSpec
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.drafts import chance_of
from packer.twin.override import with_engine
from packer.twin.simulate import simulate
from packer.twin.verdict import verdict_of
from packer.workload import Workload

BASE = with_engine(load_profile("h100-64gb/llama-3.1-8b-instruct"), vllm_version="0.32.0")
FLEET = Workload([Adapter(f"a{i}", 8, 0.4, priority=i % 3, shared_prefix_tokens=64 * (i % 2)) for i in range(12)])


def _server(text: str = "", **changes: object) -> Profile:
    spec = SpeculationSpec.parse(text) if text else None
    return replace(BASE, engine=replace(BASE.engine, speculation=spec, **changes))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_as_many_drafts_are_kept_as_the_share_says(share: float, drafts: int) -> None:
    """Over many requests and places in their outputs, within four standard errors."""
    chance, n = chance_of(share, drafts), 20_000
    kept = [accepted(chance, r, 3 * r % 400, drafts) for r in range(n)]
    assert np.mean(kept) / drafts == pytest.approx(share, abs=4 * 0.5 / np.sqrt(n) + 1e-9)


def test_what_requests_say_is_uniform_and_unrelated() -> None:
    """Numbers of neighbouring requests and places fill (0, 1) evenly and do not follow each other."""
    table = np.array([[uniform(r, k) for k in range(60)] for r in range(300)])
    counts = np.histogram(table, bins=20, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 50  # chi-squared with 19 degrees of freedom
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(
    "server",
    [
        _server(scheduling_policy="priority"),
        _server("eagle3:num_speculative_tokens=3,acceptance=0.6,draft_pass_ms=0.5", async_scheduling=False),
        _server("draft_model:num_speculative_tokens=2,acceptance=0.4", scheduling_policy="priority"),
    ],
)
def test_a_cluster_of_one_is_the_server(server: Profile) -> None:
    """Each first token and finish is the same, and so are drafts and hits."""
    alone = simulate(FLEET, server, max_loras=6, max_lora_rank=8, duration_s=120)
    cluster = Cluster.of(server, 1, max_loras=6, max_lora_rank=8)
    routed = simulate_cluster(FLEET, cluster, system="vllm", router="round-robin", duration_s=120)
    for key in ("first_s", "finish_s"):
        np.testing.assert_array_equal(alone.requests[key].to_numpy(), routed.requests[key].to_numpy())
    for key in ("draft_acceptance", "prefix_hit_rate", "preemptions"):
        np.testing.assert_equal(getattr(alone, key), getattr(routed, key))


def test_urgent_requests_wait_less() -> None:
    """With equal traffic and few seats, adapters of smaller priority have the shorter queue, as requests have."""
    fleet = Workload([Adapter(f"a{i}", 8, 2.0, priority=i) for i in range(3)])
    server = _server(scheduling_policy="priority", max_num_seqs=16)
    ttft = simulate(fleet, server, max_loras=3, duration_s=600).adapter_mean_ttft_ms
    assert ttft[0] < ttft[1] < ttft[2]
    n = 200
    times, zeros = np.zeros(n), np.zeros(n, dtype=np.int64)
    later = (np.arange(n) % 2).astype(np.int64)
    trace = RequestTrace(times, zeros, zeros + 100, zeros + 50, priority=later, end_s=1.0)
    one = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    first_s = simulate(one, server, max_loras=1, duration_s=600).requests["first_s"].to_numpy()
    assert np.median(first_s[later == 0]) < np.median(first_s[later == 1]) - 1.0


def test_a_verdict_says_where_drafts_do_not_pay() -> None:
    """A server that keeps few of its drafts is slower than without, and says so; one that keeps most is faster."""
    plain = simulate(FLEET, BASE, max_loras=12, duration_s=300)
    good = simulate(
        FLEET,
        _server("mtp:num_speculative_tokens=3,acceptance=0.7,draft_pass_ms=1"),
        max_loras=12,
        duration_s=300,
    )
    bad = simulate(
        FLEET,
        _server("mtp:num_speculative_tokens=3,acceptance=0.05,draft_pass_ms=3"),
        max_loras=12,
        duration_s=300,
    )
    assert good.mean_tpot_ms < plain.mean_tpot_ms < bad.mean_tpot_ms
    assert good.draft_acceptance == pytest.approx(0.7, abs=0.01)
    assert "slows" not in verdict_of(good).text
    assert "slows it down: 5% of the drafts are kept" in verdict_of(bad).text
    assert bad.draft_acceptance < bad.draft_acceptance_needed
    mixed = replace(FLEET, adapters=[replace(FLEET.adapters[0], acceptance=0.0), *FLEET.adapters[1:]])
    run = simulate(mixed, _server("mtp:num_speculative_tokens=3,acceptance=0.7,draft_pass_ms=1"), max_loras=12)
    assert "slows down 1 adapter of 12" in verdict_of(run).text


@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_pay_from_what_their_verification_takes(drafts: int) -> None:
    """One request: a step of 10 + 1 ms takes 1 ms more for each draft, which is worth 1 / 11 of a token."""
    server = _server(f"eagle3:num_speculative_tokens={drafts},acceptance=0.0,draft_pass_ms=0.0")
    law = LatencySpec("linear", {"base_ms": 10.0, "per_decode_ms": 1.0})
    one = RequestTrace(np.zeros(1), np.zeros(1, int), np.array([30]), np.array([40]))
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=one))
    sim = simulate(fleet, replace(server, latency=law), max_loras=1, max_lora_rank=8, duration_s=30)
    assert sim.draft_acceptance_needed == pytest.approx(1 / 11)


def test_what_is_not_simulated_is_refused_by_name() -> None:
    """Versions without the rules, servers that train, mixed clusters, trained predictors."""
    drafts = "mtp:num_speculative_tokens=2,acceptance=0.5"
    for server, word in (
        (_server(version="0.11.2", scheduling_policy="priority"), "scheduling_policy"),
        (_server(drafts, version="0.28.0"), "speculative decoding"),
    ):
        with pytest.raises(ValidationError, match=word):
            simulate(FLEET, server, max_loras=4, duration_s=10)
    both = Cluster.of(BASE, 1, max_loras=4, max_lora_rank=8)
    server = _server(scheduling_policy="priority")
    with pytest.raises(ValidationError, match="scheduling_policy"):
        simulate(FLEET, server, max_loras=4, duration_s=10, tuning="chunked")
    mixed = replace(
        both,
        kinds=(*both.kinds, replace(both.kinds[0], name="other", profile=server)),
        servers=(*both.servers, "other"),
    )
    with pytest.raises(IncompatibleError, match="all servers of a cluster or on none"):
        simulate_cluster(FLEET, mixed, duration_s=10)
    for name in ("boosting", "forest", "tree"):
        with pytest.raises(PackerError):
            evaluate_server(FLEET, server, max_loras=4, max_lora_rank=8, predictor=name)


def test_a_request_that_fills_the_cache_has_room_for_its_drafts() -> None:
    """A KV cache of fewer tokens than `max_model_len` bounds requests and their drafts as that bounds them."""
    spec = SpeculationSpec.parse("draft_model:num_speculative_tokens=4,acceptance=0.9")
    small = MemorySpec(110 * BASE.model.kv_bytes_per_token, 0.0, 0.0, 1)
    engine = replace(BASE.engine, speculation=spec, block_size=2, max_model_len=242)
    trace = RequestTrace(np.zeros(1), np.zeros(1), np.full(1, 3), np.full(1, 118))
    fleet = Workload([Adapter("a", 8, 1.0)]).replaying(trace)
    runs = [
        simulate(fleet, replace(BASE, memory=small, engine=each), max_loras=1, duration_s=20.0)
        for each in (engine, replace(engine, max_model_len=110))
    ]
    assert runs[0].preemptions == 0
    assert runs[0].requests["finish_s"].to_list() == runs[1].requests["finish_s"].to_list()
    assert runs[0].raw.requests.output_tokens.tolist() == [107]
