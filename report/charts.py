"""The report's charts, as panels."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from packer.evaluation import STARVATION_THRESHOLD
from packer.report.context import milliseconds
from packer.report.curves import Curves
from packer.report.figures import Line, Mark, Panel, Scatter
from packer.report.figures_svg import Chart, chart

Matrix = npt.NDArray[np.float64]
MAX_LINES = 6
"""More GPUs than this are drawn as thin lines of one colour."""
BREAKS = 6
"""Colour of the points where GPUs break: that of no line."""


def _growth(factor: float) -> str:
    return f"{100 * (factor - 1):+.0f} %" if factor != 1 else "today"


def growth_charts(curves: Curves) -> list[Chart]:
    """Served share, TTFT and ITL over the growth of all rates, up to where the last GPU breaks."""
    shown = shown_factors(curves)
    limit = Mark(100 * STARVATION_THRESHOLD, f"starved below {100 * STARVATION_THRESHOLD:.0f} %", axis="y")
    ttft, itl = (curves.column(name)[:shown] for name in ("mean_ttft_ms", "mean_itl_ms"))
    return [
        _chart(
            curves, "Served share of the offered load", "%", 100 * served_share(curves)[:shown], mark=limit
        ),
        _chart(curves, "Mean TTFT", "ms, logarithmic", ttft, log=True),
        _chart(curves, "Mean ITL", "ms", itl),
    ]


def shown_factors(curves: Curves) -> int:
    """How many factors are worth drawing: one beyond the last GPU's breaking point, at least three."""
    broken = [curves.breaking_factor(row) for row in range(len(curves.gpus))]
    if any(factor is None for factor in broken):
        return len(curves.factors)
    last = max(factor for factor in broken if factor is not None)
    return min(len(curves.factors), max(3, curves.factors.index(last) + 2))


def served_share(curves: Curves) -> Matrix:
    """Throughput / offered load in [0, 1], (factors, GPUs); 0 without a server, NaN once broken."""
    share = curves.column("total_token_throughput") / np.maximum(curves.column("offered_tok_s"), 1e-12)
    return np.where(curves.column("memory_error") > 0, 0.0, np.minimum(share, 1.0))


def _chart(
    curves: Curves, title: str, unit: str, values: Matrix, *, log: bool = False, mark: Mark | None = None
) -> Chart:
    factors = curves.factors[: len(values)]
    many = len(curves.gpus) > MAX_LINES
    series: list[Line | Scatter] = []
    for k, gpu in enumerate(curves.gpus):
        label = f"GPU {gpu}" if not many else "" if k else "a GPU"
        series.append(Line(factors, values[:, k], label, color=0 if many else k))
    ends = _ends(curves, values)
    if ends:
        texts = [f"GPU {curves.gpus[row]} breaks" for _, _, row in ends]
        series.append(
            Scatter([x for x, _, _ in ends], [y for _, y, _ in ends], "breaks", color=BREAKS, texts=texts)
        )
    broken = [factor for factor, _, _ in ends]
    marks = [Mark(min(broken), "" if mark is None else "first one breaks")] if broken else []
    panel = Panel(
        series,
        title=title,
        x_label="growth of every rate",
        y_label=unit,
        y_log=log,
        marks=[*marks, mark] if mark else marks,
    )
    return chart(panel, x_format=_growth, from_zero=mark is None, many=many)


def _ends(curves: Curves, values: Matrix) -> list[tuple[float, float, int]]:
    """(factor, value, row) where each GPU breaks, inside what is drawn."""
    found = []
    for row in range(len(curves.gpus)):
        factor = curves.breaking_factor(row)
        if factor is not None and curves.factors.index(factor) < len(values):
            found.append((factor, float(values[curves.factors.index(factor), row]), row))
    return found


def growth_rows(curves: Curves) -> list[tuple[str, ...]]:
    """The charts as a table: growth, GPUs that break; of those that hold the slowest TTFT and ITL."""
    rows = []
    for factor, each in zip(curves.factors, curves.evaluations, strict=True):
        broken = [curves.gpus[k] for k in np.flatnonzero(~each.feasible)]
        listed = ", ".join(map(str, broken[:8])) + (", …" if len(broken) > 8 else "")
        whom = f" ({listed})" if broken and len(broken) < len(curves.gpus) else ""
        slowest = [_slowest(column[each.feasible]) for column in (each.mean_ttft_ms, each.mean_itl_ms)]
        rows.append((_growth(factor), f"{len(broken)} of {len(curves.gpus)}{whom}", *slowest))
    return rows


def _slowest(values: npt.NDArray[np.float64]) -> str:
    finite = values[np.isfinite(values)]
    return milliseconds(float(finite.max()) if len(finite) else math.nan)
