"""dLoRA's engine is its artifact's scheduler: the oracle, resuming; its migration program by enumeration."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from naive_dlora import Job, NaiveDLora, Settings
from naive_law import drawn_law

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster
from packer.engine_spec import EngineSpec
from packer.errors import IncompatibleError
from packer.lengths import Lengths
from packer.papers.routers.migration import MOVE_S, Task, balance, engines_to_balance
from packer.profile import GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System
from packer.twin.run import Run
from packer.workload import Workload

OPTIONS: dict[str, tuple[Any, ...]] = {
    "policy": ("credit", "credit", "credit", "fcfs", "merge"),
    "max_num_seqs": (2, 4, 9),
    "max_num_batched_tokens": (40, 100),
    "credits": (0.05, 0.5, 10_000.0),
    "switch_ms": (0.0, 2.5),
}


def _profile(rng: np.random.Generator) -> Profile:
    law = drawn_law(rng, "per_waiting_ms", "per_slot_ms")
    return Profile(
        "tests/dlora",
        ModelSpec("tight", 0.0, 100.0, 25.0),
        GpuSpec("tight", 1e9),
        EngineSpec("0.9.0", "0", 64, 64, 32, block_size=4),
        MemorySpec(float(rng.integers(150, 500)) * 100.0, 0.0, 0.0, 1, "reserved"),
        LatencySpec("linear", law, 16),
        LoadingSpec(int(rng.integers(0, 300)) / 16, int(rng.integers(0, 16)) / 16),
        calibrated=True,
    )


def _fleet(rng: np.random.Generator) -> Workload:
    m, n = int(rng.integers(2, 8)), int(rng.integers(20, 120))
    longest = int(rng.choice([6, 20, 30]))
    popular = rng.dirichlet(np.full(m, float(rng.choice([0.3, 2.0]))))
    trace = RequestTrace(
        np.sort(rng.random(n)) * float(rng.choice([0.3, 1.0, 3.0])),
        rng.choice(m, size=n, p=popular),
        rng.integers(1, longest, size=n),
        rng.integers(1, longest, size=n),
    )
    ranks = [int(rng.choice([8, 16, 32])) for _ in range(m)]
    return Workload(
        [Adapter(f"a{i}", rank, 1.0) for i, rank in enumerate(ranks)], arrivals=Arrivals("trace", trace=trace)
    )


def _case(seed: int) -> tuple[Workload, Cluster, System, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    options = {name: values[int(rng.integers(len(values)))] for name, values in OPTIONS.items()}
    text = ",".join(f"{key}={value}" for key, value in options.items())
    system = System("test", "", "", "round-robin", engine=f"dlora:{text},link_gb_s=0.0005")
    fleet, profile = _fleet(rng), _profile(rng)
    return fleet, Cluster.of(profile, 1, max_loras=int(rng.integers(1, 5)), max_lora_rank=32), system, options


def _naive(run: Run, options: dict[str, Any]) -> NaiveDLora:
    sim = run.servers[0]
    profile, ranks = sim.profile, sim.workload.ranks.tolist()
    c, loading = profile.latency.coefficients, run.cluster.kinds[0].profile.loading

    def law(decodes: int, prompt: int, of: list[int], context: int, waiting: int, merged: bool) -> float:
        base = c["base_ms"] + c["per_decode_ms"] * decodes + c["per_prefill_token_ms"] * prompt
        base += c["per_kv_token_ms"] * context + c["per_waiting_ms"] * waiting
        if merged:
            return base
        own = [ranks[a] for a in of]
        return (
            base
            + c["per_adapter_ms"] * len(set(of))
            + c["per_slot_ms"] * sim.settings.max_loras
            + c["per_request_rank_ms"] * sum(own)
            + c["per_padded_rank_ms"] * len(own) * max(own)
        )

    assert run.state is not None
    return NaiveDLora(
        Settings(
            blocks=int(run.state.servers[0].kv_blocks),
            block_size=4,
            models=len(ranks),
            gpu_capacity=sim.settings.max_loras,
            merge_ms=15.0,
            unmerge_ms=27.0,
            swap_ms=1e3 * 400.0 / (0.0005 * 2**30),
            law=law,
            load_ms=lambda a: loading.host_base_ms + loading.host_per_rank_ms * ranks[a],
            **options,
        ),
        run.duration_s,
    )


def test_engine_is_the_oracle() -> None:
    """Times, loads and swaps are those of the artifact's scheduler in plain lists; credits and merges do occur."""
    merges = swaps = credited = served = 0
    for seed in range(75):
        fleet, cluster, system, options = _case(seed)
        run = simulate_cluster(fleet, cluster, system, duration_s=4.0)
        if run.state is None:
            continue
        table = run.requests.select("sent_s", "input_tokens", "output_tokens").rows()
        rows = enumerate(zip(table, run.state.adapter, strict=True))
        jobs = [Job(i, row[0], int(a), row[1], row[2]) for i, (row, a) in rows]
        naive = _naive(run, options).run(jobs)
        same = {"rtol": 1e-12, "atol": 0.0, "equal_nan": True}
        np.testing.assert_allclose(run.raw.first_s, [job.first_s for job in jobs], **same)
        np.testing.assert_allclose(run.raw.finish_s, [job.finish_s for job in jobs], **same)
        assert run.adapter_loads == naive.loads
        assert run.preemptions == naive.swaps
        assert run.state.servers[0].peak_blocks <= run.state.servers[0].kv_blocks
        merges, swaps = merges + naive.merges, swaps + naive.swaps
        credited, served = credited + naive.credited, served + run.completed
    assert min(merges, swaps, credited) > 50
    assert served > 1000


