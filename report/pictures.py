"""Pictures of a simulation, a sweep, the memory of slots, a frontier and a comparison of solvers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from packer.evaluation import FIGURES, PLAN_FIGURES
from packer.goal import Limits
from packer.io.frames import pl
from packer.io.shipped import table
from packer.profile import Profile
from packer.report.figures import SERIES, Bars, Figure, Line, Mark, Panel, Scatter, Series, known
from packer.report.figures_svg import Chart, chart
from packer.twin.memory.policy import kv_cache_tokens

if TYPE_CHECKING:
    from packer.twin.run import Run


def simulation_figure(run: Run, *, title: str) -> Figure:
    """Requests, KV cache, adapters and tokens of a server over time; the offered load is marked."""
    timeline = run.timeline
    minutes = (timeline["time_s"] / 60).to_list()
    bin_s = timeline["time_s"][0]
    width_s = (run.duration_s - timeline["time_s"] + bin_s).clip(upper_bound=bin_s)  # the last may be short
    tokens = (timeline["prefill_tokens"] + timeline["decode_tokens"]) / width_s
    offered = Mark(run.offered_tok_s, "offered", axis="y")

    def panel(heading: str, unit: str, *marks: Mark, **columns: pl.Series) -> Panel:
        lines = [Line(minutes, column.to_list(), label) for label, column in columns.items()]
        return Panel(lines, title=heading, x_label="minutes", y_label=unit, marks=marks)

    requests = {"running": timeline["running"], "waiting": timeline["waiting"]}
    panels = [
        panel("Requests", "requests", **requests),
        panel("KV cache", "%", **{"in use": 100 * timeline["kv_usage"]}),
        panel("Adapters in the batch", "adapters", **{"in the batch": timeline["active_adapters"]}),
        panel("Tokens processed (prompts and outputs)", "tok/s", offered, processed=tokens),
    ]
    return Figure(panels, title=title)


def cluster_figure(run: Run, *, title: str) -> Figure:
    """A cluster over time: its total requests, and the spread of requests, busy time and memory over its servers."""
    timeline, servers = run.timeline, run.server_timeline
    minutes = (timeline["time_s"] / 60).to_list()
    outstanding = servers.with_columns((pl.col("running") + pl.col("waiting")).alias("requests"))

    def spread(heading: str, unit: str, column: str, factor: float = 1.0) -> Panel:
        """Minimum, median and maximum over the servers."""
        group = outstanding.group_by("time_s", maintain_order=True).agg(
            most=pl.col(column).max(), median=pl.col(column).median(), least=pl.col(column).min()
        )
        names = ("most", "median", "least")
        lines = [Line(minutes, (factor * group[name]).to_list(), name) for name in names]
        return Panel(lines, title=heading, x_label="minutes", y_label=unit)

    requests = [Line(minutes, timeline[name].to_list(), name) for name in ("running", "waiting")]
    panels = [
        Panel(requests, title="Requests of all servers", x_label="minutes", y_label="requests"),
        spread("Requests on a server", "requests", "requests"),
        spread("Busy time of a server", "%", "busy_share", 100.0),
        spread("Memory of a server in use", "%", "kv_usage", 100.0),
    ]
    return Figure(panels, title=title)


AXIS_LABELS = {"adapters": "adapters", "rate_factor": "rate factor", "max_loras": "max_loras"}
SWEPT = {"total_token_throughput": False, "mean_ttft_ms": True, "mean_itl_ms": False}
"""Figures to draw over an axis, and whether their scale is logarithmic."""


def sweep_figure(frame: pl.DataFrame, packs: pl.DataFrame, x_axis: str, *, title: str) -> Figure:
    """Curves of sorted rows over `x_axis`, one per pair of values of the other axes; `packs`: their Max_packs.
    Latencies end where a server starves: requests without an answer have none, and the others may have been quick."""
    others = [axis for axis in AXIS_LABELS if axis != x_axis]
    curves = dict(iter(frame.group_by(others, maintain_order=True)))
    # The name of a curve has the values of the axes that differ between the curves.
    varied = [k for k in range(len(others)) if len({key[k] for key in curves}) > 1] or [len(others) - 1]
    names = [", ".join(f"{AXIS_LABELS[others[k]]} {key[k]:g}" for k in varied) for key in curves]
    x_label = AXIS_LABELS[x_axis]
    panels = []
    for metric, log in SWEPT.items():
        series: list[Series] = []
        latency = metric.endswith("_ms")
        for k, (name, part) in enumerate(zip(names, curves.values(), strict=True)):
            name += " (memory error)" if part["memory_error"].all() else ""
            none = part["memory_error"] | (part["starved"] & latency)
            values = part[metric].set(none, math.nan)
            series.append(_curve(k, part[x_axis].to_list(), values.to_list(), name))
        marks = []
        if metric == "total_token_throughput":
            series += _offered(frame, x_axis)
            if len(packs):
                series.append(_packs(packs, x_axis))
                best = packs.sort("offered_tok_s").row(-1, named=True)
                marks.append(Mark(float(best[x_axis]), f"Max_pack {best[x_axis]:g}"))
        label = FIGURES[metric]
        heading = f"{label.title} until it starves" if latency else label.title
        panels.append(Panel(series, heading, x_label=x_label, y_label=label.unit, y_log=log, marks=marks))
    return Figure(panels, title=title, columns=3)


def _curve(k: int, x: Sequence[float], y: Sequence[float], label: str) -> Line:
    """The k-th curve of a panel; if there are more curves than colours, further curves are dashed."""
    return Line(x, y, label, color=k % len(SERIES), dashed=k >= len(SERIES), markers=True)


def _offered(frame: pl.DataFrame, x_axis: str) -> list[Series]:
    """The offered load, if it is the same for all curves."""
    per_x = frame.group_by(x_axis).agg(offered="offered_tok_s").sort(x_axis)
    if any(max(values) - min(values) > 1e-9 * max(values) for values in per_x["offered"]):
        return []
    loads = [values[0] for values in per_x["offered"]]
    return [Line(per_x[x_axis].to_list(), loads, "offered load", color=len(SERIES) - 1, dashed=True)]


def _packs(packs: pl.DataFrame, x_axis: str) -> Scatter:
    """A point at the Max_pack of each curve."""
    texts = [
        f"{row['adapters']} adapters, rate factor {row['rate_factor']:g}, max_loras {row['max_loras']}"
        for row in packs.iter_rows(named=True)
    ]
    x, y = packs[x_axis].to_list(), packs["total_token_throughput"].to_list()
    return Scatter(x, y, "Max_pack", color=4, texts=texts)


MOST_SLOTS = 1024  # Curves of the memory of slots end at this number of slots.


def memory_figure(profile: Profile, largest: Mapping[int, int]) -> Figure:
    """KV tokens over slots, a curve for each slot rank, up to the `largest` number that starts."""
    end = min(MOST_SLOTS, max(1, *largest.values()))
    series = []
    for rank, most in largest.items():
        last = min(end, most)
        slots = sorted({1 + round(k * (last - 1) / 96) for k in range(97)}) if last else []
        tokens = [kv_cache_tokens(profile, profile.settings(n, rank)) for n in slots]
        series.append(Line(slots, tokens, f"slot rank {rank}"))
    marks = (Mark(profile.memory.min_kv_tokens, "least to start", axis="y"),)
    panel = Panel(series, title=profile.label, x_label="max_loras", y_label="KV cache, tokens", marks=marks)
    return Figure([panel], title="What adapter slots cost", columns=1, panel_size=(8.0, 4.5))


def frontier_charts(rows: Sequence[Mapping[str, Any]], chosen: int, limits: Limits) -> list[Chart]:
    """TTFT and ITL over GPUs (`FrontierPoint.to_dict`), with limits and the plan's number of GPUs marked."""
    gpus = [row["n_gpus"] for row in rows]

    def drawn(unit: str, goal: float, labels: Mapping[str, str]) -> Chart:
        lines = [Line(gpus, [known(row[key]) for row in rows], text, markers=True) for key, text in labels.items()]
        marks = [Mark(chosen, "this plan"), *([Mark(goal, "goal", axis="y")] if math.isfinite(goal) else [])]
        title, log = PLAN_FIGURES[next(iter(labels))].title, "logarithmic" in unit
        panel = Panel(lines, title=title, x_label="GPUs", y_label=unit, y_log=log, marks=tuple(marks))
        return chart(panel, x_format=lambda gpus: f"{gpus:g}" if gpus.is_integer() else "")

    ttft = {"p95_ttft_ms": "all requests", "worst_adapter_ttft_ms": "worst adapter"}
    itl = {"mean_itl_ms": "all requests"}
    return [drawn("ms, logarithmic", limits.p95_ttft_ms, ttft), drawn("ms", limits.mean_itl_ms, itl)]


