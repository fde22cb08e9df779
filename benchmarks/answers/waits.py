"""The mean TTFT of drawn requests beside that of the trace that they were measured on, and of a part held out.

    uv run python benchmarks/answers/waits.py

Each trace is cut in two halves. On one server the requests of a half are replayed, and requests are drawn `DRAWS`
times: with the bursts and lengths measured on that half ("own"), and with those of the other half at the rate of this
one ("held out"). Both are given as parts of the replayed mean TTFT: the mean and the tenths at both ends of the draws.
The correlations are those of the requests in each minute with their mean lengths, in each third of the trace.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.operate.view import Named
from packer.testing.records import record_text
from packer.traces.assign import Ranks
from packer.traces.measure import measure_workload
from packer.traces.read import read_trace
from packer.traces.trace import Trace

SHARED = Path("../shared/data/traces")
SERVER = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
TRACES = {"azure_llm_2023_conv.csv.gz": 0.9, "azure_llm_2023_code.csv.gz": 0.4, "mooncake_synthetic.jsonl.gz": 0.2}
"""Traces, and the share of their requests that the server gets: it serves them, with queues."""
DRAWS, MINUTE_S = 16, 60.0


def kept(trace: Trace, rows: Any) -> Trace:
    """Some of the requests, and their adapters alone."""
    assert trace.adapter is not None
    assert trace.ranks is not None
    used, adapter = np.unique(trace.adapter[rows], return_inverse=True)
    names, ranks = (tuple(each[k] for k in used.tolist()) for each in (trace.names, trace.ranks))
    some = replace(trace, adapter=None, names=(), ranks=None).take(rows)
    time_s = some.time_s - some.time_s[0]
    return replace(some, time_s=time_s, adapter=adapter.astype(np.int64), names=names, ranks=ranks)


def parts(trace: Trace, number: int) -> list[Trace]:
    """The trace cut into so many parts of equal length."""
    place = np.minimum((trace.time_s / trace.span_s * number).astype(np.int64), number - 1)
    return [kept(trace, np.flatnonzero(place == k)) for k in range(number)]


def ttft_ms(fleet: packer.Workload, span_s: float | None = None, seed: int = 0) -> float:
    """The mean TTFT on the server."""
    run = packer.simulate(fleet, SERVER, max_loras=32, max_lora_rank=32, duration_s=span_s, seed=seed)
    return float(run.mean_ttft_ms)


def drawn(fleet: packer.Workload, span_s: float, replayed_ms: float) -> list[float]:
    """Mean, lowest and highest tenth of the drawn mean TTFT over the replayed one."""
    found = np.array([ttft_ms(fleet, span_s, seed) for seed in range(DRAWS)]) / replayed_ms
    return [round(float(each), 2) for each in (found.mean(), *np.quantile(found, (0.1, 0.9)))]


def correlations(trace: Trace) -> list[float]:
    """Of the requests in a minute with their mean input and output tokens."""
    minute = (trace.time_s // MINUTE_S).astype(np.int64)
    counts = np.bincount(minute)
    columns = (trace.input_tokens, trace.output_tokens)
    means = [np.bincount(minute, column) / np.maximum(counts, 1) for column in columns]
    return [round(float(np.corrcoef(counts[counts > 2], mean[counts > 2])[0, 1]), 2) for mean in means]


def main() -> None:
    """Measure, print and write waits.json."""
    rows = {}
    for name, share in TRACES.items():
        whole = Named(60).of(read_trace(SHARED / name), Ranks(others=(8, 16, 32)))[0]
        whole = replace(whole, blocks=None)
        served = kept(whole, np.flatnonzero(np.random.default_rng(0).random(len(whole)) < share))
        halves = parts(served, 2)
        fleets = [measure_workload(half) for half in halves]
        rows[name] = {"requests in a minute with input, output tokens": [correlations(t) for t in parts(whole, 3)]}
        for k, (half, fleet) in enumerate(zip(halves, fleets, strict=True)):
            replayed_ms, other = ttft_ms(measure_workload(half, replay=True)), fleets[1 - k]
            rows[name][f"half {k}"] = {
                "replayed, ms": round(replayed_ms),
                "own": drawn(fleet, half.span_s, replayed_ms),
                "held out": drawn(other.scaled(fleet.rate / other.rate), half.span_s, replayed_ms),
            }
        print(name, record_text(rows[name]), flush=True)
    Path(__file__).with_name("waits.json").write_text(record_text(rows) + "\n", "utf-8")


if __name__ == "__main__":
    main()