def test_how_a_run_is_cut_changes_nothing() -> None:
    """Behind a router that looks at the servers at every arrival a server does what it does when left alone."""
    for seed in range(12):
        fleet, cluster, system, _ = _case(seed)
        two = Cluster.of(cluster.kinds[0].profile, 2, max_loras=3, max_lora_rank=32)
        run = simulate_cluster(fleet, two, system, "predicted", duration_s=4.0)
        if run.status != "ok":
            continue
        for sim in run.servers:
            one = Cluster.of(cluster.kinds[0].profile, 1, max_loras=3, max_lora_rank=32)
            alone = simulate_cluster(sim.workload, one, system, duration_s=4.0)
            np.testing.assert_array_equal(alone.raw.finish_s, sim.raw.finish_s)
            np.testing.assert_array_equal(alone.raw.timeline, sim.raw.timeline)


def test_a_merged_adapter_costs_no_lora() -> None:
    """A fleet of one adapter is served as if it had rank 0, but for its load and one merge."""
    rng = np.random.default_rng(3)
    profile, trace = _profile(rng), _fleet(rng).arrivals.trace
    assert trace is not None
    one = RequestTrace(trace.time_s, np.zeros_like(trace.adapter), trace.input_tokens, trace.output_tokens)
    ends = []
    for rank in (8, 32):
        fleet = Workload([Adapter("only", rank, 1.0)], arrivals=Arrivals("trace", trace=one))
        cluster = Cluster.of(profile, 1, max_loras=1, max_lora_rank=32)
        system = System("test", "", "", "round-robin", engine="dlora", loading="none")
        ends.append(simulate_cluster(fleet, cluster, system, duration_s=4.0).raw.finish_s)
    np.testing.assert_array_equal(*ends)


