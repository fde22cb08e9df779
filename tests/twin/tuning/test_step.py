"""Training on a simulated server is that of the slow reference, request by request and sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_tuning import Job, NaiveTuning
from naive_twin import Server as NaiveServer

from packer.adapter import Adapter
from packer.errors import ValidationError
from packer.job import FineTuning
from packer.lengths import Lengths
from packer.profile import LatencySpec, Profile
from packer.twin.arrivals import draw_marks, draw_times
from packer.twin.engine import state as engine
from packer.twin.engine.advance import advance
from packer.twin.law.law import law_of
from packer.twin.run import Run
from packer.twin.server import Server, fill_inbox
from packer.twin.simulate import simulate
from packer.twin.tuning.policies.temporal import Temporal
from packer.twin.tuning.policy import load_policy, new_tuning
from packer.workload import Workload

# Multiples of powers of two: sums are exact in any order.
LAW = {"base_ms": 8.0, "per_decode_ms": 0.25, "per_prefill_token_ms": 0.0625, "prefill_step_ms": 1.0}
POLICIES = (
    "llmstation:slo_decode_ms=24,kappa_decode=0.5,kappa_tuning=0.25,suspend_overhead=0",
    "llmstation:slo_decode_ms=13,kappa_decode=0,kappa_tuning=0,suspend_overhead=0.25,defer_ms=31.25",
    "temporal:defer_ms=0",
    "temporal:defer_ms=250",
    "spatial:share=0.5",
    "spatial:share=0.25,interference_decode=2,interference_tuning=0.5",
    "chunked:chunk_tokens=48,slo_decode_ms=30",
    "chunked:chunk_tokens=200,slo_decode_ms=15",
)
DURATION_S = 30.0


@pytest.fixture(scope="module")
def profile(make_profile: Callable[..., Profile]) -> Profile:
    """A server with a small KV cache: requests are preempted."""
    plain = make_profile(
        latency=LatencySpec("linear", LAW), kv_budget_bytes=1200.0, max_num_seqs=8, max_num_batched_tokens=128
    )
    return replace(plain, model=replace(plain.model, lora_bytes_per_rank=0.0))


def _fleet(rate: float) -> Workload:
    return Workload([Adapter(f"a{i}", 8, rate / 3) for i in range(3)], Lengths.gamma(60, 0.8), Lengths.gamma(30, 1.0))


def _naive(workload: Workload, profile: Profile, sim: Run, job: FineTuning, seed: int) -> NaiveTuning:
    server = NaiveServer(
        ranks=[8] * 3, adapter_blocks=[0] * 3, coefficients=LAW, form="linear", graph_max=10**6,
        host_ms=(0.0, 0.0), disk_ms=(0.0, 0.0), cold_start=False, slots=2, slot_rank=8,
        kv_blocks=sim.kv_cache_tokens // 16, block_size=16, token_budget=128, max_seqs=8,
        max_outstanding=math.inf, max_cpu_loras=math.inf,
        hashes=engine.adapters_of(workload.ranks, workload.ranks, seed)[0]["hash"][1:].tolist(),
        prefills_first=False, series_of_lists=False, spares_batch=False, scrape_interval_s=None, front_end_s=(0.0,) * 6,
    )  # fmt: skip
    time_s, adapter = draw_times(workload, DURATION_S, seed)
    marks = draw_marks(workload, adapter, len(time_s), seed)
    longest = sim.kv_cache_tokens // 16 * 16
    requests = []
    for owner, prompt, output in zip(marks.adapter, marks.input_tokens, marks.output_tokens, strict=True):
        prompt = min(int(prompt), longest - 1)
        requests.append((int(owner), prompt, min(int(output), longest - prompt)))
    policy = load_policy(job.policy)
    given_lengths = new_tuning(job, profile, seed).lengths.tolist()
    training = Job(
        policy.name, vars(policy), given_lengths, job.batch, job.samples or math.inf, job.layers,
        weights_ms=9.0, token_ms=0.0625, backward_ratio=job.backward_ratio,
    )  # fmt: skip
    return NaiveTuning(server, DURATION_S, 10.0, training).run(time_s.tolist(), requests, marks_wait=adapter is None)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(POLICIES),
    rate=st.sampled_from([0.05, 0.5, 2.0, 6.0]),
    batch=st.integers(1, 3),
    ratio=st.sampled_from([1.0, 2.0]),
    samples=st.sampled_from([None, 5, 40]),
    lengths=st.sampled_from([Lengths.constant(128), Lengths.gamma(100, 0.5)]),
    seed=st.integers(0, 10_000),
)
def test_as_the_slow_reference(
    profile: Profile, policy: str, rate: float, batch: int, ratio: float, samples: int | None,
    lengths: Lengths, seed: int,
) -> None:  # fmt: skip
    """Times of all requests and the work done are those of the reference."""
    job = FineTuning(samples, lengths, rank=8, batch=batch, backward_ratio=ratio, layers=8, policy=policy)
    workload = replace(_fleet(rate), fine_tuning=job)
    sim = simulate(workload, profile, max_loras=2, duration_s=DURATION_S, seed=seed)
    assert sim.raw.tuning is not None
    naive = _naive(workload, profile, sim, job, seed)
    same = {"rtol": 1e-9, "equal_nan": True}
    np.testing.assert_allclose(sim.raw.first_s, [r.first_s for r in naive.accepted], **same)
    np.testing.assert_allclose(sim.raw.finish_s, [r.finish_s for r in naive.accepted], **same)
    assert sim.raw.tuning["done"] == naive.job.done
    assert sim.raw.tuning["tokens_done"] == naive.job.tokens_done
    assert sim.raw.tuning["beside"] == naive.job.steps_beside


@pytest.mark.parametrize("policy", POLICIES)
def test_without_samples_nothing_changes(profile: Profile, policy: str) -> None:
    """A job of 0 samples gives the same bytes as no job."""
    plain = simulate(_fleet(2.0), profile, max_loras=2, duration_s=DURATION_S)
    none = replace(_fleet(2.0), fine_tuning=FineTuning(0, policy=policy))
    beside = simulate(none, profile, max_loras=2, duration_s=DURATION_S)
    assert plain.raw.finish_s.tobytes() == beside.raw.finish_s.tobytes()
    assert plain.raw.timeline.tobytes() == beside.raw.timeline.tobytes()


@pytest.mark.parametrize(
    ("given", "says"), [({"rule": 99}, "rule .*got 99"), ({"defer_s": math.nan}, "defer_s .*got nan")]
)
def test_a_policy_that_the_kernel_does_not_know_is_named(
    profile: Profile, given: dict[str, float], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule without a branch, or a time that is no number, would divide by 0 or never end."""
    for name, value in given.items():
        made = value if name == "rule" else lambda _self, n=name, v=value: {n: v}
        monkeypatch.setattr(Temporal, "rule" if name == "rule" else "parameters", made)
    with pytest.raises(ValidationError, match=says):
        new_tuning(FineTuning(policy="temporal"), profile, 0)


