"""The compiled step loop against the slow reference, request by request."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_twin import NaiveTwin
from naive_twin import Server as NaiveServer

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.engine_spec import EngineSpec
from packer.lengths import Lengths
from packer.profile import FrontEndSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.terms import LINEAR_TERMS, PAPER_TERMS
from packer.twin.arrivals import draw_marks, draw_times
from packer.twin.engine import state as rows
from packer.twin.engine_rules import rules_of
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

# Coefficients are multiples of 1/1024 ms and what they multiply are whole numbers, so that sums are exact in
# any order and both simulators see the very same times.
GRAIN = 1024


def front_end_costs_ms(profile: Profile) -> tuple[float, ...]:
    """What the front end takes, in the order of the reference."""
    spec = profile.frontend
    first_use_ms = spec.first_use_ms if rules_of(profile.engine).tokenizer_per_adapter else 0.0
    return (
        spec.scrape_base_ms, spec.scrape_per_series_ms, spec.scrape_per_name_ms, spec.request_ms, first_use_ms,
        spec.output_ms,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A workload on a server."""

    workload: Workload
    profile: Profile
    max_loras: int
    max_outstanding: int | None
    duration_s: float
    bin_s: float
    concurrency: int | None = None
    paced: bool = False

    def simulate(self, seed: int = 0) -> Run:
        """The twin's answer."""
        return simulate(
            self.workload,
            self.profile,
            max_loras=self.max_loras,
            max_outstanding=self.max_outstanding,
            concurrency=self.concurrency,
            paced=self.paced,
            duration_s=self.duration_s,
            timeline_bin_s=self.bin_s,
            seed=seed,
        )

    def naive(self, sim: Run, seed: int = 0) -> NaiveTwin:
        """The oracle's."""
        engine, loading, memory = self.profile.engine, self.profile.loading, self.profile.memory
        adapter_blocks = [0] * len(self.workload)
        if memory.policy == "unified":
            block_bytes = engine.block_size * self.profile.model.kv_bytes_per_token
            bytes_per_rank = self.profile.model.lora_bytes_per_rank
            adapter_blocks = [  # 0 for the base model
                math.ceil(a.rank * bytes_per_rank / block_bytes) for a in self.workload.adapters
            ]
        kv_blocks = sim.kv_cache_tokens // engine.block_size
        server = NaiveServer(
            ranks=[a.rank for a in self.workload.adapters],
            adapter_blocks=adapter_blocks,
            coefficients=self.profile.latency.coefficients,
            form=self.profile.latency.form,
            graph_max=self.profile.latency.graph_max_tokens,
            ridge=self.profile.latency.ridge_tokens,
            expert_share=self.profile.latency.expert_share,
            host_ms=(loading.host_base_ms, loading.host_per_rank_ms),
            disk_ms=(loading.disk_base_ms, loading.disk_per_rank_ms),
            cold_start=loading.cold_start if engine.warm_start is None else not engine.warm_start,
            warm_start=bool(engine.warm_start),
            slots=sim.max_loras,
            slot_rank=sim.max_lora_rank,
            kv_blocks=kv_blocks,
            block_size=engine.block_size,
            token_budget=engine.max_num_batched_tokens,
            max_seqs=engine.max_num_seqs,
            max_outstanding=self.max_outstanding or math.inf,
            concurrency=self.concurrency or math.inf,
            max_cpu_loras=engine.max_cpu_loras or math.inf,
            hashes=rows.adapters_of(self.workload.ranks, self.workload.ranks, seed)[0]["hash"][1:].tolist(),
            prefills_first=rules_of(engine).prefills_first,
            graphs_without_lora=rules_of(engine).graphs_without_lora,
            series_of_lists=rules_of(engine).series_of_lists,
            whole_sequence=rules_of(engine).whole_sequence,
            skipped_first=rules_of(engine).skipped_first,
            skipped_reversed=rules_of(engine).skipped_reversed,
            spares_batch=loading.spares_batch or memory.policy == "unified",
            scrape_interval_s=self.profile.frontend.scrape_interval_s,
            front_end_s=tuple(ms * 1e-3 for ms in front_end_costs_ms(self.profile)),
        )
        longest = min(engine.max_model_len, (kv_blocks - max(adapter_blocks)) * engine.block_size)
        time_s, adapter = draw_times(self.workload, self.duration_s, seed)
        if sim.closed_loop:
            trace = self.workload.arrivals.trace
            time_s = np.zeros(sim.sent + 50 if trace is None else len(trace))
            adapter = None
        marks = draw_marks(self.workload, adapter, len(time_s), seed)
        requests = []
        for owner, prompt, output in zip(marks.adapter, marks.input_tokens, marks.output_tokens, strict=True):
            prompt = min(int(prompt), longest - 1)
            requests.append((int(owner), prompt, min(int(output), longest - prompt)))
        twin = NaiveTwin(server, sim.duration_s, self.bin_s)  # a closed loop over a trace ends with it
        return twin.run(time_s.tolist(), requests, marks_wait=sim.closed_loop)


