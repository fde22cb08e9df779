"""Frames and summaries of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from packer.io.frames import pl

if TYPE_CHECKING:
    from packer.twin.run import Run

SUMMARY = (
    "offered_tok_s", "sent", "refused", "completed", "request_throughput", "input_throughput", "output_throughput",
    "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "penalized_mean_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "p99_itl_ms", "mean_running", "max_running",
    "mean_waiting", "mean_kv_usage", "preemptions", "adapter_loads", "disk_loads", "loads_per_request", "engine_steps",
    "busy_share", "worst_adapter_ttft_ms", "slo_attainment", "goodput_tok_s",
)  # fmt: skip


CLUSTER_SUMMARY = ("slo_attainment", "goodput_tok_s", "hit_rate", "host_hit_rate", "cold_start_share")
"""Fields that the summary of a cluster has and the summary of a server lacks."""
ONE_SERVER = ("profile", "calibrated", "max_loras", "max_lora_rank")
"""Fields that the summary of a server has and the summary of a cluster lacks."""


def summary(run: Run) -> dict[str, Any]:
    """See `Run.to_dict`."""
    values: dict[str, Any] = {
        **{name: getattr(run, name) for name in ("status", "status_reason", "starved", "stable")},
        "profile": run.profile.name,
        "calibrated": run.profile.calibrated,
        "workload": run.workload.name,
        "adapters": len(run.workload),
        **{name: getattr(run, name) for name in ("max_loras", "max_lora_rank", "kv_cache_tokens")},
        "duration": run.duration_s,
        "seed": run.seed,
    }
    if run.concurrency is not None:
        values["max_concurrency"] = run.concurrency
    values |= _figures(run, SUMMARY)
    if run.paced:
        values["held_back"] = run.held_back
    if run.raw.found is not None:
        values |= _figures(run, ("prefix_hit_rate",))
    if run.raw.drafts is not None:
        values |= _figures(run, ("draft_acceptance", "draft_acceptance_needed"))
    if run.tuning is not None:
        values["tuning"] = run.tuning.to_dict()
    if run.cluster is not None:
        values = {name: value for name, value in values.items() if name not in ONE_SERVER}
        values |= {"system": run.system, "router": run.router, "servers": len(run.cluster)}
        values |= {"slo": run.slo, "aborted": run.aborted, **_figures(run, CLUSTER_SUMMARY)}
    return values


def _figures(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Figures by name; NaN becomes None."""
    found = {name: getattr(run, name) for name in names}
    return {name: None if value != value else value for name, value in found.items()}


def requests_frame(sim: Run) -> pl.DataFrame:
    """See `Run.requests`."""
    names, raw, server = np.array(sim.workload.names, dtype=object), sim.raw, sim.server_of_requests
    columns: dict[str, Any] = {
        "request": np.arange(len(raw.requests)),
        "adapter": pl.Series(names[raw.requests.adapter].tolist(), dtype=pl.String),
        "server": pl.Series(np.where(server >= 0, server, np.nan), nan_to_null=True).cast(pl.Int64),
        "sent_s": raw.requests.time_s,
        **{name: getattr(raw, name) for name in ("first_s", "finish_s")},
        **{name: getattr(raw.requests, name) for name in ("input_tokens", "output_tokens")},
    }
    return pl.DataFrame(columns, nan_to_null=True)  # no lazy query, whose threads hang in forked processes


def timeline_frame(sim: Run) -> pl.DataFrame:
    """See `Run.timeline`."""
    table = sim.raw.timeline
    # Steps belong to the bin in which they start, so a bin may hold a little more than its width.
    width = np.minimum(sim.timeline_bin_s, sim.duration_s - np.arange(len(table)) * sim.timeline_bin_s)
    width = np.maximum(width, table["busy"])
    blocks = max(sim.kv_cache_tokens // sim.profile.engine.block_size, 1)
    return pl.DataFrame(
        {
            "time_s": (np.arange(len(table)) + 1) * sim.timeline_bin_s,
            "running": table["running"] / width,
            "waiting": table["waiting"] / width,
            "kv_usage": table["kv_blocks"] / width / blocks,
            "active_adapters": table["adapters"] / width,
            **{f"{kind}_tokens": table[kind].astype(np.int64) for kind in ("prefill", "decode")},
            "preemptions": table["preempted"].astype(np.int64),
        }
    )