@pytest.mark.parametrize("policy", ["llmstation", "temporal", "spatial", "chunked"])
def test_the_last_batch_has_the_samples_that_are_left(profile: Profile, policy: str) -> None:
    """No server trains more samples than the job has."""
    job = FineTuning(5, Lengths.constant(100.0), batch=2, policy=policy)
    silent = Workload([Adapter("a", 8, 1e-9)], fine_tuning=job)
    trained = simulate(silent, profile, max_loras=1, duration_s=60.0).tuning
    assert trained is not None
    assert (trained.samples, trained.tok_s * 60.0) == (5, pytest.approx(500.0))


@pytest.mark.parametrize(
    ("policy", "pace"),
    [
        ("llmstation:suspend_overhead=0", 1.0),
        ("temporal", 1.0),
        ("chunked:chunk_tokens=128", 1.0),
        ("spatial:share=0.4", 0.4),
    ],
)
def test_without_requests_it_trains_alone(profile: Profile, policy: str, pace: float) -> None:
    """Samples per second are 1 / (forward + backward), times the share of the GPU."""
    job = FineTuning(sample_tokens=Lengths.constant(128), backward_ratio=1.5, policy=policy)
    silent = Workload([Adapter("a", 8, 1e-9)], fine_tuning=job)
    sim = simulate(silent, profile, max_loras=1, duration_s=1000.0)
    assert sim.tuning is not None
    step_s = (9.0 + 128 * 0.0625) * 2.5e-3
    assert sim.tuning.samples == pytest.approx(1000.0 * pace / step_s, abs=1.0)


