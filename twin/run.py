"""Results of a simulation: the requests, the server's record, and every figure that is derived from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from packer.arrays import BoolArray, FloatArray, IntArray
from packer.errors import UnknownNameError
from packer.evaluation import STARVATION_THRESHOLD
from packer.goal import STATISTICS
from packer.memo import cached_property
from packer.profile import Profile
from packer.settings import Settings
from packer.twin import per_adapter as figures
from packer.twin import per_server as by_server
from packer.twin.server import Raw, Server
from packer.twin.stability import is_stable, served_share
from packer.twin.timeline import requests_frame, summary, timeline_frame
from packer.twin.tuning.policy import Trained, trains
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.cluster import Cluster
    from packer.twin.cluster.state import Servers
    from packer.twin.cluster.transit import Transit


def _field(name: str) -> cached_property[int]:
    return cached_property(lambda sim: int(sim.raw.server[name]))


@dataclass(frozen=True, eq=False)
class Run:
    """Result of a simulation of servers; one server is a cluster of one.

    Names follow `vllm bench serve`; latencies in ms over completed requests of all servers. Counts and throughput are
    sums over servers, `busy_share` is their mean, `max_running` their maximum; `profile` and `settings` are those of
    the first server. With `status` "memory_error" a server does not start: nothing is served and latencies are NaN.
    `cluster`, `system`, `router`, `setups`, `state`, `transit`: of `simulate_cluster`. `spans`: (server, start, end) of
    the times in which servers ran, s, if servers changed.
    """

    status: Literal["ok", "memory_error"]
    status_reason: str
    workload: Workload = field(repr=False)
    profile: Profile = field(repr=False)
    settings: Settings
    duration_s: float
    seed: int
    kv_cache_tokens: int
    raw: Raw = field(repr=False)
    timeline_bin_s: float = 10.0
    concurrency: int | None = None
    paced: bool = False
    cluster: Cluster | None = field(default=None, repr=False)
    system: str = "vllm"
    router: str = ""
    setups: Sequence[Server] = field(default=(), repr=False)
    state: Servers | None = field(default=None, repr=False)
    transit: Transit | None = field(default=None, repr=False)
    spans: tuple[tuple[int, float, float], ...] | None = field(default=None, repr=False)
    max_outstanding: int | None = None

    max_loras = cached_property(lambda self: int(self.settings.max_loras))  # Slots: adapters on the GPU at once.
    max_lora_rank = cached_property(lambda self: int(self.settings.max_lora_rank))  # Largest rank that it takes.

    # ---- counts and throughput
    @property
    def closed_loop(self) -> bool:
        """Whether each request was sent when another one finished, so that the load adapts to the server."""
        return self.concurrency is not None and not self.paced

    @property
    def offered_tok_s(self) -> float:
        """Offered load, tok/s; if rates change, a trace is replayed or the loop is closed, the load that was sent."""
        steady = self.workload.arrivals.kind in ("poisson", "lognormal") and not self.closed_loop
        if not steady and self.status == "ok":
            return self.raw.sent_tokens / self.duration_s
        return self.workload.offered_tok_s

    @cached_property
    def _completed(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.raw.finished)

    sent = _field("sent")
    """Requests offered, also those refused or held back: completed + refused + held back + unfinished, those open or
    on their way at the end."""
    sent_tokens = cached_property(lambda self: float(self.raw.sent_tokens))
    """Input + output tokens of all requests sent, including those refused or held back."""
    refused = cached_property(by_server.refused)
    """Requests that the client did not send because `max_outstanding` were open, or that a full server refused."""

    @cached_property
    def refused_by_server(self) -> int:
        """Those of `refused` that found `max_num_queued_reqs` requests at their server, before its client's limit."""
        queue, turned_away = self.profile.engine.max_num_queued_reqs, self.raw.turned_away
        if turned_away is None:
            return self.refused if queue is not None and queue < (self.max_outstanding or math.inf) else 0
        return self.refused if self.state is None else int((turned_away & (self.state.server >= 0)).sum())

    refused_by_client = cached_property(lambda self: int(self.refused - self.refused_by_server))
    """The others of `refused`, also those for which a router knows no server."""
    held_back = cached_property(by_server.held_back)
    """Requests that wait at a `paced` client for a place at the end of the run; 0 for other clients."""
    completed = cached_property(lambda self: len(self._completed))  # Requests that got all their tokens.
    request_throughput = cached_property(lambda self: float(self.completed / self.duration_s))  # Completed requests/s.
    input_throughput = cached_property(lambda self: by_server.tokens(self, "input_tokens") / self.duration_s)
    """Input tokens of completed requests / duration, tok/s."""
    output_throughput = cached_property(lambda self: by_server.tokens(self, "output_tokens") / self.duration_s)
    """Output tokens of completed requests / duration, tok/s."""
    total_token_throughput = cached_property(lambda self: float(self.input_throughput + self.output_throughput))
    """Input + output tokens of completed requests / duration, tok/s."""

    served_share = cached_property(served_share)  # Tokens completed / tokens sent; see `packer.twin.stability`.

    @property
    def starved(self) -> bool:
        """Completed less than 0.9 of the tokens sent; a server that does not start is starved."""
        return self.served_share < STARVATION_THRESHOLD

    stable = cached_property(is_stable)  # Whether this run shows no growing queue; see `packer.twin.stability`.

    preemptions = _field("preemptions")  # Requests preempted because no KV block was free; they are recomputed.

    cached_tokens = cached_property(lambda self: int(figures.found(self)[0].sum()))
    """Prompt tokens that were found in the KV cache when their requests were first admitted."""
    prefix_hit_rate = cached_property(figures.prefix_hit_rate)
    """`cached_tokens` as a part of the prompt tokens of admitted requests; NaN without prefix caching."""
    adapter_prefix_hit_rate = cached_property(figures.prefix_hit_rates)
    """`prefix_hit_rate` of each adapter, float64 (adapters,); NaN where none of its requests was admitted."""
    adapter_loads = _field("adapter_loads")  # Times that an adapter was brought into a slot.
    disk_loads = _field("disk_loads")  # Adapter loads that came from disk.
    draft_acceptance = cached_property(figures.draft_acceptance)  # Kept / all drafts of speculative decoding, or NaN.
    draft_acceptance_needed = cached_property(figures.draft_acceptance_needed)
    """`draft_acceptance` from which on the server is no slower than without speculative decoding; NaN without it."""

    @property
    def loads_per_request(self) -> float:
        """Adapter loads per completed request; NaN where nothing completed."""
        return self.adapter_loads / self.completed if self.completed else math.nan

    metric_series = _field("series")  # Series of `vllm:lora_requests_info` at the end; 0 without scrapes of /metrics.
    metric_names = _field("names")  # Adapters named in the labels of these series.
    engine_mean_ttft_ms = cached_property(lambda self: by_server.mean(by_server.engine_ms(self, 0, 1)))
    """Mean TTFT within the engine, ms: without the front end, over completed requests."""
    engine_mean_tpot_ms = cached_property(by_server.engine_mean_tpot_ms)
    """Mean TPOT within the engine, ms, over completed requests with at least two tokens."""
    engine_steps = cached_property(lambda self: int(self.raw.server["step"] + self.raw.server["in_flight"]))
    """Engine steps."""
    busy_share = cached_property(lambda self: float(min(1.0, self.raw.server["busy_s"] / self.duration_s)))
    """Part of the time in which the engine had something to do."""

    @cached_property
    def tuning(self) -> Trained | None:
        """Results of training during the run; None if the server does not train."""
        job = self.workload.fine_tuning
        if self.raw.tuning is None or job is None or not trains(job):
            return None
        return Trained(job.policy, self.raw.tuning, self.duration_s, self.engine_steps)

    tuning_tok_s = cached_property(lambda self: float(self.tuning.tok_s if self.tuning else 0.0))
    """Tokens per second of samples whose training was complete; 0 if the server does not train."""

    # ---- latency
    @cached_property
    def ttft_ms(self) -> FloatArray:
        """TTFT of each completed request, ms, float64 (completed,)."""
        done = self._completed
        return (self.raw.first_s[done] - self.raw.requests.time_s[done]) * 1e3

    gaps = cached_property(by_server.gaps)  # Gaps between the tokens of each completed request, int64 (completed,).

    @cached_property
    def tpot_ms(self) -> FloatArray:
        """Time per output token after the first of each completed request with at least two, ms."""
        many = self.gaps > 0
        done, gaps = self._completed[many], self.gaps[many]
        return (self.raw.finish_s[done] - self.raw.first_s[done]) * 1e3 / gaps

    e2e_ms = cached_property(lambda self: (self.raw.finish_s - self.raw.requests.time_s)[self._completed] * 1e3)
    """Time from sending to the last token of each completed request, ms, float64 (completed,)."""

    def requests_ms(self, what: str) -> tuple[FloatArray, IntArray]:
        """Return "ttft", "e2e" or (of two tokens and more) "tpot" of completed requests, ms, and their adapters."""
        owners = self.owners
        if what == "tpot":
            owners = owners[self.gaps > 0]
        return getattr(self, f"{what}_ms"), owners

    def figure(self, key: str) -> float:
        """Return a statistic over all requests by its key in a goal, such as "p90_e2e_ms"; NaN where there is none."""
        if isinstance(found := getattr(self, key, None), float):
            return found
        statistic, _, what = key.removesuffix("_ms").partition("_")
        if what == "itl":
            return by_server.itl_quantile(self, STATISTICS[statistic])
        return figures.statistic_of(self.requests_ms(what)[0], statistic)

    mean_ttft_ms = cached_property(lambda self: by_server.mean(self.ttft_ms))  # Mean TTFT.
    sorted_ttft_ms = cached_property(lambda self: np.sort(self.ttft_ms))
    """`ttft_ms` in ascending order."""
    ttft_quantiles_ms = cached_property(lambda self: by_server.quantiles(self.sorted_ttft_ms, 0.5, 0.95, 0.99))
    """Median, 95th and 99th percentile of TTFT."""
    median_ttft_ms = cached_property(lambda self: float(self.ttft_quantiles_ms[0]))  # Median TTFT.
    p99_ttft_ms = cached_property(lambda self: float(self.ttft_quantiles_ms[2]))  # 99th percentile of TTFT.
    mean_tpot_ms = cached_property(lambda self: by_server.mean(self.tpot_ms))  # Mean TPOT, over requests.
    tpot_quantiles_ms = cached_property(lambda self: by_server.quantiles(np.sort(self.tpot_ms), 0.5, 0.99))
    """Median and 99th percentile of TPOT."""
    median_tpot_ms = cached_property(lambda self: float(self.tpot_quantiles_ms[0]))  # Median TPOT.
    p99_tpot_ms = cached_property(lambda self: float(self.tpot_quantiles_ms[1]))  # 99th percentile of TPOT.

    mean_itl_ms = cached_property(by_server.mean_itl_ms)
    """Mean gap between chunks of completed requests: tokens, or several that left the front end together."""
    median_itl_ms = cached_property(lambda self: by_server.itl_quantile(self, 0.5))
    """Median gap, over all tokens that came out; from a histogram with bins of 0.7 %."""
    p99_itl_ms = cached_property(lambda self: by_server.itl_quantile(self, 0.99))  # From the same histogram.

    @cached_property
    def penalized_mean_ttft_ms(self) -> float:
        """The paper's TTFT: a request unfinished at the end counts as the whole duration."""
        if not self.sent:
            return 0.0 if self.status == "ok" else math.nan
        unfinished = self.sent - self.completed
        return float((self.ttft_ms.sum() + unfinished * self.duration_s * 1e3) / self.sent)

    # ---- frames
    mean_running = cached_property(lambda self: by_server.mean_state(self, "running"))  # Time-weighted mean.
    mean_waiting = cached_property(lambda self: by_server.mean_state(self, "waiting"))  # Time-weighted mean.
    mean_kv_usage = cached_property(by_server.mean_kv_usage)  # Time-weighted mean share of the KV blocks in use.
    max_running = _field("peak_running")  # Largest batch.

    timeline = cached_property(timeline_frame)
    """Means over bins of `timeline_bin_s`: time_s (end of bin), running, waiting, kv_usage, active_adapters; sums:
    prefill_tokens, decode_tokens, preemptions."""

    per_adapter = cached_property(figures.per_adapter_frame)
    """One row per adapter: adapter, rank, rate, sent, completed, input_tokens and output_tokens of completed requests,
    total_token_throughput; mean_ttft_ms, p95_ttft_ms, mean_tpot_ms, mean_itl_ms, slo_attainment, null without these."""
    adapter_mean_ttft_ms = cached_property(figures.mean_ttft_ms)
    """Mean TTFT of each adapter, ms, float64 (adapters,); NaN where nothing completed."""
    adapter_p95_ttft_ms = cached_property(figures.p95_ttft_ms)
    """95th percentile of TTFT of each adapter, ms, float64 (adapters,); NaN where nothing completed."""
    adapter_pooled_p95_ttft_ms = cached_property(figures.pooled_p95_ttft_ms)
    """That of all requests for adapters with few requests; see `packer.twin.per_adapter.pooled_p95_ttft_ms`."""
    spans_and_gaps = cached_property(figures.spans_and_gaps)
    """Time from the first to the last token of completed requests, ms, and gaps between tokens, of each adapter."""
    adapter_mean_itl_ms = cached_property(figures.mean_itl_ms)
    """Mean gap between tokens of each adapter, ms, float64 (adapters,); NaN where no gap completed."""

    # ---- servers
    def server(self, k: int) -> Run:
        """The run of one server; in a cluster its workload is the requests that it got, as a trace."""
        if self.cluster is None:
            return self
        from packer.twin.cluster.result import server_view

        return server_view(self, k)

    @cached_property
    def rows_of_servers(self) -> tuple[BoolArray, list[IntArray]]:
        """See `packer.twin.cluster.result.rows_by_server`."""
        from packer.twin.cluster.result import rows_by_server

        assert self.state is not None
        return rows_by_server(self.state)

    @cached_property
    def servers(self) -> tuple[Run, ...]:
        """One run for each server."""
        return tuple(self.server(k) for k in range(len(self.cluster or "1")))

    def adapter(self, which: int | str) -> dict[str, Any]:
        """The row of `per_adapter` of one adapter, by its number or its name. Raises `UnknownNameError`: there is
        none."""
        names = self.workload.names
        number = names.index(which) if which in names else which
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise UnknownNameError("adapter", str(which), names)
        return self.per_adapter.row(number, named=True)

    @property
    def server_of_requests(self) -> IntArray:
        """The server of each request, int64 (requests,); negative where it has none."""
        return np.zeros(len(self.raw.requests), dtype=np.int64) if self.state is None else self.state.server

    server_timeline = cached_property(by_server.server_timeline)
    """The timeline of each server: server, then the columns of `timeline`, and busy_share."""
    per_server = cached_property(by_server.per_server_frame)
    """One row per server: server, kind, and the figures `packer.twin.per_server.SHOWN`."""
    hit_rate = cached_property(by_server.hit_rate)  # Share of admissions whose adapter was on the GPU; NaN without any.
    host_hit_rate = cached_property(by_server.host_hit_rate)
    """Requests whose adapter was in the host memory of their node / requests; NaN if it holds everything."""
    aborted = _field("aborted")  # Requests that a server gave up while they waited (early abort).
    cold_start_share = cached_property(by_server.cold_start_share)
    """Time that requests in a batch waited for loads of any adapter / latency; NaN without completed requests."""
    gpu_hours = cached_property(by_server.gpu_hours)
    """GPUs × hours in which they ran, with the start-up of servers and the end of their last requests."""

    requests = cached_property(requests_frame)
    """One row per request in order of arrival: request, adapter, server, sent_s, first_s, finish_s, input_tokens,
    output_tokens; null if a request has no server, or did not get that far. For one server, requests that the client
    refused or holds back have no row.
    """

    owners = cached_property(lambda self: np.asarray(self.raw.requests.adapter[self.raw.finished]))
    """Adapter of each completed request, int64 (completed,)."""
    completed_of = cached_property(figures.sums)  # Completed requests of each adapter, float64 (adapters,).

    # ---- service level
    kept_requests = cached_property(figures.kept_requests)
    """Which requests kept the limits of their adapter, and which broke them, bool (requests,) each."""
    late = cached_property(figures.late)
    """Send times, s, and TTFT, ms, of the requests that waited longer than their limit, float64 (2, late)."""
    slo_counts = cached_property(figures.slo_counts)
    """Requests of each adapter that kept its limits, and those that kept or broke them, float64 (adapters,) each."""
    adapter_slo_attainment = cached_property(lambda self: figures.ratio(*self.slo_counts))
    """Share of each adapter's requests within its limits (`Workload.slo`), float64 (adapters,); NaN if undecided."""
    adapter_slo_used = cached_property(figures.slo_used)
    """Share of its limits that each adapter uses, float64 (adapters,); see `packer.twin.per_adapter.slo_used`."""

    @cached_property
    def slo_used(self) -> float:
        """Share of its limits that the adapter at quantile `adapter_share` uses; above 1 too few adapters keep them. If
        every adapter must keep its limits, the chance of adapters with few requests counts, too (`few_used`). Limits of
        servers and of requests always count."""
        used = self.adapter_slo_used
        others = max(self.server_slo_used, figures.requests_used(self))
        if self.workload.slo.adapter_share == 1.0 and np.isfinite(used).all():
            return figures.few_used(self, max(float(used.max()), others))
        share = self.workload.slo.adapter_share
        return max(float(np.sort(used)[math.ceil(share * len(used) - 1e-9) - 1]), others)

    server_slo_used = cached_property(figures.server_used)  # Largest used share of servers' limits; 0 without any.
    slo = cached_property(lambda self: dict(self.workload.slo.limits.to_dict()))  # The limits of the goal.

    worst_adapter_ttft_ms = cached_property(
        lambda self: float(self.adapter_pooled_p95_ttft_ms.max()) if self.completed else math.nan
    )
    """The highest of `adapter_pooled_p95_ttft_ms`; NaN where nothing completed, or an adapter gets too few answers."""

    @property
    def slo_attainment(self) -> float:
        """Share of all requests within the limits of `Workload.slo`; those undecided at the end are left out. NaN where
        none was decided, or without limits."""
        if not self.workload.slo.of_requests(self.workload):
            return math.nan
        kept, decided = self.slo_counts
        return float(kept.sum() / decided.sum()) if decided.any() else math.nan

    @cached_property
    def goodput_tok_s(self) -> float:
        """Throughput of the requests within the limits of `Workload.slo`, tok/s."""
        requests = self.raw.requests
        tokens = (requests.input_tokens + requests.output_tokens)[self.kept_requests[0]]
        return float(tokens.sum() / self.duration_s)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able summary with the keys of `vllm bench serve` where it has them; NaN becomes None."""
        found = summary(self) | {"refused_by_client": self.refused_by_client}
        if any(each.profile.engine.max_num_queued_reqs is not None for each in self.setups or (self,)):
            found["refused_by_server"] = self.refused_by_server
        return found


Simulation = Run  # The name under which scripts know `Run`.