def assert_agree(case: Case, seed: int = 0) -> NaiveTwin | None:
    """Compare everything that both compute; None where the server does not start."""
    sim = case.simulate(seed)
    if sim.status != "ok":
        return None
    naive, raw = case.naive(sim, seed), sim.raw
    same = {"rtol": 1e-12, "atol": 0.0, "equal_nan": True}
    assert raw.requests.adapter.tolist() == [r.adapter for r in naive.accepted]
    np.testing.assert_allclose(raw.first_s, [r.first_s for r in naive.accepted], **same)
    engine_s = [(r.reached_s, r.engine_first_s, r.engine_finish_s) for r in naive.accepted]
    np.testing.assert_allclose(raw.engine_s, np.array(engine_s).reshape(-1, 3), **same)
    np.testing.assert_allclose(raw.finish_s, [r.finish_s for r in naive.accepted], **same)
    timeline = raw.timeline.view(np.float64).reshape(-1, 8)
    np.testing.assert_allclose(timeline[: len(naive.timeline)], naive.timeline, rtol=1e-9, atol=1e-12)
    expected = {
        "preemptions": naive.preemptions, "adapter_loads": naive.lora.loads,
        "disk_loads": naive.lora.disk_loads, "taken": naive.sent - naive.refused,
        "sent": naive.sent + (len(naive.arrivals) if case.paced else 0),
        "pending_count": len(naive.pending), "merged": naive.merged,
        "series": len(naive.front_end.series),
        "names": sum(len(running) + len(waiting) for running, waiting in naive.front_end.series),
        "peak_blocks": naive.peak_blocks, "peak_running": naive.peak_running,
        "running": len(naive.running), "waiting": len(naive.waiting),
        "waiting_prompt": sum(request.prompt for request in [*naive.waiting, *naive.pending]),
        "request_ranks": sum(naive.server.ranks[request.adapter] for request in naive.running),
    }  # fmt: skip
    assert {name: raw.server[name] for name in expected} == expected
    assert sim.engine_steps == naive.step
    assert raw.server.busy_s == pytest.approx(naive.busy_s, rel=1e-9)
    assert raw.server.load_s == pytest.approx(naive.load_s, rel=1e-9)
    gaps_ms = np.array([gap * 1e3 for r in naive.accepted for gap in r.gaps_s])
    bins = (np.log(gaps_ms / rows.HISTOGRAM_FLOOR_MS) * rows.HISTOGRAM_PER_E).astype(int)
    histogram = np.bincount(bins, minlength=rows.HISTOGRAM_BINS)
    assert int(raw.histogram.sum()) == len(gaps_ms)
    done = raw.finished
    span_ms = 1e3 * float((raw.finish_s - raw.first_s)[done].sum())
    if span_ms > 0.0 and len(gaps_ms):  # gaps after a preemption are seen, too
        count = (raw.requests.output_tokens[done] - 1).sum() * len(gaps_ms) / (len(gaps_ms) + naive.merged)
        assert sim.mean_itl_ms == pytest.approx(span_ms / count, rel=1e-9)
    assert np.abs(np.cumsum(raw.histogram) - np.cumsum(histogram)).max(initial=0) <= len(gaps_ms) * 0.05
    return naive


