"""The picture of a sweep: throughput, TTFT and ITL over one axis, with Max_pack marked."""

from __future__ import annotations

import math

from packer.evaluation import FIGURES
from packer.io.frames import pl
from packer.report.figures import Figure, Line, Mark, Panel, Scatter, Series
from packer.report.palette import SERIES

AXIS_LABELS = {"adapters": "adapters", "rate_factor": "rate factor", "max_loras": "max_loras"}
PANELS = {"total_token_throughput": False, "mean_ttft_ms": True, "mean_itl_ms": False}
"""Figures over an axis, and whether on a logarithmic scale."""


def sweep_figure(frame: pl.DataFrame, packs: pl.DataFrame, x_axis: str, *, title: str) -> Figure:
    """Curves over `x_axis`, one for each pair of values of the other two axes.

    `frame`: rows of a sweep, sorted by point.
    `packs`: the points that are the Max_pack of their curve.
    `x_axis`: "adapters", "rate_factor" or "max_loras".
    `title`: what was swept.
    """
    others = [axis for axis in AXIS_LABELS if axis != x_axis]
    curves = dict(iter(frame.group_by(others, maintain_order=True)))
    labels = dict(zip(curves, _labels(others, list(curves)), strict=True))
    labels = {
        key: f"{label} (memory error)" if curves[key]["memory_error"].all() else label
        for key, label in labels.items()
    }
    x_label = AXIS_LABELS[x_axis]
    panels = []
    for metric, log in PANELS.items():
        series: list[Series] = [
            Line(
                part[x_axis].to_list(),
                part[metric].set(part["memory_error"], math.nan).to_list(),
                labels[key],
                color=k % len(SERIES),
                dashed=k >= len(SERIES),
                markers=True,
            )
            for k, (key, part) in enumerate(curves.items())
        ]
        marks = []
        if metric == "total_token_throughput":
            series += _offered(frame, x_axis)
            if len(packs):
                series.append(_packs(packs, x_axis))
                best = packs.sort("offered_tok_s").row(-1, named=True)
                marks.append(Mark(float(best[x_axis]), f"Max_pack {best[x_axis]:g}"))
        label = FIGURES[metric]
        panels.append(Panel(series, label.title, x_label=x_label, y_label=label.unit, y_log=log, marks=marks))
    return Figure(panels, title=title, columns=3)


def _labels(others: list[str], keys: list[tuple[object, ...]]) -> list[str]:
    """Names of the curves: the values of the axes that differ between them."""
    varied = [k for k, axis in enumerate(others) if len({key[k] for key in keys}) > 1] or [len(others) - 1]
    return [", ".join(f"{AXIS_LABELS[others[k]]} {key[k]:g}" for k in varied) for key in keys]


def _offered(frame: pl.DataFrame, x_axis: str) -> list[Series]:
    """The offered load, where it is the same for all curves."""
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
    return Scatter(
        packs[x_axis].to_list(), packs["total_token_throughput"].to_list(), "Max_pack", color=4, texts=texts
    )