COLUMNS, PANELS = table("packer.report", "comparison.toml").values()
"""Columns of the report with their titles; panels of the picture: name, unit, whether logarithmic."""

Row = Mapping[str, Any]


def comparison_figure(rows: Sequence[Row], *, title: str) -> Figure:
    """Curves over the number of adapters if it varies, else bars (rows of `Result.to_dict`)."""
    sizes = sorted({row["adapters"] for row in rows})
    draw = _curves if len(sizes) > 1 else _bars
    sources = sorted({row["reference"] for row in rows if row["reference"]})
    caption = f"Throughput and latencies as simulated or measured by {', '.join(sources)}." if sources else ""
    failing = [
        f"{label}: {row['outcome'].partition(':')[0]}"
        for label, row in zip(labels(rows), rows, strict=True)
        if row["outcome"] != "ok"
    ]
    if len(sizes) == 1 and failing:
        caption += f" ✗ {'; '.join(failing)}."
    elif failing:
        caption += " Points called failing: starved, memory error, unplaced adapters or refused."
    panels = [draw(rows, key, *panel) for key, panel in PANELS.items()]
    return Figure(panels, title=title, caption=caption.strip())


def labels(rows: Sequence[Row]) -> list[str]:
    """A label for each row: the solver, and the objective or predictor if it differs between rows."""
    parts = [key for key in ("objective", "predictor") if len({row[key] for row in rows}) > 1]
    return [" · ".join([row["solver"], *(row[key] for key in parts)]) for row in rows]


