"""Replay a day on servers that start and stop: the closed-loop check of a schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from packer.arrays import FloatArray
from packer.arrival import RequestTrace
from packer.change import Change
from packer.cluster import Cluster
from packer.errors import ValidationError
from packer.goal import GoalLike
from packer.moves import by_adapter
from packer.objectives.headroom import with_rates
from packer.operate.day import Schedule
from packer.seeds import further
from packer.times import HOUR_S, joined
from packer.twin.arrivals import draw_requests
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.run import Run
from packer.workload import Workload

LATE_S = 600.0  # Time that servers have to drain after the day, s.


@dataclass(frozen=True, eq=False)
class Window:
    """Servers that serve from `start_s` to `end_s`, behind a router. `numbers`: a number for each server, which goes on
    in other windows that have its number; (): 0, 1, …."""

    start_s: float
    end_s: float
    cluster: Cluster
    router: str = "plan"
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Day:
    """The run of a replayed day, and what its changes cost.

    `gpu_hours`: including the time in which servers start, and in which they end their last requests.
    `starts`, `moves`: number of GPUs that started; number of adapters that changed their server.
    """

    run: Run
    gpu_hours: float
    starts: int
    moves: int

    @property
    def ttft_ms(self) -> FloatArray:
        """TTFT of each request, float64 (n,); infinite if the request never ended."""
        raw = self.run.raw
        return np.where(raw.finished, 1e3 * (raw.first_s - raw.requests.time_s), math.inf)

    @property
    def within(self) -> float:
        """Share of the requests within their limits; requests that never ended are not."""
        kept = self.run.kept_requests[0]
        return float(kept.mean()) if len(kept) else 1.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        ttft_ms = self.ttft_ms
        p95 = float(np.quantile(ttft_ms, 0.95)) if len(ttft_ms) else 0.0
        p95_ms = p95 if math.isfinite(p95) else None
        found = {"gpu_hours": self.gpu_hours, "starts": self.starts, "moves": self.moves}
        return {**found, "requests": len(ttft_ms), "p95_ttft_ms": p95_ms, "within_slo": self.within}


def requests_of_day(
    workload: Workload, rates: Mapping[str, FloatArray], period_s: float, *,
    trends: Mapping[str, Sequence[float]] | None = None, seed: int = 0,
) -> RequestTrace:  # fmt: skip
    """Requests of a day: in each period arrivals at its rates, with the fleet's lengths and bursts and with the
    period's trend, as for `packer.schedule`; without `trends`, with the fleet's own."""
    parts = []
    for k, (name, vector) in enumerate(rates.items()):
        busy = np.flatnonzero(vector > 0.0)
        fleet = with_rates(workload, vector)
        if trends is not None:
            fleet = fleet.with_arrivals(fleet.arrivals.following(trends.get(name, ())))
        found = draw_requests(fleet, period_s, further(seed, k))
        kept = np.isin(found.adapter, busy)
        parts.append(replace(found.take(kept), time_s=found.time_s[kept] + k * period_s))
    return RequestTrace.joined(parts, end_s=len(rates) * period_s)


def windows_of(schedule: Schedule) -> list[Window]:
    """The servers of a schedule, each routed as its plan says, from the start of its first period on."""
    days = schedule.periods
    first_s = days[0].start_s
    return [Window(day.start_s - first_s, day.end_s - first_s, day.plan.cluster(), numbers=day.servers) for day in days]


def changes_of(windows: Sequence[Window]) -> tuple[Cluster, list[Change]]:
    """All servers of the windows as one cluster, the first window's first, and the changes between windows. In a
    change, servers start, adapters are loaded, requests are rerouted, adapters are unloaded and servers stop, in this
    order. A server with the same number but other settings is a different server."""
    keys = [list(zip(w.numbers or range(len(w.cluster)), w.cluster.servers, strict=True)) for w in windows]
    kinds = {kind.name: kind for window in windows for kind in window.cluster.kinds}
    number = {key: k for k, key in enumerate(dict.fromkeys(key for own in keys for key in own))}
    held: list[dict[int, Mapping[str, float]]] = []
    for window, own in zip(windows, keys, strict=True):
        placement = window.cluster.placement or ({},) * len(own)
        held.append({number[key]: placed for key, placed in zip(own, placement, strict=True)})
    # In reverse order the earliest window of a server is the last to be written, so it stays.
    first = {server: placed for own in reversed(held) for server, placed in own.items()}
    base, servers = windows[0].cluster, tuple(kind for _, kind in number)
    placed_first = None if base.placement is None else tuple(first[k] for k in range(len(number)))
    cluster = replace(base, kinds=tuple(kinds.values()), servers=servers, placement=placed_first, nodes=())
    known = {k: set(first[k]) for k in first}
    changes: list[Change] = []
    for window, before, now in zip(windows[1:], held, held[1:], strict=False):
        at_s = window.start_s - windows[0].start_s
        comes, goes = sorted(set(now) - set(before)), sorted(set(before) - set(now))
        load = tuple((k, name) for k, placed in now.items() for name in placed if name not in known[k])
        unload = tuple((k, name) for k, placed in now.items() for name in sorted(known[k] - set(placed)))
        known |= {k: set(placed) for k, placed in now.items()}
        route = by_adapter(now.items())
        changes.append(Change(at_s, tuple(comes), tuple(goes), load=load, unload=unload, route=route))
    return cluster, changes


def replay(
    workload: Workload, trace: RequestTrace, windows: Sequence[Window], *, startup_s: float = 0.0,
    moves: int = 0, slo: GoalLike | None = None, seed: int = 0,
) -> Day:  # fmt: skip
    """Serve a day's requests by the servers of each window in turn, in one run of the cluster twin.

    At the end of a window its servers keep their requests; servers that are not in the next window get no more requests
    and stop when theirs are done. Servers that start have empty caches, and engines wait while adapters are loaded.

    `startup_s`: servers that the previous window did not have were started this much earlier. `moves`: adapters moved,
    for the report. `slo`: the goal by which requests are counted, as for `packer.simulate`; None: the fleet's.
    Raises `ValidationError`: the windows leave a gap or have several routers, or a server does not start.
    """
    for before, after in pairwise(windows):
        if before.end_s != after.start_s:
            raise ValidationError(f"Expected windows without gaps, got one at {before.end_s:g} s.")
    routers = {window.router for window in windows}
    if len(routers) > 1:
        raise ValidationError(f"Expected one router for all windows, got {', '.join(sorted(routers))}.")
    cluster, changes = changes_of(windows)
    begin_s, end_s = windows[0].start_s, windows[-1].end_s
    of = np.flatnonzero((trace.time_s >= begin_s) & (trace.time_s < end_s))
    length_s, time_s = end_s - begin_s + LATE_S, trace.time_s[of] - begin_s
    within_day = replace(trace.take(of), time_s=time_s, end_s=length_s)
    run = simulate_cluster(
        workload.replaying(within_day), cluster, router=routers.pop(), seed=seed,
        duration_s=length_s, slo=workload.slo.changed_by(slo), changes=changes, startup_s=0.0,
    )  # fmt: skip
    if run.status != "ok":
        raise ValidationError(f"Expected servers that start, got: {run.status_reason}.")
    return Day(run, *_gpu_hours(run, windows, startup_s), moves)


def _gpu_hours(run: Run, windows: Sequence[Window], startup_s: float) -> tuple[float, int]:
    """GPU-hours of a day that repeats, and GPUs that start in it. Servers of the first window go on at the end of the
    day, and one that stops for no longer than it takes to start goes on, as in a schedule."""
    assert run.cluster is not None
    length_s, raw, serving = windows[-1].end_s - windows[0].start_s, run.raw, dict[int, list[tuple[float, float]]]()
    for s, start_s, end_s in run.spans or [(s, 0.0, run.duration_s) for s in range(len(run.cluster))]:
        if end_s >= run.duration_s:
            own = raw.finish_s[raw.finished & (run.server_of_requests == s)]
            goes_on = s < len(windows[0].cluster)
            end_s = length_s if goes_on else max(length_s, float(own.max(initial=0.0)))
        serving.setdefault(s, []).append((start_s, end_s))
    gpu_s, starts = 0.0, 0
    for s, spans in serving.items():
        gpus, found = run.cluster.kind(s).profile.engine.gpus, joined(spans, startup_s, length_s)
        started = 0 if found == [(0.0, length_s)] else gpus * len(found)
        gpu_s += gpus * sum(end_s - start_s + length_s * (end_s < start_s) for start_s, end_s in found)
        gpu_s, starts = gpu_s + started * startup_s, starts + started
    return gpu_s / HOUR_S, starts
