"""A day replayed on servers that come and go: the closed-loop check of a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster
from packer.errors import ValidationError
from packer.goal import Slo
from packer.objectives.headroom import with_rates
from packer.operate.day import HOUR_S, Schedule
from packer.twin.arrivals import draw_requests
from packer.twin.cluster.simulate import simulate_cluster
from packer.workload import Workload

LATE_S = 600.0
"""For how long servers drain."""


@dataclass(frozen=True, eq=False)
class Window:
    """Servers that serve from `start_s` to `end_s`, behind a router.

    `numbers`: one for each server, which goes on where another window has it; () counts from 0.
    """

    start_s: float
    end_s: float
    cluster: Cluster
    router: str = "plan"
    numbers: tuple[int, ...] = ()

    @property
    def gpus_of(self) -> dict[int, int]:
        """GPUs of each server by its number."""
        kinds = {kind.name: kind.profile.engine.tensor_parallel_size for kind in self.cluster.kinds}
        names = self.cluster.servers
        return dict(zip(self.numbers or range(len(names)), map(kinds.__getitem__, names), strict=True))

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return sum(self.gpus_of.values())


@dataclass(frozen=True, eq=False)
class Day:
    """What a replayed day shows.

    `gpu_hours`: with the time in which servers start, and end their last requests.
    `starts`, `moves`: GPUs that started; adapters that changed their server.
    `ttft_ms`, `itl_ms`: of each request, float64 (n,), infinite if it never ended.
    `within`: share of the requests within both limits.
    """

    gpu_hours: float
    starts: int
    moves: int
    ttft_ms: FloatArray
    itl_ms: FloatArray
    within: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        p95 = float(np.quantile(self.ttft_ms, 0.95)) if len(self.ttft_ms) else 0.0
        return {
            "gpu_hours": self.gpu_hours,
            "starts": self.starts,
            "moves": self.moves,
            "requests": len(self.ttft_ms),
            "p95_ttft_ms": p95 if math.isfinite(p95) else None,
            "within_slo": self.within,
        }


def requests_of_day(
    workload: Workload, rates: Mapping[str, FloatArray], period_s: float, *, seed: int = 0
) -> RequestTrace:
    """Requests of a day: in each period Poisson arrivals at its rates, with the fleet's lengths."""
    parts = []
    for k, vector in enumerate(rates.values()):
        busy = np.flatnonzero(vector > 0.0)
        fleet = with_rates(workload, vector).with_arrivals(Arrivals())
        found = draw_requests(fleet, period_s, seed + 7919 * k)
        kept = np.isin(found.adapter, busy)
        parts.append((found.time_s[kept] + k * period_s, *(c[kept] for c in _marks(found))))
    times, adapters, inputs, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
    return RequestTrace(times, adapters, inputs, outputs, end_s=len(rates) * period_s)


def _marks(trace: RequestTrace) -> tuple[IntArray, ...]:
    return trace.adapter, trace.input_tokens, trace.output_tokens


def windows_of(schedule: Schedule) -> list[Window]:
    """The servers of a schedule, each routed as its plan says."""
    return [
        Window(each.start_s, each.end_s, each.plan.cluster(), numbers=each.servers)
        for each in schedule.periods
    ]


def replay(
    workload: Workload,
    trace: RequestTrace,
    windows: Sequence[Window],
    *,
    startup_s: float = 0.0,
    moves: int = 0,
    slo: Slo | None = None,
    seed: int = 0,
) -> Day:
    """Serve a day's requests by the servers of each window in turn.

    A window begins with idle servers. When it ends, its servers drain: requests that have their first token end there,
    those that wait go to the servers of the next window, and their waiting counts from when they came. A server that
    goes on drains beside its new load, which favours changes by what is drained.

    `workload`: the fleet that the trace's adapters are of.
    `windows`: in order, without gaps.
    `startup_s`: servers that the window before did not have were started so much earlier.
    `moves`: adapters moved, for the report.
    `slo`: limits of the adapters, which each request is held to; None: the fleet's.
    Raises `ValidationError`: the windows leave a gap, or a server does not start.
    """
    for before, after in pairwise(windows):
        if before.end_s != after.start_s:
            raise ValidationError(f"Expected windows without gaps, got one at {before.end_s:g} s.")
    n = len(trace)
    first, finish = np.full(n, math.inf), np.full(n, math.inf)
    waiting = np.zeros(0, dtype=np.int64)
    drained_s = 0.0
    for k, window in enumerate(windows):
        fresh = np.flatnonzero((trace.time_s >= window.start_s) & (trace.time_s < window.end_s))
        index = np.concatenate([waiting, fresh])
        length_s = window.end_s - window.start_s
        if not len(index):
            continue
        sent_s = np.maximum(trace.time_s[index] - window.start_s, 0.0)
        part = RequestTrace(
            sent_s,
            *(column[index] for column in _marks(trace)),
            blocks=None if trace.blocks is None else trace.blocks.take(index),
            end_s=max(length_s, sent_s[-1] + 1.0) + LATE_S,
        )
        run = simulate_cluster(
            workload.with_arrivals(Arrivals("trace", trace=part)),
            window.cluster,
            router=window.router,
            duration_s=length_s + LATE_S,
            seed=seed,
        )
        if run.status != "ok":
            raise ValidationError(
                f"Expected servers that start, got a memory error in the window at {window.start_s:g} s."
            )
        last = k == len(windows) - 1
        ended = run.raw.finished & (last | (run.raw.first_s < length_s))
        first[index[ended]] = run.raw.first_s[ended] + window.start_s
        finish[index[ended]] = run.raw.finish_s[ended] + window.start_s
        waiting = index[~ended]
        following = windows[(k + 1) % len(windows)].gpus_of
        for (number, gpus), server in zip(window.gpus_of.items(), run.servers, strict=True):
            if number not in following:
                raw = server.raw
                own = raw.finish_s[raw.finished & (last | (raw.first_s < length_s))]
                drained_s += gpus * float(own.max(initial=length_s) - length_s)
    gaps = np.maximum(trace.output_tokens - 1, 1)
    with np.errstate(invalid="ignore"):
        ttft = 1e3 * (first - trace.time_s)
        itl = np.where(np.isfinite(finish), 1e3 * (finish - first) / gaps, math.inf)
    most_ttft_ms, most_itl_ms = (
        each[trace.adapter] for each in (workload.slo if slo is None else slo).columns(workload)
    )
    within = float(np.mean((ttft <= most_ttft_ms) & (itl <= most_itl_ms))) if n else 1.0
    held = [window.gpus_of for window in windows]
    starts = sum(
        gpus for t, now in enumerate(held) for number, gpus in now.items() if number not in held[t - 1]
    )
    serving_s = sum(w.gpus * (w.end_s - w.start_s) for w in windows)
    return Day((serving_s + starts * startup_s + drained_s) / HOUR_S, starts, moves, ttft, itl, within)
