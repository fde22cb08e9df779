"""Figures of the report as plain data; the words of the page are in its template."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.bin import Bin
from packer.errors import InputError
from packer.evaluation import Evaluation
from packer.export.formats import start_commands
from packer.plan import Plan
from packer.room import growth
from packer.twin.memory.policy import memory_policy

GIB = 2.0**30
AdapterRow = tuple[str, int, tuple[str, ...]]
"""Name and rank of an adapter, and what is shown of it."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of a stacked bar: share of the whole in percent, class of its colour, and what it is."""

    percent: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class GpuCard:
    """One GPU: its server and figures, bars of load and memory, adapters (name, rank, rate, offered load, share, mean
    TTFT, p95 TTFT, mean ITL, within limits) and the command that starts it.
    """

    server: Bin
    figures: Evaluation
    ranks: str
    load: tuple[Bar, ...]
    memory: tuple[Bar, ...]
    headroom: str
    rows: tuple[AdapterRow, ...]
    start: str

    @property
    def state(self) -> str:
        """What is wrong with the GPU, or "holds"."""
        if self.figures.memory_error:
            return "memory error"
        if self.figures.starved:
            return "starved"
        return "beyond limits" if self.figures.slo_used > 1.0 else "holds"


def visible(text: str) -> str:
    """A name with its control and direction marks shown as escapes; everything else as it is."""
    if text.isprintable():
        return text
    return "".join(
        sign if unicodedata.category(sign)[0] not in "CZ" or sign == " " else ascii(sign)[1:-1]
        for sign in text
    )


def number(value: float | None, digits: int = 0) -> str:
    """A number for people; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}"


def milliseconds(value: float | None) -> str:
    """A latency with the unit that fits."""
    if value is None or not math.isfinite(value):
        return "–"
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def slowest(values_ms: npt.NDArray[np.float64]) -> str:
    """The largest latency that is known."""
    return milliseconds(max((value for value in values_ms.tolist() if math.isfinite(value)), default=None))


def percent(share: float | None) -> str:
    """A share in percent; a dash where there is none."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.1f} %"


def counted(count: int, name: str) -> str:
    """A number of things: "1 GPU", "2 GPUs"."""
    return f"{number(count)} {plural(count, name)}"


def plural(count: int, name: str) -> str:
    """The name of one thing or of several."""
    return name if count == 1 else f"{name}s"


def gpu_cards(plan: Plan) -> tuple[GpuCard, ...]:
    """One card for each GPU, in order."""
    try:
        starts = start_commands(plan)
    except InputError:  # an infeasible plan, another engine, a name that no command line can hold
        starts = []
    most = max((evaluation.offered_tok_s for evaluation in plan.evaluations), default=0.0) or 1.0
    rooms = [growth(factor) for factor in plan.headroom] or ["–"] * len(plan.bins)
    return tuple(
        GpuCard(
            server=server,
            figures=figures,
            ranks=_ranks(plan, server),
            load=_load_bars(figures, most),
            memory=memory_bars(server, figures),
            headroom=rooms[index],
            rows=_adapter_rows(plan, server),
            start=starts[index] if starts else "",
        )
        for index, (server, figures) in enumerate(zip(plan.bins, plan.evaluations, strict=True))
    )


def _ranks(plan: Plan, item: Bin) -> str:
    """How many adapters of each rank a GPU has, "3 × r32, 1 × r8"."""
    ranks = Counter(plan.workload.adapters[i].rank for i in item.adapters)
    return ", ".join(f"{count} × r{rank}" for rank, count in sorted(ranks.items(), reverse=True))


def _load_bars(figures: Evaluation, most: float) -> tuple[Bar, Bar]:
    """What a GPU serves and does not serve, in percent of the largest load of a GPU."""
    served = min(1.0, max(0.0, figures.served_share)) if math.isfinite(figures.served_share) else 0.0
    length = 100 * figures.offered_tok_s / most
    return (
        Bar(round(length * served, 2), "served", f"{number(figures.total_token_throughput)} tok/s served"),
        Bar(round(length * (1 - served), 2), "unserved", "not served in time"),
    )


def _adapter_rows(plan: Plan, item: Bin) -> tuple[AdapterRow, ...]:
    """Adapters of a GPU, the largest load first; latencies are those over all their servers."""
    fleet, known = plan.workload, plan.adapters
    order = sorted(
        zip(item.adapters, item.shares, strict=True),
        key=lambda row: -float(fleet.offered_tok_s_by_adapter[row[0]]) * row[1],
    )
    rows: list[AdapterRow] = []
    for i, share in order:
        latencies = ["–"] * 4
        if known is not None:
            columns = (known.mean_ttft_ms, known.p95_ttft_ms, known.mean_itl_ms)
            latencies = [milliseconds(float(column[i])) for column in columns]
            latencies.append(percent(float(known.slo_attainment[i])))
        load = number(float(fleet.offered_tok_s_by_adapter[i]) * share, 1)
        rate = f"{fleet.adapters[i].rate * share:.4g}"
        part = f"{100 * share:.0f} %"
        rows.append((visible(fleet.names[i]), fleet.adapters[i].rank, (rate, load, part, *latencies)))
    return tuple(rows)


def memory_bars(item: Bin, evaluation: Evaluation) -> tuple[Bar, ...]:
    """The GPU's memory: weights, what is reserved for adapters, KV cache, the rest; GiB and percent of the GPU."""
    profile = item.profile
    policy = memory_policy(profile)
    total = profile.gpu.memory_bytes * profile.engine.tensor_parallel_size
    reserved = policy.reserved_bytes(profile, item.settings)
    kv = evaluation.kv_cache_tokens * profile.model.kv_bytes_per_token
    parts = [
        ("weights", profile.model.weights_bytes, "weights"),
        ("slots", reserved, policy.taken_by(item.settings)),
        ("kv", kv if math.isfinite(kv) else 0.0, policy.kv_label),
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
    """The share of requests within their latency limits, and goodput, tok/s; None where some server's is not known."""
    rows = list(plan.evaluations)
    if not rows or not all(math.isfinite(row.slo_attainment) for row in rows):
        return None
    rates = [float(item.rates(plan.workload).sum()) for item in plan.bins]
    share = sum(row.slo_attainment * rate for row, rate in zip(rows, rates, strict=True)) / sum(rates)
    return share, sum(row.goodput_tok_s for row in rows)


def queueing(plan: Plan) -> list[str]:
    """GPUs whose requests wait longer than their limits although the plan counts as feasible, and how many GPUs would
    keep them."""
    if plan.details.get("decision"):
        return []
    ttft = plan.evaluations.mean_ttft_ms.tolist()
    slow = [(k, value) for k, value in enumerate(ttft) if value > plan.workload.slo.limits.p95_ttft_ms]
    lines = [f"GPU {k} queues: mean TTFT {value / 1000:.1f} s" for k, value in slow[:8]]
    if slow:
        more = f", as do {len(slow) - 8} more" if len(slow) > 8 else ""
        within: Any = plan.details.get("within_goal") or {}
        same = " as well" if within.get("gpus") == plan.n_gpus else ""
        takes = f"{within['objective']} takes {counted(within['gpus'], 'GPU')}{same}. " if within else ""
        lines[-1] += more
        lines.append(
            f"{takes}Without --objective, packer solve finds the plan that keeps {plan.workload.slo}."
        )
    return lines