def _bars(rows: Sequence[Row], key: str, name: str, unit: str, _log: bool) -> Panel:
    failed = [row["outcome"] != "ok" for row in rows]
    names = [f"{label} ✗" if bad else label for label, bad in zip(labels(rows), failed, strict=True)]
    return Panel([Bars(names, [known(row[key]) for row in rows], failed=failed)], title=name, y_label=unit)


def _curves(rows: Sequence[Row], key: str, name: str, unit: str, log: bool) -> Panel:
    by_label: dict[str, list[Row]] = {}
    for label, row in zip(labels(rows), rows, strict=True):
        by_label.setdefault(label, []).append(row)
    series: list[Series] = []
    for k, (label, part) in enumerate(by_label.items()):
        part = sorted(part, key=lambda row: row["adapters"])
        x = [row["adapters"] for row in part]
        y = [known(row[key]) for row in part]
        series.append(_curve(k, x, y, label))
        bad = [row for row in part if row["outcome"] != "ok" and not math.isnan(known(row[key]))]
        if bad:
            x, y = [row["adapters"] for row in bad], [known(row[key]) for row in bad]
            texts, color = [row["outcome"] for row in bad], k % len(SERIES)
            series.append(Scatter(x, y, f"{label}: failing", color=color, texts=texts))
    return Panel(series, title=name, x_label="adapters", y_label=unit, y_log=log)
