"""How much of its latency limits each adapter uses."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from packer.twin.result import Simulation

FEW_REQUESTS = 20
"""With fewer completed requests than this, an adapter's 95th percentile is that of its server."""

FloatArray = npt.NDArray[np.float64]


def used_of_slo(sim: Simulation) -> FloatArray:
    """How much of its limits (`Workload.slo`) each adapter uses, float64 (m,): 1 is all of it, more breaks them.

    Infinite where the server does not start, starves or has a queue that grows.
    """
    if sim.status != "ok" or sim.starved or not sim.stable:
        return np.full(len(sim.workload), math.inf)
    ttft_limit_ms, itl_limit_ms = sim.workload.slo.columns(sim.workload)
    itl_ms = np.nan_to_num(sim.adapter_mean_itl_ms, nan=0.0)
    worst: FloatArray = np.maximum(adapter_p95_ttft_ms(sim) / ttft_limit_ms, itl_ms / itl_limit_ms)
    return worst


def adapter_p95_ttft_ms(sim: Simulation) -> FloatArray:
    """The 95th percentile of each adapter's TTFT, ms, float64 (m,); 0 without a completed request.

    An adapter with fewer than `FEW_REQUESTS` has no 95th percentile of its own: it gets that of all requests of
    its server, or its mean where that is higher.
    """
    if sim.raw is None:
        return np.full(len(sim.workload), math.nan)
    done = sim.raw.requests.adapter[sim.raw.finished]
    number = np.bincount(done, minlength=len(sim.workload))
    everyone = float(np.quantile(sim.ttft_ms, 0.95)) if len(done) else 0.0
    mean = np.nan_to_num(sim.adapter_mean_ttft_ms, nan=0.0)
    own = np.nan_to_num(sim.adapter_p95_ttft_ms, nan=0.0)
    pooled = np.where(number > 0, np.maximum(mean, everyone), 0.0)
    found: FloatArray = np.where(number >= FEW_REQUESTS, own, pooled)
    return found
