"""What servers did in a simulation: times of the engine, gaps between tokens, adapters, GPU-hours, frames."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.io.frames import pl
from packer.twin.engine import state as rows

if TYPE_CHECKING:
    from packer.twin.run import Run

SHOWN = (
    "sent", "completed", "total_token_throughput", "starved", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "mean_running", "max_running", "mean_waiting", "mean_kv_usage", "preemptions", "adapter_loads", "busy_share",
)  # fmt: skip
"""Figures of a server in the frame of all servers."""


def mean(values: FloatArray) -> float:
    """Return the mean; NaN without values."""
    return float(values.mean()) if len(values) else math.nan


def quantiles(ordered: FloatArray, *shares: float) -> tuple[float, ...]:
    """Return the quantiles of sorted values at these shares, interpolated as `numpy.quantile` does; NaN without values.
    NumPy sorts in less time than it finds several quantiles."""
    found = []
    for place in ((len(ordered) - 1) * share for share in shares if len(ordered)):
        below = int(place)
        low, high = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
        part = place - below
        # `numpy.quantile` interpolates from the nearer of the two values.
        found.append(low + (high - low) * part if part < 0.5 else high - (high - low) * (1.0 - part))
    return tuple(found) or (math.nan,) * len(shares)


def tokens(run: Run, side: str) -> float:
    """Return the input or output tokens of completed requests."""
    return float(getattr(run.raw.requests, side)[run.raw.finished].sum())


def engine_ms(run: Run, start: int, end: int) -> FloatArray:
    """Return the time of completed requests in the engine between two of `Raw.engine_s`, ms, float64 (completed,)."""
    span_s = run.raw.engine_s[run.raw.finished]
    return (span_s[:, end] - span_s[:, start]) * 1e3


def engine_mean_tpot_ms(run: Run) -> float:
    """See `Run.engine_mean_tpot_ms`."""
    count = run.raw.requests.output_tokens[run.raw.finished]
    return mean((engine_ms(run, 1, 2) / np.maximum(count - 1, 1))[count > 1])


def gaps(run: Run) -> IntArray:
    """See `Run.gaps`. None where whole requests are served as jobs, whose first token is their last."""
    raw, done = run.raw, run.raw.finished
    jobs = (raw.finish_s[done] == raw.first_s[done]).all()
    return (raw.requests.output_tokens[done] - 1) * (not jobs)


def mean_itl_ms(run: Run) -> float:
    """See `Run.mean_itl_ms`."""
    raw = run.raw
    done = np.flatnonzero(raw.finished)
    count = int(run.gaps.sum())
    span_s = float((raw.finish_s[done] - raw.first_s[done]).sum())
    merged = int(raw.server["merged"])
    share = merged / max(merged + int(raw.histogram.sum()), 1)
    seen = count * (1.0 - share)  # 0 where the front end stands still for longer than every request runs
    return span_s * 1e3 / seen if seen else math.nan


def itl_quantile(run: Run, q: float) -> float:
    """Return a quantile of the gaps between tokens, ms, from a histogram with bins of 0.7 %."""
    total = int(run.raw.histogram.sum())
    if not total:
        return math.nan
    k = int(np.searchsorted(np.cumsum(run.raw.histogram), q * total))
    return float(rows.HISTOGRAM_FLOOR_MS * math.exp((k + 0.5) / rows.HISTOGRAM_PER_E))


def mean_state(run: Run, column: str) -> float:
    """Return the time-weighted mean of a column of the timeline."""
    found = float(run.raw.timeline[column].sum() / run.duration_s)
    return found if run.status == "ok" else math.nan


def mean_kv_usage(run: Run) -> float:
    """See `Run.mean_kv_usage`."""
    blocks = run.kv_cache_tokens // run.profile.engine.block_size
    return mean_state(run, "kv_blocks") / blocks if blocks > 0 else math.nan


def refused(run: Run) -> int:
    """See `Run.refused`. In a cluster, requests that are on their way at the end are sent but not taken."""
    if run.raw.turned_away is None:
        return run.sent - int(run.raw.server["taken"]) - run.held_back
    return int(run.raw.turned_away.sum()) - run.held_back


def held_back(run: Run) -> int:
    """See `Run.held_back`. Servers of a cluster never see what its client holds back."""
    if not run.paced:
        return 0
    if run.state is not None:
        from packer.twin.cluster.state import REFUSED

        return int(np.count_nonzero(run.state.server == REFUSED))
    return run.sent - int(run.raw.server["taken"]) if run.raw.turned_away is None else 0


def hit_rate(run: Run) -> float:
    """See `Run.hit_rate`."""
    server = run.raw.server
    # A request is admitted once, and again after each preemption.
    left = int(server["pending_count"] + server["waiting"]) + run.aborted
    admissions = int(server["taken"]) - left + run.preemptions
    misses = run.adapter_loads - int(server["unawaited"])
    return 1.0 - misses / admissions if admissions else math.nan


def host_hit_rate(run: Run) -> float:
    """See `Run.host_hit_rate`."""
    if run.transit is None or not np.isfinite(run.transit.room).any():
        return math.nan
    from packer.twin.cluster.transit import HITS, MISSES

    hits, misses = run.transit.counts[HITS], run.transit.counts[MISSES]
    return float(hits / (hits + misses)) if hits + misses else math.nan


def cold_start_share(run: Run) -> float:
    """See `Run.cold_start_share`."""
    done = np.flatnonzero(run.raw.finished)
    latency_s = float((run.raw.finish_s[done] - run.raw.requests.time_s[done]).sum())
    return float(run.raw.server["stall_s"]) / latency_s if latency_s else math.nan


def gpu_hours(run: Run) -> float:
    """See `Run.gpu_hours`."""
    profiles = [run.profile]
    if run.cluster is not None:
        profiles = [run.cluster.kind(s).profile for s in range(len(run.cluster))]
    spans = run.spans or tuple((s, 0.0, run.duration_s) for s in range(len(profiles)))
    return sum(profiles[s].engine.gpus * (end_s - start_s) for s, start_s, end_s in spans) / 3600.0


def server_timeline(run: Run) -> pl.DataFrame:
    """See `Run.server_timeline`."""
    found = []
    for s, server in enumerate(run.servers):
        frame = server.timeline
        busy = server.raw.timeline["busy"]
        left_s = run.duration_s - np.arange(len(busy)) * run.timeline_bin_s
        share = np.minimum(1.0, busy / np.minimum(run.timeline_bin_s, np.maximum(left_s, 1e-9)))
        number = pl.Series("server", np.full(len(frame), s))
        found.append(frame.with_columns(pl.Series("busy_share", share)).insert_column(0, number))
    return pl.concat(found)


def per_server_frame(run: Run) -> pl.DataFrame:
    """See `Run.per_server`."""
    kinds = (run.profile.name,) if run.cluster is None else run.cluster.servers
    found = []
    for s, server in enumerate(run.servers):
        shown = {key: value for key, value in server.to_dict().items() if key in SHOWN}
        found.append({"server": s, "kind": kinds[s], **shown})
    return pl.DataFrame(found, infer_schema_length=None)
