"""Watches that end a simulated hour once a server certainly breaks its limits of TTFT, or has a queue."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.twin.engine.state import FINISHED, ServerState
from packer.twin.per_adapter import FEW_REQUESTS
from packer.workload import Workload

PARTS = (0.04, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8)  # Shares of a run after which the watch checks it.
CALM = 8  # Up to this number of waiting requests no queue has grown: such a run is only checked after `SELDOM`.
SELDOM = (0.4,)
_ABOVE = 1.0 + 1e-9


class BrokenError(Exception):
    """A server certainly uses more than `most` of its limits, or has a longer queue (`QueueWatch`). `part`: share of
    the run after which that was certain. `kv_usage`: mean share of the KV blocks in use until then."""

    def __init__(self, most: float, part: float, kv_usage: float) -> None:
        super().__init__(f"more than {most:g} of the limits is used")
        self.most, self.part, self.kv_usage = most, part, kv_usage


@dataclass(frozen=True, slots=True)
class Watch:
    """A check during a run of a server whether its `Run.slo_used` will be above `most`.

    A 95th percentile of n values is above a limit if n - floor(0.95 (n - 1)) of them are. An adapter completes at most
    the requests that it sends. The result is certain once that many of these, plus one for rounding, have waited
    longer. Only limits of an adapter's p95 TTFT are checked; other limits can only increase the share that is used.
    """

    most: float

    def __call__(self, state: ServerState, workload: Workload, duration_s: float, part: float) -> None:
        """Raises `BrokenError`: the result is certain after this part of the run."""
        now_s = part * duration_s
        if state.server["waiting"] <= CALM and part not in SELDOM:
            return
        limit_ms = workload.slo.column(workload, "p95_ttft_ms") * self.most * _ABOVE
        if not np.isfinite(limit_ms).any():
            return
        sent = state.requests[: int(state.server["sent"])]
        done = np.flatnonzero((sent["status"] == FINISHED) & (sent["finish_seen_s"] <= now_s))
        owner = sent["owner"][done]
        ttft_ms = (sent["first_seen_s"][done] - sent["sent_s"][done]) * 1e3
        if ttft_ms.max(initial=0.0) <= limit_ms.min():
            return
        m = len(workload)
        offered, completed = (np.bincount(state.requests["owner"], minlength=m), np.bincount(owner, minlength=m))
        late = ttft_ms > limit_ms[owner]
        own = (completed >= FEW_REQUESTS) & (np.bincount(owner[late], minlength=m) >= _enough(offered))
        # Adapters with few requests have the percentile of their server.
        few = (offered < FEW_REQUESTS) & (completed > 0)
        longer = len(ttft_ms) - np.searchsorted(np.sort(ttft_ms), limit_ms, side="right")
        pooled = few & (longer >= _enough(np.array([offered.sum()])))
        allowed = m - math.ceil(workload.slo.adapter_share * m - 1e-9)
        if int((own | pooled).sum()) <= allowed:
            return
        which = late & own[owner] if own.any() else ttft_ms > limit_ms[pooled].min()
        certain_s = _when(sent["finish_seen_s"][done][which], owner[which], offered, pooled=not own.any())
        blocks = float(state.timeline["kv_blocks"].sum()) / now_s / max(1, int(state.server["kv_blocks"]))
        raise BrokenError(self.most, certain_s / duration_s, blocks)


@dataclass(frozen=True, slots=True)
class QueueWatch(Watch):
    """A check during a run of a server whether more than `most` requests will have waited on average."""

    def __call__(self, state: ServerState, workload: Workload, duration_s: float, part: float) -> None:
        """Raises `BrokenError`: enough requests have waited long enough already."""
        if float(state.timeline["waiting"].sum()) > self.most * duration_s * _ABOVE:
            raise BrokenError(self.most, part, math.nan)


def _enough(sent: IntArray) -> IntArray:
    """Return how many of at most `sent` requests must exceed a value so that their 95th percentile exceeds it."""
    found: IntArray = sent - np.floor(0.95 * (sent - 1)).astype(np.int64) + 1
    return found


def _when(finish_s: FloatArray, owner: IntArray, sent: IntArray, *, pooled: bool) -> float:
    """Return when enough late requests of the first adapter were completed, or of all adapters together, s."""
    if pooled:
        return float(np.sort(finish_s)[min(len(finish_s), int(_enough(np.array([sent.sum()]))[0])) - 1])
    order = np.lexsort((finish_s, owner))
    owner, finish_s = owner[order], finish_s[order]
    which, first = np.unique(owner, return_index=True)
    return float(finish_s[first + _enough(sent[which]) - 1].min())