@pytest.mark.parametrize("cut_s", [0.37, 5.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_how_a_run_is_cut_changes_nothing(profile: Profile, policy: str, cut_s: float) -> None:
    """The engine may be stopped at any time, also in the middle of training."""
    job = FineTuning(sample_tokens=Lengths.constant(128), policy=policy)
    server = Server(replace(_fleet(0.7), fine_tuning=job), profile, profile.settings(2, 8), 1200, None)
    time_s, _ = draw_times(server.workload, DURATION_S, 1)
    marks = draw_marks(server.workload, None, len(time_s), 1)
    found = []
    for pieces in ([DURATION_S], [*np.arange(cut_s, DURATION_S, cut_s), DURATION_S]):
        state = server.state(marks, DURATION_S, 10.0, 1)
        tuning = server.tuning(1)
        assert tuning is not None
        fill_inbox(state, time_s)
        for until_s in pieces:
            advance(state, law_of(profile), float(until_s), None, None, tuning)
        found.append((state.requests.tobytes(), state.timeline.tobytes(), tuning.job.tobytes()))
    assert found[0] == found[1]


def test_a_decode_step_keeps_its_limit(profile: Profile) -> None:
    """No gap between tokens is longer than the limit, as long as no step with a prefill comes between."""
    job = FineTuning(sample_tokens=Lengths.constant(128), policy="llmstation:slo_decode_ms=16")
    long = Workload([Adapter("a", 8, 0.2)], Lengths.constant(16), Lengths.constant(60), fine_tuning=job)
    sim = simulate(long, profile, max_loras=1, duration_s=600.0)
    assert sim.median_itl_ms <= 16.0 * 1.01
    assert sim.tuning is not None
    assert sim.tuning.beside_share > 0.5


def test_more_time_for_decode_steps_trains_more(profile: Profile) -> None:
    """Training grows with the limit of the decode step, as eq. (1) does."""
    found = []
    for slo_ms in (10.0, 12.0, 16.0, 24.0):
        job = FineTuning(sample_tokens=Lengths.constant(128), policy=f"llmstation:slo_decode_ms={slo_ms}")
        busy = replace(_fleet(2.0), fine_tuning=job)
        sim = simulate(busy, profile, max_loras=2, duration_s=600.0)
        found.append(sim.tuning_tok_s)
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_a_forward_pass_reads_all_experts_and_computes_beyond_the_ridge(make_profile: Callable[..., Profile]) -> None:
    """On an estimate, whose step law is not linear in tokens, the forward pass of a batch takes the time of a prefill
    of as many tokens."""
    terms = {"base_ms": 5.0, "per_prefill_token_ms": 0.02, "per_token_beyond_ridge_ms": 0.04, "experts_ms": 25.0}
    law = LatencySpec("linear", terms, ridge_tokens=256.0, expert_share=1 / 32)
    training = new_tuning(FineTuning(batch=4), make_profile(latency=law), 0)[0]
    expected_ms = 5.0 + 0.02 * 2048 + 0.04 * (2048 - 256) + 25.0
    assert training["weights_ms"] + 2048 * training["token_ms"] == pytest.approx(expected_ms)