def _grains(high: int) -> st.SearchStrategy[float]:
    return st.integers(0, high).map(lambda k: k / GRAIN)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Tight servers: few KV blocks, small token budgets, few sequences."""
    form = draw(st.sampled_from(["linear", "linear", "paper"]))
    if form == "linear":
        coefficients = draw(st.dictionaries(st.sampled_from(LINEAR_TERMS), _grains(60)))
        coefficients["base_ms"] = draw(st.integers(1, 20)) / 2
    else:
        coefficients = {term: draw(st.integers(0, 3)) / 8 for term in PAPER_TERMS} | {"k5": 1.0, "k7": 2.5}
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    max_num_seqs = draw(st.integers(1, 12))
    kv_tokens = draw(st.integers(2, 60)) * block_size + draw(st.integers(0, block_size - 1))
    loading = LoadingSpec(
        *(draw(st.integers(0, 64)) / 16 for _ in range(4)), cold_start=draw(st.booleans()),
        spares_batch=draw(st.booleans()),
    )  # fmt: skip
    interval_s = draw(st.sampled_from([None, None, 0.01, 0.1, 1.0]))
    frontend = FrontEndSpec(interval_s, *(draw(st.integers(0, high)) / 64 for high in (640, 64, 32, 64, 3200, 64)))
    return Profile(
        "tests/tight",
        ModelSpec("tight", 0.0, 100.0, draw(st.sampled_from([0.0, 25.0, 100.0]))),
        GpuSpec("tight", 1e9),
        EngineSpec(
            "vllm",
            draw(st.sampled_from(["0.5.0", "0.8.5", "0.11.0", "0.20.2", "0.32.0"])),
            max_model_len=draw(st.integers(4, 200)),
            max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 40)),
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            max_cpu_loras=draw(st.sampled_from([None, 1, 2, 3])),
            prefix_caching=False,
            async_scheduling=False,
            warm_start=draw(st.sampled_from([None, None, False, True])),
        ),
        MemorySpec(kv_tokens * 100.0, 0.0, 0.0, 1, draw(st.sampled_from(["reserved", "unified"]))),
        LatencySpec(
            form,
            coefficients,
            draw(st.integers(0, 20)),
            draw(st.integers(0, 30)),
            draw(st.sampled_from([0.0, 1.0])),
        ),
        loading,
        calibrated=True,
        frontend=draw(st.sampled_from([FrontEndSpec(), frontend])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A few dozen requests of a few adapters, replayed on a tight server."""
    m, n = draw(st.integers(1, 6)), draw(st.integers(1, 50))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    longest = draw(st.sampled_from([4, 20, 60]))
    trace = RequestTrace(
        np.sort(rng.random(n)) * draw(st.sampled_from([0.01, 0.1, 0.5, 2.0])),
        rng.integers(m, size=n),
        rng.integers(1, longest + 1, size=n),
        rng.integers(1, longest + 1, size=n),
    )
    adapters = [Adapter(f"a{i}", draw(st.sampled_from([0, 8, 16, 32])), 1.0) for i in range(m)]
    duration_s = draw(st.sampled_from([0.05, 0.3, 1.0, 30.0]))
    concurrency = draw(st.sampled_from([None, None, 1, 3, 8, 60]))
    return Case(
        Workload(adapters, arrivals=Arrivals("trace", trace=trace)),
        draw(profiles()),
        max_loras=draw(st.integers(1, m + 1)),
        max_outstanding=draw(st.sampled_from([None, None, 3, 8, 20])) if concurrency is None else None,
        duration_s=duration_s,
        bin_s=duration_s / draw(st.sampled_from([1, 7])),
        concurrency=concurrency,
        paced=concurrency is not None and draw(st.booleans()),
    )


