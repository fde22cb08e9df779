"""Burstiness is measured from traces: absent where arrivals are Poisson, and found again where it was put in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packer
from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts
from packer.traces.assign import assign_adapters
from packer.traces.bursts import dispersion, measure_arrivals
from packer.traces.measure import measure_workload
from packer.traces.read import read_trace
from packer.traces.trace import Trace
from packer.twin.arrivals import draw_requests
from packer.workload import Workload

AZURE = Path(__file__).parents[4] / "shared/data/traces"


def drawn(arrivals: Arrivals, seed: int, *, duration_s: float = 7200.0, adapters: int = 40) -> Trace:
    """A trace of a made-up fleet."""
    fleet = Workload([Adapter(f"a{i:02d}", 8, 0.05 + 0.01 * i) for i in range(adapters)], arrivals=arrivals)
    seen = draw_requests(fleet, duration_s, seed)
    return Trace(
        seen.time_s, seen.input_tokens, seen.output_tokens, seen.adapter, fleet.names, (8,) * adapters
    )


def test_poisson_arrivals_stay_poisson() -> None:
    """Chance is not taken for bursts."""
    kinds = [measure_arrivals(drawn(Arrivals(), seed)).kind for seed in range(20)]
    assert kinds.count("bursty") <= 1


def test_common_and_own_bursts_are_told_apart() -> None:
    """Spreads are found again within a fifth, on the mean of several traces."""
    truth = Arrivals("bursty", common=Bursts(0.6, ((30.0, 1.0),)), own=Bursts(1.2, ((60.0, 1.0),)))
    found = [measure_arrivals(drawn(truth, seed)) for seed in range(6)]
    assert np.mean([a.common.cv if a.common else 0.0 for a in found]) == pytest.approx(0.6, rel=0.2)
    assert np.mean([a.own.cv if a.own else 0.0 for a in found]) == pytest.approx(1.2, rel=0.2)
    common_only = [measure_arrivals(drawn(replace(truth, own=None), seed)) for seed in range(6)]
    assert sum(a.own is not None for a in common_only) <= 1
    assert all(a.common is not None for a in common_only)


def test_times_recorded_in_seconds() -> None:
    """A trace with whole seconds has no bursts shorter than that."""
    trace = drawn(Arrivals(), 3)
    assert measure_arrivals(replace(trace, time_s=np.floor(trace.time_s))).kind == "poisson"


@pytest.mark.skipif(not AZURE.is_dir(), reason="needs the Azure traces in ../shared/data/traces")
def test_the_azure_code_trace_queues_as_when_replayed() -> None:
    """Drawn bursts give the replayed trace's dispersion, and its mean TTFT within a factor 1.5; Poisson does not."""
    trace = assign_adapters(read_trace(AZURE / "azure_llm_2023_code.csv.gz"), 200, ranks=(8, 16, 32), seed=0)
    fleet = measure_workload(trace)
    replay = measure_workload(trace, replay=True)
    server = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")

    def ttft_ms(workload: Workload, seed: int = 0) -> float:
        return packer.simulate(workload, server, max_loras=32, seed=seed).mean_ttft_ms

    drawn_ms = float(np.median([ttft_ms(fleet, seed) for seed in range(9)]))
    assert 1 / 1.5 < drawn_ms / ttft_ms(replay) < 1.5
    assert ttft_ms(fleet.with_arrivals(Arrivals())) < ttft_ms(replay) / 10
    seen = dispersion(trace.time_s, trace.span_s)
    again = [dispersion(draw_requests(fleet, 3600.0, seed).time_s, 3600.0) for seed in range(9)]
    for window in (1.0, 10.0, 60.0):
        assert np.mean([a[window] for a in again]) == pytest.approx(seen[window], rel=0.35)
