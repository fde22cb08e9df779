"""Watches that end a simulated hour once a server certainly breaks limits of its adapters, or has a queue."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray, Record
from packer.goal import STATISTICS, metric
from packer.twin.engine.state import FINISHED, ServerState
from packer.twin.per_adapter import ENOUGH
from packer.workload import Workload

PARTS = (0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8)  # Shares of a run after which the watch checks it.
CALM = 8  # Up to this number of waiting requests no queue has grown: such a run is only checked after `SELDOM`.
SELDOM = (0.4,)
USUAL = {"p95_ttft_ms", "mean_itl_ms"}  # With limits of these alone, a server that has no queue hardly breaks one.
_ABOVE = 1.0 + 1e-9


class BrokenError(Exception):
    """A server certainly uses more than `most` of its limits, or has a longer queue (`QueueWatch`). `part`: share of
    the run after which that was certain. `kv_usage`: mean share of the KV blocks in use until then. `late`: numbers of
    adapters of the server that certainly use more than `most`."""

    def __init__(self, most: float, part: float, kv_usage: float, late: tuple[int, ...] = ()) -> None:
        super().__init__(f"more than {most:g} of the limits is used")
        self.most, self.part, self.kv_usage, self.late = most, part, kv_usage, late


@dataclass(frozen=True, slots=True)
class Watch:
    """A check during a run of a server whether its `Run.slo_used` will be above `most`.

    A quantile q of n values is above a limit if n - floor(q (n - 1)) of them are. An adapter completes at most the
    requests that it sends. The result is certain once that many of these, plus one for rounding, took longer; of a
    mean, once the sum of their times does not fit all that are sent. Limits of mean ITL, of servers and of requests are
    not checked: they can only increase the share that is used.
    """

    most: float

    def __call__(self, state: ServerState, workload: Workload, duration_s: float, part: float) -> None:
        """Raises `BrokenError`: the result is certain after this part of the run."""
        now_s = part * duration_s
        keys = workload.slo.keys("adapter")
        if USUAL.issuperset(keys) and state.server["waiting"] <= CALM and part not in SELDOM:
            return
        sent = state.requests[: int(state.server["sent"])]
        done = np.flatnonzero((sent["status"] == FINISHED) & (sent["finish_seen_s"] <= now_s))
        m = len(workload)
        beyond, certain_s = np.zeros(m, dtype=np.bool_), math.inf
        offered = np.bincount(state.requests["owner"], minlength=m)
        allowed = m - math.ceil(workload.slo.adapter_share * m - 1e-9)
        for key in keys:
            limit_ms = workload.slo.column(workload, key) * self.most * _ABOVE
            if key != "mean_itl_ms" and np.isfinite(limit_ms).any():
                own, first_s = _beyond(*_times(sent, done, metric(key)), offered, limit_ms, key, now_s)
                beyond, certain_s = beyond | own, min(certain_s, first_s)
        if int(beyond.sum()) <= allowed:
            return
        blocks = float(state.timeline["kv_blocks"].sum()) / now_s / max(1, int(state.server["kv_blocks"]))
        raise BrokenError(self.most, certain_s / duration_s, blocks, tuple(np.flatnonzero(beyond).tolist()))


def _times(sent: Record, done: IntArray, what: str) -> tuple[FloatArray, IntArray, FloatArray]:
    """Return "ttft", "e2e" or (of two tokens and more) "tpot" of completed requests, ms, their adapters, and when they
    were completed, s; as `Run.requests_ms`."""
    if what == "tpot":
        done = done[sent["output"][done] > 1]
    finish_s = sent["finish_seen_s"][done]
    begin_s, end_s = sent["first_seen_s" if what == "tpot" else "sent_s"][done], finish_s
    if what == "ttft":
        end_s = sent["first_seen_s"][done]
    times_ms = (end_s - begin_s) * 1e3
    return times_ms / (sent["output"][done] - 1) if what == "tpot" else times_ms, sent["owner"][done], finish_s


def _beyond(
    times_ms: FloatArray, owner: IntArray, finish_s: FloatArray, offered: IntArray, limit_ms: FloatArray, key: str,
    now_s: float,
) -> tuple[BoolArray, float]:  # fmt: skip
    """Return which adapters certainly exceed a limit on a statistic of completed requests (`_times`), bool (m,), and
    when that was certain of the first, s. `offered`: the number that each adapter sends in all."""
    m, statistic = len(offered), key.partition("_")[0]
    if times_ms.max(initial=0.0) <= limit_ms.min():
        return np.zeros(m, dtype=np.bool_), math.inf
    completed, enough = np.bincount(owner, minlength=m), ENOUGH[statistic]
    few = (offered < enough) & (completed > 0)  # Adapters with few requests have the statistic of their server.
    all_sent = np.array([offered.sum()])
    if statistic == "mean":
        own = (completed >= enough) & (np.bincount(owner, times_ms, m) > limit_ms * offered)
        pooled = few & (times_ms.sum() > limit_ms * all_sent)
        return own | pooled, now_s if (own | pooled).any() else math.inf
    quantile = STATISTICS[statistic]
    late = times_ms > limit_ms[owner]
    own = (completed >= enough) & (np.bincount(owner[late], minlength=m) >= _enough(offered, quantile))
    longer = len(times_ms) - np.searchsorted(np.sort(times_ms), limit_ms, side="right")
    pooled = few & (longer >= _enough(all_sent, quantile))
    if own.any():
        which = late & own[owner]
        return own | pooled, _when(finish_s[which], owner[which], _enough(offered, quantile))
    if pooled.any():
        which = times_ms > limit_ms[pooled].min()
        return pooled, _when(finish_s[which], 0 * owner[which], _enough(all_sent, quantile))
    return pooled, math.inf


@dataclass(frozen=True, slots=True)
class QueueWatch(Watch):
    """A check during a run of a server whether more than `most` requests will have waited on average."""

    def __call__(self, state: ServerState, workload: Workload, duration_s: float, part: float) -> None:
        """Raises `BrokenError`: enough requests have waited long enough already."""
        if float(state.timeline["waiting"].sum()) > self.most * duration_s * _ABOVE:
            raise BrokenError(self.most, part, math.nan)


def _enough(sent: IntArray, quantile: float) -> IntArray:
    """Return how many of at most `sent` requests must exceed a value so that this quantile of them exceeds it."""
    found: IntArray = sent - np.floor(quantile * (sent - 1)).astype(np.int64) + 1
    return found


def _when(finish_s: FloatArray, owner: IntArray, enough: IntArray) -> float:
    """Return when `enough` late requests of the first adapter were completed, s."""
    order = np.lexsort((finish_s, owner))
    owner, finish_s = owner[order], finish_s[order]
    which, first = np.unique(owner, return_index=True)
    return float(finish_s[first + enough[which] - 1].min())