@given(cases())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_kernel_is_the_oracle(case: Case) -> None:
    """Every time and count of the kernel is that of vLLM's scheduler simulated request by request."""
    assert_agree(case)


def test_labels_of_large_steps_are_united_over_their_slices() -> None:
    """Steps of more than 128 outputs name in /metrics who waited before them; the reference counts slice by slice."""
    rng = np.random.default_rng(7)
    n, m = 500, 8
    trace = RequestTrace(
        np.sort(rng.random(n)) * 8.0, rng.integers(m, size=n), np.full(n, 4), rng.integers(280, 320, size=n)
    )
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(m)], arrivals=Arrivals("trace", trace=trace))
    server = replace(
        _busy().profile,
        latency=LatencySpec("linear", {"base_ms": 8.0}),
        engine=EngineSpec("vllm", "0.8.5", 1024, 2048, 512),
        memory=MemorySpec(1e5 * 100.0, 0.0, 0.0, 1),
        frontend=FrontEndSpec(0.05, 1.0, 0.001, 0.0001, 0.5, 0.0, 1 / 64),
    )
    case = Case(fleet, server, max_loras=m, max_outstanding=None, duration_s=30.0, bin_s=30.0)
    sim = case.simulate()
    naive = case.naive(sim)
    assert naive.peak_running > 160
    # The kernel neglects that requests may end in the first slice.
    assert sim.metric_series == pytest.approx(len(naive.front_end.series), rel=0.03)
    assert sim.metric_series > 1.1 * len(set(naive.front_end.states))


def _busy(policy: str = "reserved", **coefficients: float) -> Case:
    """Twelve adapters in four slots, bursty, with too little KV cache: everything happens."""
    law = {
        "base_ms": 4.0,
        "per_decode_ms": 0.125,
        "per_prefill_token_ms": 1 / 64,
        "per_kv_token_ms": 1 / 1024,
    }
    profile = Profile(
        "tests/busy",
        ModelSpec("busy", 0.0, 100.0, 100.0),
        GpuSpec("busy", 1e9),
        EngineSpec("vllm", "0", 1024, 128, 24, max_cpu_loras=6),
        MemorySpec(1200 * 100.0, 0.0, 0.0, 1, policy),  # type: ignore[arg-type]
        LatencySpec("linear", law | coefficients, 16),
        LoadingSpec(2.0, 0.125, 8.0, 0.25),
        calibrated=True,
    )
    fleet = Workload(
        [Adapter(f"a{i}", 8 << i % 3, 1.0 + i) for i in range(12)],
        Lengths.gamma(60, 1.0),
        Lengths.gamma(30, 1.0),
        length_correlation=0.3,
    )
    return Case(fleet, profile, max_loras=4, max_outstanding=None, duration_s=20.0, bin_s=1.0)


@pytest.mark.parametrize("policy", ["reserved", "unified"])
@pytest.mark.parametrize("max_outstanding", [None, 40])
@pytest.mark.parametrize("version", ["0.5.0", "0.8.5", "0.11.0", "0.28.0"])
def test_busy_server_is_the_oracle(policy: str, max_outstanding: int | None, version: str) -> None:
    """Poisson requests that queue, are passed over, preempted, refused and loaded from disk agree."""
    case = replace(_busy(policy, per_waiting_ms=1 / 32), max_outstanding=max_outstanding)
    engine = replace(case.profile.engine, version=version, prefix_caching=False, async_scheduling=False)
    case = replace(case, profile=replace(case.profile, engine=engine))
    naive = assert_agree(case, seed=3)
    assert naive is not None
    assert len(naive.accepted) > 300
    assert min(naive.preemptions, naive.lora.loads, naive.lora.disk_loads, len(naive.waiting)) > 10
    assert (naive.refused > 100) == (max_outstanding is not None)


