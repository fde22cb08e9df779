"""What a simulation of one server found."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from packer.evaluation import STARVATION_THRESHOLD
from packer.profile import Profile
from packer.settings import Settings
from packer.twin import per_adapter as figures
from packer.twin.engine import state as rows
from packer.twin.served import served_share
from packer.twin.server import Raw
from packer.twin.stability import is_stable
from packer.twin.tuning.policy import Trained
from packer.workload import Workload

if TYPE_CHECKING:
    import polars as pl

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """Result of a simulation. Names follow `vllm bench serve`; latencies in ms over completed requests.

    With `status` "memory_error" the server does not start: nothing is served and latencies are NaN.
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

    @property
    def max_loras(self) -> int:
        """Adapters on the GPU at once."""
        return self.settings.max_loras

    @property
    def max_lora_rank(self) -> int:
        """Largest rank that the server takes."""
        return self.settings.max_lora_rank

    # ---- counts and throughput
    @property
    def offered_tok_s(self) -> float:
        """Offered load, tok/s; where rates change or a trace is replayed, what was really sent."""
        if self.workload.arrivals.kind not in ("poisson", "lognormal") and self.status == "ok":
            return self.raw.sent_tokens / self.duration_s
        return self.workload.offered_tok_s

    @cached_property
    def _completed(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.raw.finished)

    @property
    def sent(self) -> int:
        """Requests sent, those refused by the client's ceiling included."""
        return self._count(rows.SENT)

    @property
    def sent_tokens(self) -> float:
        """Input + output tokens of all requests sent; refused ones at the mean if none were drawn."""
        return self.raw.sent_tokens

    @property
    def refused(self) -> int:
        """Requests that the client could not send because too many were outstanding."""
        return self.sent - self._count(rows.TAKEN)

    @property
    def completed(self) -> int:
        """Requests that got all their tokens."""
        return len(self._completed)

    @property
    def request_throughput(self) -> float:
        """Completed requests / duration, req/s."""
        return self.completed / self.duration_s

    @property
    def input_throughput(self) -> float:
        """Input tokens of completed requests / duration, tok/s."""
        return self._tokens("input_tokens") / self.duration_s

    @property
    def output_throughput(self) -> float:
        """Output tokens of completed requests / duration, tok/s."""
        return self._tokens("output_tokens") / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        """Input + output tokens of completed requests / duration, tok/s."""
        return self.input_throughput + self.output_throughput

    @cached_property
    def served_share(self) -> float:
        """Tokens completed / tokens sent, in [0, 1]; see `packer.twin.served`."""
        return served_share(self)

    @property
    def starved(self) -> bool:
        """Completed less than 0.9 of the tokens sent; a server that does not start is starved."""
        return self.served_share < STARVATION_THRESHOLD

    @cached_property
    def stable(self) -> bool:
        """Whether the queue does not grow, as far as this run tells; see `packer.twin.stability.is_stable`."""
        return is_stable(self)

    @property
    def preemptions(self) -> int:
        """Requests thrown out of the batch for lack of KV blocks, to be recomputed."""
        return self._count(rows.PREEMPTIONS)

    @property
    def adapter_loads(self) -> int:
        """Times that an adapter was brought into a slot."""
        return self._count(rows.ADAPTER_LOADS)

    @property
    def disk_loads(self) -> int:
        """Of these, how many came from disk."""
        return self._count(rows.DISK_LOADS)

    @property
    def loads_per_request(self) -> float:
        """Adapter loads per completed request; NaN where nothing completed."""
        return self.adapter_loads / self.completed if self.completed else math.nan

    @property
    def metric_series(self) -> int:
        """Time series of `vllm:lora_requests_info` at the end; 0 where /metrics is not scraped."""
        return self._count(rows.SERIES)

    @property
    def metric_names(self) -> int:
        """Adapters named in the labels of these series."""
        return self._count(rows.NAMES)

    @cached_property
    def engine_mean_ttft_ms(self) -> float:
        """Mean TTFT within the engine, ms: without the front end, over completed requests."""
        return _mean(self._engine_ms(0, 1))

    @cached_property
    def engine_mean_tpot_ms(self) -> float:
        """Mean TPOT within the engine, ms, over completed requests with at least two tokens."""
        tokens = self.raw.requests.output_tokens[self._completed]
        return _mean((self._engine_ms(1, 2) / np.maximum(tokens - 1, 1))[tokens > 1])

    def _engine_ms(self, start: int, end: int) -> FloatArray:
        span_s = self.raw.engine_s[self._completed]
        out: FloatArray = (span_s[:, end] - span_s[:, start]) * 1e3
        return out

    @property
    def engine_steps(self) -> int:
        """Engine steps."""
        return self._count(rows.STEP) + self._count(rows.IN_FLIGHT)

    @property
    def busy_share(self) -> float:
        """Part of the time in which the engine had something to do."""
        return min(1.0, float(self.raw.floats[rows.BUSY_S]) / self.duration_s)

    @cached_property
    def tuning(self) -> Trained | None:
        """What training beside the requests came to; None if the server does not train."""
        job = self.workload.fine_tuning
        if self.raw.tuning is None or job is None:
            return None
        return Trained(job.policy, self.raw.tuning, self.duration_s, self.engine_steps)

    @property
    def tuning_tok_s(self) -> float:
        """Tokens of samples on which training was complete, per second; 0 if the server does not train."""
        return 0.0 if self.tuning is None else self.tuning.tok_s

    def _count(self, register: int) -> int:
        return int(self.raw.ints[register])

    def _tokens(self, side: str) -> float:
        return float(getattr(self.raw.requests, side)[self._completed].sum())

    # ---- latency
    @cached_property
    def ttft_ms(self) -> FloatArray:
        """TTFT of each completed request, ms, float64 (completed,)."""
        done = self._completed
        out: FloatArray = (self.raw.first_s[done] - self.raw.requests.time_s[done]) * 1e3
        return out

    @cached_property
    def tpot_ms(self) -> FloatArray:
        """Time per output token after the first of each completed request with at least two, ms."""
        done = self._completed
        tokens = self.raw.requests.output_tokens[done]
        many = tokens > 1
        done, tokens = done[many], tokens[many]
        out: FloatArray = (self.raw.finish_s[done] - self.raw.first_s[done]) * 1e3 / (tokens - 1)
        return out

    @cached_property
    def mean_ttft_ms(self) -> float:
        """Mean TTFT."""
        return _mean(self.ttft_ms)

    @cached_property
    def ttft_quantiles_ms(self) -> tuple[float, ...]:
        """Median, 95th and 99th percentile of TTFT."""
        return _quantiles(self.ttft_ms, 0.5, 0.95, 0.99)

    @property
    def median_ttft_ms(self) -> float:
        """Median TTFT."""
        return self.ttft_quantiles_ms[0]

    @property
    def p99_ttft_ms(self) -> float:
        """99th percentile of TTFT."""
        return self.ttft_quantiles_ms[2]

    @cached_property
    def mean_tpot_ms(self) -> float:
        """Mean TPOT, over requests."""
        return _mean(self.tpot_ms)

    @cached_property
    def median_tpot_ms(self) -> float:
        """Median TPOT."""
        return _quantiles(self.tpot_ms, 0.5)[0]

    @cached_property
    def p99_tpot_ms(self) -> float:
        """99th percentile of TPOT."""
        return _quantiles(self.tpot_ms, 0.99)[0]

    @cached_property
    def mean_itl_ms(self) -> float:
        """Mean gap between chunks of completed requests: tokens, or several that left the front end together."""
        done = self._completed
        gaps = int((self.raw.requests.output_tokens[done] - 1).sum())
        span_s = float((self.raw.finish_s[done] - self.raw.first_s[done]).sum())
        merged = self._count(rows.MERGED) / max(self._count(rows.GAPS), 1)
        return span_s * 1e3 / (gaps * (1.0 - merged)) if gaps else math.nan

    @cached_property
    def median_itl_ms(self) -> float:
        """Median gap, over all tokens that came out; from a histogram with bins of 0.7 %."""
        return self._itl_quantile(0.5)

    @cached_property
    def p99_itl_ms(self) -> float:
        """99th percentile of the gaps, likewise."""
        return self._itl_quantile(0.99)

    def _itl_quantile(self, q: float) -> float:
        total = int(self.raw.histogram.sum())
        if not total:
            return math.nan
        k = int(np.searchsorted(np.cumsum(self.raw.histogram), q * total))
        return float(rows.HISTOGRAM_FLOOR_MS * math.exp((k + 0.5) / rows.HISTOGRAM_PER_E))

    @cached_property
    def penalized_mean_ttft_ms(self) -> float:
        """The paper's TTFT: a request unfinished at the end counts as the whole duration."""
        if not self.sent:
            return 0.0 if self.status == "ok" else math.nan
        unfinished = self.sent - self.completed
        return float((self.ttft_ms.sum() + unfinished * self.duration_s * 1e3) / self.sent)

    # ---- frames
    @cached_property
    def mean_running(self) -> float:
        """Time-weighted mean of running requests."""
        return self._mean_state(rows.T_RUNNING)

    @cached_property
    def mean_waiting(self) -> float:
        """Time-weighted mean of waiting requests."""
        return self._mean_state(rows.T_WAITING)

    @cached_property
    def mean_kv_usage(self) -> float:
        """Time-weighted mean share of the KV blocks in use."""
        blocks = self.kv_cache_tokens // self.profile.engine.block_size
        return self._mean_state(rows.T_KV) / blocks if blocks > 0 else math.nan

    @property
    def max_running(self) -> int:
        """Largest batch."""
        return self._count(rows.PEAK_RUNNING)

    def _mean_state(self, column: int) -> float:
        mean = float(self.raw.timeline[:, column].sum() / self.duration_s)
        return mean if self.status == "ok" else math.nan

    @cached_property
    def timeline(self) -> pl.DataFrame:
        """Means over bins of `timeline_bin_s`: time_s (end of bin), running, waiting, kv_usage,
        active_adapters; sums: prefill_tokens, decode_tokens, preemptions.
        """
        from packer.twin.timeline import timeline_frame

        return timeline_frame(self)

    @cached_property
    def per_adapter(self) -> pl.DataFrame:
        """One row per adapter: adapter, rank, rate, sent, completed, input_tokens and output_tokens of
        completed requests, total_token_throughput, mean_ttft_ms, p95_ttft_ms, mean_tpot_ms, mean_itl_ms,
        slo_attainment (null where nothing completed).
        """
        return figures.per_adapter_frame(self)

    @cached_property
    def adapter_mean_ttft_ms(self) -> FloatArray:
        """Mean TTFT of each adapter, ms, float64 (adapters,); NaN where nothing completed."""
        return figures.mean_ttft_ms(self)

    @cached_property
    def adapter_p95_ttft_ms(self) -> FloatArray:
        """95th percentile of TTFT of each adapter, ms, float64 (adapters,); NaN where nothing completed."""
        return figures.quantile_ttft_ms(self, 0.95)

    @cached_property
    def adapter_pooled_p95_ttft_ms(self) -> FloatArray:
        """The same, of all requests for adapters with few; see `packer.twin.per_adapter.pooled_p95_ttft_ms`."""
        return figures.pooled_p95_ttft_ms(self)

    @cached_property
    def adapter_mean_itl_ms(self) -> FloatArray:
        """Mean gap between tokens of each adapter, ms, float64 (adapters,); NaN where no gap completed."""
        return figures.mean_itl_ms(self)

    # ---- service level
    @cached_property
    def kept_requests(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which requests kept the limits of their adapter, and which broke them, bool (requests,) each."""
        return figures.kept_requests(self)

    @cached_property
    def adapter_slo_attainment(self) -> FloatArray:
        """Share of each adapter's requests within its limits (`Workload.slo`), float64 (adapters,); or NaN."""
        return figures.slo_attainment(self)

    @cached_property
    def adapter_slo_used(self) -> FloatArray:
        """How much of its limits each adapter uses, float64 (adapters,); see `packer.twin.per_adapter.slo_used`."""
        return figures.slo_used(self)

    @property
    def slo_used(self) -> float:
        """That of the adapter at the quantile `adapter_share` of `Workload.slo`: above 1 too few keep their limits.

        Where every adapter must keep them, also the chance of those with few requests counts (`few_used`).
        """
        used = self.adapter_slo_used
        if self.workload.slo.adapter_share == 1.0 and np.isfinite(used).all():
            return max(float(used.max()), figures.few_used(self))
        return float(np.sort(used)[math.ceil(self.workload.slo.adapter_share * len(used) - 1e-9) - 1])

    @property
    def worst_adapter_ttft_ms(self) -> float:
        """The highest of `adapter_pooled_p95_ttft_ms`."""
        return float(self.adapter_pooled_p95_ttft_ms.max())

    @property
    def slo_attainment(self) -> float:
        """Share of all requests within the limits of `Workload.slo`; NaN where none was decided."""
        kept, decided = figures.slo_counts(self)
        return float(kept.sum() / decided.sum()) if decided.any() else math.nan

    @property
    def goodput_tok_s(self) -> float:
        """Throughput of the requests within the limits of `Workload.slo`, tok/s."""
        return figures.goodput_tok_s(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able summary with the keys of `vllm bench serve` where it has them; NaN becomes None."""
        from packer.twin.timeline import summary

        return summary(self)


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _quantiles(values: FloatArray, *shares: float) -> tuple[float, ...]:
    return tuple(np.quantile(values, shares).tolist()) if len(values) else (math.nan,) * len(shares)
