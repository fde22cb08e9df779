"""How much of what was sent to a server it completed: the one definition behind "starved"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from packer.arrival import RequestTrace
    from packer.twin.run import Run

SETTLING_S = 1.0
SLOW_TOKEN_MS = 100.0
"""Allowance for a request that a trace's end cuts off: its prefill, and time per token where none is known."""


def served_share(sim: Run) -> float:
    """Tokens completed / tokens sent in one simulation, in [0, 1]; 1 when nothing was sent.

    The requests that one run happens to draw vary by several percent in number and length, which says nothing
    about the server: so the share is of what was sent, not of the nominal load. Of a replayed trace only
    requests count that could have been completed by its end.
    """
    if sim.status != "ok":
        return 0.0
    if sim.closed_loop:  # what is outstanding at the end is not left behind
        return 1.0
    if sim.workload.arrivals.trace is not None and not sim.paced:
        requests = sim.raw.requests
        return due_share(requests, sim.raw.finished, sim.duration_s, sim.mean_tpot_ms)
    if not sim.sent_tokens:
        return 1.0
    return min(sim.total_token_throughput * sim.duration_s / sim.sent_tokens, 1.0)  # but for rounding


def due_share(
    requests: RequestTrace, finished: npt.NDArray[np.bool_], duration_s: float, mean_tpot_ms: float
) -> float:
    """Tokens completed / tokens due: of requests that had enough time for their output once they ran.

    A trace may be short or have few requests; the last ones would always count as unserved. What a request
    needs is taken from the run itself, without the time in the queue.

    `requests`, `finished`: n requests, and bool (n,) whether each completed within `duration_s`.
    `mean_tpot_ms`: NaN where no request of the run has one.
    """
    tokens = requests.input_tokens + requests.output_tokens
    ms_per_token = mean_tpot_ms if math.isfinite(mean_tpot_ms) else SLOW_TOKEN_MS
    needed_s = SETTLING_S + requests.output_tokens * ms_per_token * 1e-3
    due = requests.time_s + needed_s <= duration_s
    total = float(tokens[due].sum())
    return float(tokens[due & finished].sum()) / total if total else 1.0