@pytest.mark.parametrize("max_num_seqs", [3, 6])
def test_tokenizers_are_the_oracle(max_num_seqs: int) -> None:
    """The API server keeps the last used tokenizers, at least `max_loras` of them, beside requests without adapters."""
    case = _busy()
    fleet = replace(case.workload, adapters=(Adapter("base", 0, 9.0), *case.workload.adapters))
    engine = replace(case.profile.engine, max_num_seqs=max_num_seqs)
    profile = replace(case.profile, engine=engine, frontend=FrontEndSpec(first_use_ms=25.0))
    naive = assert_agree(replace(case, workload=fleet, profile=profile), seed=4)
    assert naive is not None
    assert naive.front_end.used != sorted(naive.front_end.used)


@pytest.mark.parametrize("kind", ["lognormal", "unpredictable", "piecewise"])
def test_refused_requests_take_their_marks_along(kind: str) -> None:
    """Where adapters depend on time, a refused request takes its adapter and lengths along."""
    case = _busy()
    factors = (1.0, 3.0) if kind == "piecewise" else ()
    arrivals = Arrivals(kind, cv=2.0, period_s=4.0, factors=factors)  # type: ignore[arg-type]
    naive = assert_agree(replace(case, workload=case.workload.with_arrivals(arrivals), max_outstanding=30), seed=5)
    assert naive is not None
    assert naive.refused > 50


@pytest.mark.parametrize("policy", ["reserved", "unified"])
@pytest.mark.parametrize("version", ["0.5.0", "0.8.5", "0.32.0"])
def test_base_requests_are_the_oracle(policy: str, version: str) -> None:
    """Requests without an adapter take no slot and load nothing, beside adapters that wait for both."""
    case = _busy(policy, first_adapter_ms=1.0, per_slot_ms=0.25, per_adapter_ms=0.125)
    base = [Adapter("base", 0, 15.0), Adapter("other base", 0, 5.0)]
    fleet = replace(case.workload, adapters=(*case.workload.adapters[:6], *base, *case.workload.adapters[6:]))
    changed = {"version": version, "max_cpu_loras": 5, "async_scheduling": False, "prefix_caching": False}
    profile = replace(case.profile, engine=replace(case.profile.engine, **changed))
    naive = assert_agree(replace(case, workload=fleet, profile=profile, max_outstanding=40), seed=6)
    assert naive is not None
    assert min(naive.preemptions, naive.lora.loads, naive.lora.disk_loads, len(naive.waiting)) > 10


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("kind", ["poisson", "lognormal"])
def test_closed_loop_is_the_oracle(kind: str, paced: bool) -> None:
    """A client that keeps at most so many requests open sends what it holds back when it sees others finish."""
    case = _busy(per_waiting_ms=1 / 32)
    arrivals = Arrivals(kind, cv=2.0)  # type: ignore[arg-type]
    profile = replace(case.profile, frontend=FrontEndSpec(0.5, 8.0, 0.0, 0.0, 0.5, 0.0, 1 / 64))
    case = replace(case, workload=case.workload.with_arrivals(arrivals), profile=profile)
    naive = assert_agree(replace(case, concurrency=30, paced=paced), seed=4)
    assert naive is not None
    assert len(naive.accepted) > 300
    assert min(naive.preemptions, naive.lora.loads) > 10


def test_marks_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests are accepted than marks were drawn for: the answer is that of enough marks."""
    case = replace(_busy(), max_outstanding=40)
    whole = case.simulate(seed=2)
    monkeypatch.setattr("packer.twin.server.LIKELY_REQ_S", 0.1)
    again = case.simulate(seed=2)
    assert whole.to_dict() == again.to_dict()
    assert whole.sent > 2 * whole.refused > 0
    closed = replace(case, max_outstanding=None, concurrency=20)
    again = closed.simulate(seed=2)
    monkeypatch.undo()
    assert closed.simulate(seed=2).to_dict() == again.to_dict()