def test_moved_requests_keep_their_tokens(fleet_of_two: tuple[Workload, Cluster]) -> None:
    """The reactive program takes requests off a server that has too many; each is served once, with all its tokens."""
    fleet, cluster = fleet_of_two
    dispatch, periodic = (
        simulate_cluster(
            fleet, cluster, System("t", "", "", f"dlora:mode={mode},batch=8", engine="dlora:max_num_seqs=8"),
            duration_s=60.0,
        )
        for mode in ("dispatch", "periodic")
    )  # fmt: skip
    assert dispatch.state is not None
    assert periodic.state is not None
    first, then = (run.state.server for run in (dispatch, periodic))
    assert set(first[dispatch.state.adapter == 0].tolist()) == {0}
    assert set(then[periodic.state.adapter == 0].tolist()) == {0, 1}
    assert periodic.completed > dispatch.completed
    assert int(periodic.state.servers["sent"].sum()) == periodic.sent
    finished = periodic.state.requests[periodic.raw.finished]
    np.testing.assert_array_equal(finished["generated"], finished["output"])
    assert (finished["first_s"] <= finished["finish_s"]).all()
    again = simulate_cluster(
        fleet, cluster, System("t", "", "", "dlora:mode=periodic,batch=8", engine="dlora:max_num_seqs=8"),
        duration_s=60.0,
    )  # fmt: skip
    np.testing.assert_array_equal(periodic.raw.finish_s, again.raw.finish_s)


@pytest.fixture
def fleet_of_two() -> tuple[Workload, Cluster]:
    """A busy adapter on one server, a quiet one on the other."""
    profile = _profile(np.random.default_rng(5))
    length = Lengths.constant(20)
    fleet = Workload([Adapter("busy", 8, 60.0, length, length), Adapter("quiet", 8, 0.2, length, length)])
    cluster = Cluster.of(profile, 2, max_loras=1, max_lora_rank=8)
    return fleet, Cluster(cluster.kinds, cluster.servers, ({"busy": 1.0}, {"quiet": 1.0}))


def test_vllm_gives_up_no_request(fleet_of_two: tuple[Workload, Cluster]) -> None:
    """The reactive program needs servers that requests can be taken from, and says so."""
    with pytest.raises(IncompatibleError, match="engine dlora"):
        simulate_cluster(*fleet_of_two, router="dlora:mode=periodic", duration_s=60.0)


@pytest.mark.parametrize("seed", range(6))
def test_the_program_is_the_best_of_all_assignments(seed: int) -> None:
    """No assignment of whole requests with the same adapters is faster by more than the longest request."""
    rng = np.random.default_rng(seed)
    requests = [(int(rng.integers(2)), int(rng.integers(3)), int(rng.integers(1, 5))) for _ in range(7)]
    service_s = {a: float(rng.uniform(1.0, 5.0)) for a in range(3)}
    task = Task(requests, (8, 8), (2, 2), service_s, 0.5)

    def time_s(chosen: tuple[int, ...]) -> float:
        worst = 0.0
        for e in range(2):
            own = [k for k, to in enumerate(chosen) if to == e]
            if len({requests[k][1] for k in own}) > task.places[e]:
                return float("inf")
            over = max(0.0, sum(requests[k][2] for k in own) - task.blocks[e]) * task.block_s
            moved = sum(requests[k][0] != e for k in own) * MOVE_S
            worst = max(worst, sum(service_s[requests[k][1]] for k in own) + moved + over)
        return worst

    chosen, held = balance(task)
    best = min(time_s(each) for each in itertools.product(range(2), repeat=7))
    longest = max(service_s.values()) + MOVE_S + 5 * task.block_s
    assert time_s(tuple(chosen)) <= best + longest
    assert all({requests[k][1] for k, to in enumerate(chosen) if to == e} <= held[e] for e in range(2))


def test_which_engines_are_balanced() -> None:
    """A full engine and the emptiest; else one with 16 requests more than the mean and the one with the fewest."""
    assert engines_to_balance([95, 10, 50], [100, 100, 100], [3, 3, 3]) == [0, 1]
    assert engines_to_balance([95, 92, 91], [100, 100, 100], [3, 3, 3]) == []
    assert engines_to_balance([10, 10, 10], [100, 100, 100], [0, 40, 5]) == [0, 1]
    assert engines_to_balance([10, 10, 10], [100, 100, 100], [10, 25, 10]) == []
