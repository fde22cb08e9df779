"""Contents of the report as plain data: every number of the page is made here, the template only places it."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Any

from packer.bin import Bin
from packer.errors import InputError
from packer.evaluation import Evaluation
from packer.export.formats import start_commands
from packer.plan import Plan, Status
from packer.room import growth
from packer.twin.memory.policy import memory_policy
from packer.twin.per_adapter import quiet_adapters

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


def _in_limits(plan: Plan) -> tuple[str, str, str] | None:
    """The share of requests within their latency limits, and goodput; None where some server's is not known."""
    rows = list(plan.evaluations)
    if not rows or not all(math.isfinite(row.slo_attainment) for row in rows):
        return None
    rates = [float(item.rates(plan.workload).sum()) for item in plan.bins]
    share = sum(row.slo_attainment * rate for row, rate in zip(rows, rates, strict=True)) / sum(rates)
    goodput = sum(row.goodput_tok_s for row in rows)
    return percent(share), "of requests in limits", f"{number(goodput)} tok/s goodput"


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


def headline(plan: Plan) -> list[tuple[str, str, str]]:
    """The plan at a glance: (value, what it is, remark)."""
    fleet, rows = plan.workload, list(plan.evaluations)
    served = sum(row.total_token_throughput for row in rows)
    offered = sum(row.offered_tok_s for row in rows)
    worst_ttft = max((row.mean_ttft_ms for row in rows if math.isfinite(row.mean_ttft_ms)), default=math.nan)
    worst_itl = max((row.mean_itl_ms for row in rows if math.isfinite(row.mean_itl_ms)), default=math.nan)
    placed = len(fleet) - len(plan.unplaced)
    bound = "no bound" if plan.lower_bound is None else f"at least {plan.lower_bound:,.6g} needed"
    kept = "breaks the latency goal" if plan.status is Status.INFEASIBLE else "within the latency goal"
    goal = {"gpus": bound, "recommend": kept}.get(plan.objective, plan.objective)
    kept_share = _in_limits(plan)
    found = [
        (number(plan.n_gpus), plural(plan.n_gpus, "GPU"), goal),
        (number(placed), f"{plural(placed, 'adapter')} placed", f"of {len(fleet):,}"),
        (number(offered), "tok/s offered", f"{fleet.rate:,.1f} requests/s"),
        kept_share
        or (
            f"{100 * served / offered:.1f} %" if offered else "–",
            "served",
            f"{number(served)} tok/s predicted",
        ),
        (milliseconds(worst_ttft), "slowest TTFT", "mean of one GPU"),
        (milliseconds(worst_itl), "slowest ITL", "mean of one GPU"),
    ]
    prices = [item.profile.gpu.price_per_hour for item in plan.bins]
    if prices and all(price is not None for price in prices):
        found.append((f"{sum(price or 0.0 for price in prices):,.2f}", "per hour", "by the profiles' prices"))
    return found


def bound_text(plan: Plan) -> str:
    """What the lower bound means for this plan, in sentences."""
    if plan.status is Status.INFEASIBLE:
        missed = "serves every adapter" if plan.unplaced else "keeps what it is made for"
        return f"No plan was found that {missed}; the reasons are below."
    relative = f"by the predictor {plan.predictor!r}, whose own error is below"
    if plan.lower_bound is None:
        return f"No lower bound was computed: a better plan may exist. The plan is evaluated {relative}."
    source = f" ({plan.bound_source})" if plan.bound_source else ""
    best = f"{plan.lower_bound:,.6g}{source}"
    if plan.status is Status.OPTIMAL:
        return f"This plan is optimal: none does better than {best}, as evaluated {relative}."
    if plan.gap == 0:
        return f"No better plan is known, and none was found possible: the bound is {best}, as evaluated {relative}."
    if plan.objective in ("gpus", "moves"):
        return (
            f"{counted(plan.n_gpus, 'GPU')}; at least {best} needed, as evaluated {relative}. The best plan lies "
            "between the two."
        )
    return (
        f"Every plan needs at least {plan.lower_bound:,.6g}{source}, as evaluated {relative}. "
        f"This plan is within {100 * (plan.gap or 0.0):.1f} % of that bound; the best lies between the two."
    )


def lengths_text(plan: Plan) -> str:
    """Mean lengths of a request, and whether they were given."""
    fleet = plan.workload
    share = fleet.rates / fleet.rate
    means = (
        f"{share @ fleet.mean_input_tokens:,.0f} in, {share @ fleet.mean_output_tokens:,.0f} out on average"
    )
    assumed = fleet.assumed_lengths
    return f"not given: ShareGPT's, {means}" if assumed else means


def plan_facts(plan: Plan) -> list[tuple[str, str]]:
    """How the plan was found."""
    checked = {True: "it holds", False: "at least one GPU breaks", None: "not done"}[plan.verified]
    facts = [
        ("Workload", plan.workload.name),
        ("Status", plan.status.value),
        ("Objective", plan.goal),
        ("Latency limits", str(plan.workload.slo)),
        ("Solver", f"{plan.solver}, {plan.runtime_s:,.2f} s"),
        ("Predictor", plan.predictor),
        ("Re-simulated on a fresh hour", checked),
        ("Rates raised by", "–" if plan.margin is None else f"{100 * plan.margin:.1f} %"),
        *([("Few requests", quiet)] if (quiet := quiet_adapters(plan.workload)) else []),
        ("Arrivals", plan.workload.arrivals.description),
        ("Token lengths", lengths_text(plan)),
        ("Seed", str(plan.seed)),
    ]
    facts += [(f"Version of {name}", version) for name, version in plan.versions.items()]
    return [(visible(key), visible(value)) for key, value in facts]
