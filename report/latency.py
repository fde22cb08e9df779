"""Latencies of each adapter of a plan, from a simulated hour of its servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.plan import Plan
from packer.twin.simulate import simulate

MOST_GPUS = 256
"""Above, no adapter's latency is shown: an hour of a server takes up to a tenth of a second."""


@dataclass(frozen=True, eq=False)
class AdapterLatencies:
    """Columns over the adapters of one GPU in the order of its bin, ms, float64 (adapters,); NaN: none completed."""

    mean_ttft_ms: npt.NDArray[np.float64]
    p95_ttft_ms: npt.NDArray[np.float64]
    mean_itl_ms: npt.NDArray[np.float64]


def adapter_latencies(
    plan: Plan,
    *,
    seed: int = 0,
    duration_s: float | None = None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> list[AdapterLatencies | None]:
    """Latencies on each GPU in a simulated hour, or over a replayed trace.

    None where the server does not start, and for plans of more than `MOST_GPUS`.
    """
    if plan.n_gpus > MOST_GPUS:
        return [None] * plan.n_gpus
    found: list[AdapterLatencies | None] = []
    for number, item in enumerate(plan.bins):
        progress("latencies of adapters", number, plan.n_gpus)
        run = simulate(
            item.workload(plan.workload),
            item.profile,
            max_loras=item.max_loras,
            max_lora_rank=item.max_lora_rank,
            duration_s=duration_s,
            seed=seed,
        )
        started = run.status == "ok"
        figures = (run.adapter_mean_ttft_ms, run.adapter_p95_ttft_ms, run.adapter_mean_itl_ms)
        found.append(AdapterLatencies(*figures) if started else None)
    return found
