"""Figures of the report as plain data; the text of the page is in its template."""

from __future__ import annotations

import math
from dataclasses import dataclass

from packer.arrays import FloatArray
from packer.bin import Bin
from packer.errors import InputError
from packer.evaluation import mean_of
from packer.export.formats import start_commands
from packer.plan import Plan
from packer.times import HOUR_S
from packer.twin.memory.policy import held, kv_cache_tokens, memory_policy
from packer.twin.tuning.policy import kv_tokens_of
from packer.words import counted, number, visible
from packer.workload import Workload

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a stacked bar: share of the whole in percent, CSS class of its colour, and its label."""

    percent: float
    kind: str
    text: str


def milliseconds(value: float | None) -> str:
    """A latency with the unit that fits."""
    if value is None or not math.isfinite(value):
        return "–"
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def slowest(values_ms: FloatArray) -> str:
    """The largest latency that is known."""
    return milliseconds(max((value for value in values_ms.tolist() if math.isfinite(value)), default=None))


def percent(share: float | None) -> str:
    """A share in percent; a dash where there is none."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


def starts(plan: Plan) -> tuple[list[str], str]:
    """The commands that start the servers, or why there are none."""
    try:
        return start_commands(plan), ""
    except InputError as error:
        return [], visible(str(error))


def by_load(plan: Plan, item: Bin) -> list[tuple[int, float]]:
    """Adapters of a server with their shares, the largest load first."""
    loads, held = plan.workload.offered_tok_s_by_adapter, zip(item.adapters, item.shares, strict=True)
    return sorted(held, key=lambda row: -float(loads[row[0]]) * row[1])


def memory_bars(item: Bin, fleet: Workload) -> tuple[Bar, ...]:
    """Memory of a server's GPUs by use, GiB and percent: weights, slots, KV cache, and the rest with any training."""
    profile = item.profile
    policy = memory_policy(profile)
    total = profile.gpu.memory_bytes
    settings = held(profile, item.settings, item.workload(fleet))
    reserved = policy.reserved_bytes(profile, settings)
    tokens = max(0, kv_cache_tokens(profile, settings, reserved=kv_tokens_of(fleet.fine_tuning, profile)))
    parts = [
        ("weights", profile.model.weights_bytes, "weights"),
        ("slots", reserved, policy.taken_by(settings)),
        ("kv", tokens * profile.model.kv_bytes_per_token, policy.kv_label),
    ]
    used = sum(size for _, size, _ in parts)
    parts.append(("rest", max(0.0, total - used), "activations, graphs, unused"))
    whole = max(total, used)
    return tuple(
        Bar(round(100 * size / whole, 2), kind, f"{text}: {size / GIB:.1f} GiB")
        for kind, size, text in parts
        if size or kind != "slots"
    )


def in_limits(plan: Plan) -> tuple[float, float] | None:
    """Share of requests within their latency limits, and goodput, tok/s; None if it is not known of some server."""
    rows = list(plan.evaluations)
    if not rows or not all(math.isfinite(row.slo_attainment) for row in rows):
        return None
    share = mean_of(plan.evaluations.slo_attainment, [item.requests_s(plan.workload) for item in plan.bins])
    return share, sum(row.goodput_tok_s for row in rows)


def resimulated(plan: Plan) -> str:
    """How the plan was simulated again at the end, and whether it held, in words."""
    arrivals = plan.workload.arrivals
    run_s = arrivals.whole_s(HOUR_S)
    hours = run_s / HOUR_S
    if plan.verified is None:
        return "re-simulated: not done"
    how = " with a fresh seed"  # until it is clear whether a server starves
    if arrivals.trace is not None:
        how = ""
    elif plan.evaluated_s is not None:
        for_hours = " for an hour" if hours == 1.0 else f" for {hours:g} hours"
        for_hours = for_hours if hours.is_integer() else f" for {number(run_s)} s"
        how = f" for {plan.evaluated_s:g} s" if plan.evaluated_s else for_hours
    elif plan.objective == "recommend":
        how = " on a fresh hour" if hours == 1.0 else f" on {hours:g} fresh hours"
        how = how if hours.is_integer() else f" on a fresh run of {number(run_s)} s"
    return f"re-simulated{how}: {'it holds' if plan.verified else 'it breaks'}"


def queueing(plan: Plan) -> list[str]:
    """Servers that queue beyond their limits in a feasible plan, and the GPUs that keep these, in words."""
    if plan.objective == "recommend":
        return []
    ttft = plan.evaluations.mean_ttft_ms.tolist()
    slow = [(k, value) for k, value in enumerate(ttft) if value > plan.workload.slo.limits.p95_ttft_ms]
    lines = [f"server {k} queues: mean TTFT {value / 1000:.1f} s" for k, value in slow[:8]]
    if slow:
        more = f", as do {len(slow) - 8} more" if len(slow) > 8 else ""
        within = plan.within_goal
        same = " as well" if within.get("gpus") == plan.n_gpus else ""
        takes = f"{within['objective']} takes {counted(within['gpus'], 'GPU')}{same}. " if within else ""
        lines[-1] += more
        lines.append(f"{takes}Without --objective, packer solve finds the plan that keeps {plan.workload.slo}.")
    return lines
