"""LightLLM's engine is S-LoRA's router loop: the oracle, the pool that is never exceeded, resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_law import drawn_law
from naive_lightllm import Job, NaiveLightLlm, Settings, peak

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster
from packer.engine_spec import EngineSpec
from packer.profile import GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System
from packer.twin.run import Run
from packer.workload import Workload

MODES = ("blocking", "prefetch", "async", "cpu-assist", "none")
ASSIST = "cpu-assist:cores=3,core_tokens=8,core_gflop_s=0.0002,sync_ms=0.5"
"""Cores that take 0.125 ms for a token and a unit of rank of 25 bytes."""
RULES = ("drop", "lru", "lfu", "none", "unlimited")


def _profile(rng: np.random.Generator) -> Profile:
    law = drawn_law(rng)
    return Profile(
        "tests/lightllm",
        ModelSpec("tight", 0.0, 100.0, 25.0),
        GpuSpec("tight", 1e9),
        EngineSpec("lightllm", "0", int(rng.integers(30, 90)), 64, 32),
        MemorySpec(float(rng.integers(60, 250)) * 100.0, 0.0, 0.0, 1, str(rng.choice(["unified", "reserved"]))),
        LatencySpec("linear", law, 16),
        LoadingSpec(int(rng.integers(0, 300)) / 16, int(rng.integers(0, 16)) / 16),
        calibrated=True,
    )


def _fleet(rng: np.random.Generator) -> Workload:
    m, n = int(rng.integers(2, 9)), int(rng.integers(20, 120))
    longest = int(rng.choice([6, 20, 30]))
    trace = RequestTrace(
        np.sort(rng.random(n)) * float(rng.choice([0.3, 1.0, 3.0])),
        rng.integers(m, size=n),
        rng.integers(1, longest, size=n),
        rng.integers(1, longest, size=n),
    )
    ranks = [int(rng.choice([8, 16, 32])) for _ in range(m)]
    return Workload(
        [Adapter(f"a{i}", rank, 1.0) for i, rank in enumerate(ranks)], arrivals=Arrivals("trace", trace=trace)
    )


def _case(seed: int, mode: str, rule: str) -> tuple[Workload, Cluster, System, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    options = {
        "max_wait_tokens": int(rng.choice([0, 1, 2, 5, 10])),
        "batch_max_tokens": int(rng.choice([40, 80])),
        "running_max_req_size": int(rng.choice([3, 8, 100])),
    }
    if rng.random() < 0.3:
        options["batch_num_adapters"] = int(rng.integers(1, 4))
    if rng.random() < 0.3:
        options["abort_after_s"] = 0.6
    text = ",".join(f"{key}={value}" for key, value in options.items())
    loading = ASSIST if mode == "cpu-assist" else mode
    system = System("test", "", "", "round-robin", engine=f"lightllm:{text}", cache=rule, loading=loading)
    fleet = _fleet(rng)
    return (fleet, Cluster.of(_profile(rng), 1, max_loras=int(rng.integers(1, 6)), max_lora_rank=32), system, options)


def _naive(run: Run, options: dict[str, Any], mode: str, rule: str) -> NaiveLightLlm:
    assert run.state is not None
    sim = run.servers[0]
    profile, ranks, state = sim.profile, sim.workload.ranks.tolist(), run.state
    c, reserved = profile.latency.coefficients, profile.memory.policy == "reserved"
    cells = [0] * len(ranks)
    if not reserved and rule != "unlimited":
        cells = [int(np.ceil(rank * profile.model.lora_bytes_per_rank / 100.0)) for rank in ranks]
    free = mode == "none" or rule == "unlimited"

    def law(decodes: int, prompt: int, of: list[int], adapters: list[int], context: int) -> float:
        return (
            c["base_ms"]
            + c["per_decode_ms"] * decodes
            + c["per_prefill_token_ms"] * prompt
            + c["per_adapter_ms"] * len(set(adapters))
            + c["per_kv_token_ms"] * context
            + c["per_request_rank_ms"] * sum(of)
            + c["per_padded_rank_ms"] * len(of) * max(of)
        )

    loading = run.cluster.kinds[0].profile.loading
    settings = Settings(
        cells=int(state.servers[0].kv_blocks),
        adapter_cells=cells,
        ranks=ranks,
        law=law,
        load_ms=lambda a: 0.0 if free else loading.host_base_ms + loading.host_per_rank_ms * ranks[a],
        loading="blocking" if mode == "none" else mode,
        rule=rule,
        cores=3,
        core_tokens=8,
        token_rank_ms=0.125,
        sync_ms=0.5,
        max_wait_tokens=options["max_wait_tokens"],
        batch_max_tokens=options["batch_max_tokens"],
        running_max_req_size=options["running_max_req_size"],
        batch_num_adapters=options.get("batch_num_adapters", np.inf),
        abort_after_s=options.get("abort_after_s", np.inf),
        slots=sim.settings.max_loras if reserved and rule != "unlimited" else np.inf,
    )
    naive = NaiveLightLlm(settings, run.duration_s)
    if rule == "unlimited":
        naive.idle = list(range(len(ranks)))
    return naive


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_engine_is_the_oracle(mode: str, rule: str) -> None:
    """Times, loads and aborts are those of S-LoRA's loop in plain lists, for every loading mode and cache rule."""
    served = aborted = 0
    for seed in range(12):
        fleet, cluster, system, options = _case(seed, mode, rule)
        run = simulate_cluster(fleet, cluster, system, duration_s=4.0)
        if run.state is None:
            continue
        naive = _naive(run, options, mode, rule)
        table = run.requests.select("sent_s", "input_tokens", "output_tokens").rows()
        jobs = [Job(row[0], int(a), row[1], row[2]) for row, a in zip(table, run.state.adapter, strict=True)]
        naive.run(jobs)
        same = {"rtol": 1e-12, "atol": 0.0, "equal_nan": True}
        np.testing.assert_allclose(run.raw.first_s, [job.first_s for job in jobs], **same)
        np.testing.assert_allclose(run.raw.finish_s, [job.finish_s for job in jobs], **same)
        assert run.aborted == naive.aborted
        assert run.adapter_loads == naive.loads
        assert run.state.servers[0].unawaited == naive.unawaited
        assert run.state.servers[0].peak_blocks == naive.most_used <= run.state.servers[0].kv_blocks
        assert run.sent == run.completed + run.aborted + run.state.servers[0].running + run.state.servers[0].waiting
        served += run.completed
        aborted += run.aborted
    assert served > 300
    assert aborted > 5


JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 19)), min_size=1, max_size=8)


@given(JOBS)
@settings(deadline=None, max_examples=200)
def test_peak_is_the_most_that_the_batch_will_hold(jobs: list[tuple[int, int, int]]) -> None:
    """The oracle's formula against the future, step by step: nothing that is admitted ever needs more."""
    batch = [Job(0.0, 0, prompt, output, min(done, output - 1)) for prompt, output, done in jobs]
    expected = peak(batch)
    held = [(job.held, job.remaining) for job in batch]
    most = 0
    while held:
        most = max(most, sum(cells for cells, _ in held))
        held = [(cells + 1, left - 1) for cells, left in held if left > 0]
    assert most == expected


@pytest.mark.parametrize("mode", MODES)
def test_how_a_run_is_cut_changes_nothing(mode: str) -> None:
    """Behind a router that looks at the servers at every arrival a server does what it does when left alone."""
    for seed in range(12):
        fleet, cluster, system, _ = _case(seed, mode, "drop")
        two = Cluster.of(cluster.kinds[0].profile, 2, max_loras=3, max_lora_rank=32)
        run = simulate_cluster(fleet, two, system, "predicted", duration_s=4.0)
        if run.status != "ok":
            continue
        for sim in run.servers:
            one = Cluster.of(cluster.kinds[0].profile, 1, max_loras=3, max_lora_rank=32)
            alone = simulate_cluster(sim.workload, one, system, duration_s=4.0)
            np.testing.assert_array_equal(alone.raw.first_s, sim.raw.first_s)
            np.testing.assert_array_equal(alone.raw.finish_s, sim.raw.finish_s)
            np.testing.assert_array_equal(alone.raw.timeline, sim.raw.timeline)
