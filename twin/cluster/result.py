"""What came out of a cluster: the figures of one server, over all of them, and those of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from packer.arrays import IntArray
from packer.io.frames import pl
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster
from packer.twin.cluster.state import REFUSED, Servers
from packer.twin.cluster.transit import HITS, MISSES, NETWORK_S, Transit
from packer.twin.engine import state as rows
from packer.twin.result import Simulation
from packer.twin.server import Raw, Server
from packer.workload import Workload


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterSimulation(Simulation):
    """Result of simulating a cluster: a `Simulation` over the requests of all servers, and more.

    Counts and throughput are sums over servers, `busy_share` is their mean, `max_running` the largest of them.
    `profile` and `settings` are those of the first server.
    """

    cluster: Cluster = field(repr=False)
    system: str
    router: str
    setups: Sequence[Server] = field(repr=False)
    state: Servers | None = field(repr=False)
    transit: Transit | None = field(repr=False, default=None)
    spans: tuple[tuple[int, float, float], ...] | None = field(repr=False, default=None)
    """(server, start, end) of the times in which servers ran, s, where changes were made."""

    @classmethod
    def of(
        cls, workload: Workload, setups: Sequence[Server], state: Servers | None, failed: str, *,
        transit: Transit | None, duration_s: float, **run: Any,
    ) -> ClusterSimulation:  # fmt: skip
        """From the servers as they were at the end; `failed`: why they do not start, if they don't."""
        raw = Raw.nothing(len(workload))
        if state is not None:
            raw = _raw(state, None, duration_s)
        if transit is not None and (back_s := float(transit.rates[NETWORK_S])):
            # Tokens reach the client after they crossed the network.
            raw = replace(raw, first_s=raw.first_s + back_s, finish_s=raw.finish_s + back_s)
        first, tokens = setups[0], sum(setup.kv_cache_tokens for setup in setups)
        return cls(
            status="memory_error" if state is None else "ok", status_reason=failed, workload=workload,
            profile=first.profile, settings=first.settings, kv_cache_tokens=tokens, raw=raw, setups=setups,
            state=state, transit=transit, duration_s=duration_s, **run,
        )  # fmt: skip

    @property
    def slo(self) -> dict[str, float]:
        """The limits that it is judged by."""
        return self.workload.slo.limits.to_dict()

    @cached_property
    def server_slo_used(self) -> float:
        """How much of the limits of servers the one that is nearest to them uses; 0 without any."""
        return max(server.server_slo_used for server in self.servers)

    # ---- adapters
    @property
    def hit_rate(self) -> float:
        """Admissions whose adapter lay on the GPU / admissions; NaN without admissions."""
        waited = self._count(rows.WAITING) + self.aborted
        admissions = self._count(rows.TAKEN) - waited + self.preemptions
        misses = self.adapter_loads - self._count(rows.UNAWAITED)
        return 1.0 - misses / admissions if admissions else math.nan

    @property
    def host_hit_rate(self) -> float:
        """Requests whose adapter lay in the host memory of their node / requests; NaN where it holds everything."""
        if self.transit is None or not np.isfinite(self.transit.room).any():
            return math.nan
        hits, misses = self.transit.counts[HITS], self.transit.counts[MISSES]
        return float(hits / (hits + misses)) if hits + misses else math.nan

    @property
    def refused(self) -> int:
        """Requests that the client could not send because too many were outstanding."""
        return 0 if self.state is None else int((self.state.server == REFUSED).sum())

    @property
    def aborted(self) -> int:
        """Requests that a server gave up while they waited (early abort)."""
        return self._count(rows.ABORTED)

    @property
    def cold_start_share(self) -> float:
        """Time that requests in a batch waited for loads, of their own adapter or another / latency; NaN: none."""
        done = self._completed
        latency_s = float((self.raw.finish_s[done] - self.raw.requests.time_s[done]).sum())
        return float(self.raw.floats[rows.STALL_S]) / latency_s if latency_s else math.nan

    # ---- servers
    @property
    def gpu_hours(self) -> float:
        """GPUs × hours in which they ran, with the start-up of servers and the end of their last requests."""
        spans = self.spans or tuple((s, 0.0, self.duration_s) for s in range(len(self.cluster)))
        gpus = [self.cluster.kind(s).profile.engine.tensor_parallel_size for s in range(len(self.cluster))]
        return sum(gpus[s] * (end_s - start_s) for s, start_s, end_s in spans) / 3600.0

    @cached_property
    def servers(self) -> tuple[Simulation, ...]:
        """One simulation for each server; its workload is the requests that it got, as a trace."""
        return tuple(self._server(s) for s in range(len(self.cluster)))

    def _server(self, s: int) -> Simulation:
        setup, workload = self.setups[s], self.workload
        raw = Raw.nothing(len(workload))
        if self.state is not None:
            raw = _raw(self.state, s, self.duration_s)
            workload = workload.with_arrivals(Arrivals("trace", trace=raw.requests))
            if len(setup.workload) < len(workload):
                number = {name: i for i, name in enumerate(workload.names)}
                workload = workload.subset([number[name] for name in setup.workload.names])
                assert workload.arrivals.trace is not None
                refused = np.zeros(len(workload), dtype=np.int64)
                raw = replace(raw, requests=workload.arrivals.trace, refused=refused)
        return Simulation(
            self.status, self.status_reason, workload, setup.profile, setup.settings, self.duration_s,
            self.seed, setup.kv_cache_tokens, raw, self.timeline_bin_s,
        )  # fmt: skip

    @cached_property
    def server_timeline(self) -> pl.DataFrame:
        """The timeline of each server: server, then the columns of `Simulation.timeline`, and busy_share."""
        found = []
        for s, server in enumerate(self.servers):
            frame = server.timeline
            busy = server.raw.timeline[:, rows.T_BUSY]
            left_s = self.duration_s - np.arange(len(busy)) * self.timeline_bin_s
            share = np.minimum(1.0, busy / np.minimum(self.timeline_bin_s, np.maximum(left_s, 1e-9)))
            number = pl.Series("server", np.full(len(frame), s))
            found.append(frame.with_columns(pl.Series("busy_share", share)).insert_column(0, number))
        return pl.concat(found)

    @property
    def server_of_requests(self) -> IntArray:
        """The server of each request, int64 (requests,); negative where it has none."""
        return np.zeros(0, dtype=np.int64) if self.state is None else self.state.server

    @cached_property
    def per_server(self) -> pl.DataFrame:
        """One row per server: server, kind, the figures of `Simulation.to_dict` that are numbers."""
        found = []
        for s, server in enumerate(self.servers):
            figures = {key: value for key, value in server.to_dict().items() if key in _PER_SERVER}
            found.append({"server": s, "kind": self.cluster.servers[s], **figures})
        return pl.DataFrame(found, infer_schema_length=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able summary: the keys of `Simulation.to_dict`, and those of a cluster; NaN becomes None."""
        found = {key: value for key, value in super().to_dict().items() if key not in _ONE_SERVER}
        figures = {name: getattr(self, name) for name in CLUSTER_FIGURES}
        return (
            found
            | {"system": self.system, "router": self.router, "servers": len(self.cluster)}
            | {"slo": self.slo, "aborted": self.aborted}
            | {name: None if math.isnan(value) else value for name, value in figures.items()}
        )


CLUSTER_FIGURES = ("slo_attainment", "goodput_tok_s", "hit_rate", "host_hit_rate", "cold_start_share")
"""What a cluster's result has beyond that of a server."""
_ONE_SERVER = ("profile", "calibrated", "max_loras", "max_lora_rank")
_PER_SERVER = (
    "sent", "completed", "total_token_throughput", "starved", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "mean_running", "max_running", "mean_waiting", "mean_kv_usage", "preemptions", "adapter_loads",
    "busy_share",
)  # fmt: skip


def _raw(state: Servers, server: int | None, end_s: float) -> Raw:
    """The requests of a server with its totals; None: of all of them, with the sums over servers."""
    of: slice | IntArray = slice(None)
    if server is not None:  # in the order in which they reached it, those still on their way left out
        of = np.flatnonzero((state.server == server) & (state.status > 0))
        of = of[np.argsort(state.times[of, rows.SENT_AT], kind="stable")]
    arrived = state.status[of] > 0
    prompt = np.where(arrived, state.requests[of, rows.PROMPT], state.prompt[of])
    output = np.where(arrived, state.requests[of, rows.OUTPUT], state.output[of])
    times = state.times[of]
    one = slice(None) if server is None else slice(server, server + 1)
    ints, floats, timeline = state.ints[one], state.floats[one], state.timeline[one]
    totals, real = ints.sum(axis=0), floats.sum(axis=0)
    totals[rows.SENT] = len(times)
    totals[rows.TAKEN] = int(arrived.sum())
    totals[rows.PEAK_RUNNING] = ints[:, rows.PEAK_RUNNING].max()
    real[rows.BUSY_S] /= len(ints)
    table = timeline.sum(axis=0)
    table[:, rows.T_BUSY] /= len(ints)
    # A server's own requests came when they reached it; the cluster's when they reached the router.
    sent_s = state.sent_s[of] if server is None else times[:, rows.SENT_AT]
    return Raw(
        RequestTrace(sent_s, state.adapter[of], prompt, output, end_s=end_s),
        np.zeros(len(state.ranks), dtype=np.int64),  # the requests that were refused are among the rows
        float((prompt + output).sum()),
        np.where(arrived, times[:, rows.FIRST_SEEN], np.nan),
        np.where(arrived, times[:, rows.FINISH_SEEN], np.nan),
        (state.status[of] == rows.FINISHED) & (times[:, rows.FINISH_SEEN] <= end_s),
        totals,
        real,
        state.histogram[one].sum(axis=0),
        table,
        np.zeros(0),
        times,
        state.tuning.registers[one].sum(axis=0),
        _found(state, of),
    )


def _found(state: Servers, of: slice | IntArray) -> IntArray | None:
    """As `Raw.found`."""
    if state.ahead is None or not len(state.ahead.pool.found):
        return None
    found: IntArray = state.ahead.pool.found[of].astype(np.int64)
    return found
