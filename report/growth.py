"""Latency and throughput of the servers of a plan as all rates grow: curves up to the breaking point."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from packer.arrays import BoolArray, FloatArray
from packer.bin import Bin
from packer.evaluation import STARVATION_THRESHOLD, Evaluations
from packer.plan import Plan
from packer.progress import Progress, silent
from packer.report.figures import Line, Mark, Panel, Scatter
from packer.report.figures_svg import Chart, chart
from packer.words import listed
from packer.workload import Workload

FACTORS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)  # Factors of all rates: from today's rates to twice as much.
MANY = 6  # More servers than this are drawn as thin lines of one colour.
BREAKS = 6  # Colour index of the points where servers break; no line has this colour.
Evaluate = Callable[[Workload, Sequence[Bin]], Evaluations]


@dataclass(frozen=True, eq=False)
class GrowthCurves:
    """Evaluations of some servers of a plan at growing rates, by `predictor`.

    `gpus`: indices of the servers in the plan.
    `served`, `mean_ttft_ms`, `mean_itl_ms`: float64 (factors, servers); NaN after the factor at which a server breaks.
    `holds`: bool (factors, servers), whether a server serves its load.
    """

    predictor: str
    gpus: tuple[int, ...]
    served: FloatArray
    mean_ttft_ms: FloatArray
    mean_itl_ms: FloatArray
    holds: BoolArray

    def breaks_at(self, row: int) -> int | None:
        """Index of the first factor at which the `row`-th server starves or does not start; None if it never does."""
        return None if self.holds[:, row].all() else int(self.holds[:, row].argmin())

    def charts(self) -> list[Chart]:
        """Served share, TTFT and ITL over the growth of all rates, up to where the last server breaks."""
        ends = [self.breaks_at(row) for row in range(len(self.gpus))]
        broken = [end for end in ends if end is not None]
        shown = max(3, max(broken) + 2) if len(broken) == len(ends) else len(FACTORS)
        first = [Mark(FACTORS[min(broken)], "first one breaks")] if broken else []
        starved = Mark(100 * STARVATION_THRESHOLD, f"starved below {STARVATION_THRESHOLD:.0%}", axis="y")
        unnamed = [Mark(mark.at, "") for mark in first]
        title = "Served share of the offered load"
        return [
            self._chart(title, "%", 100 * self.served[:shown], [*unnamed, starved]),
            self._chart("Mean TTFT", "ms, logarithmic", self.mean_ttft_ms[:shown], first),
            self._chart("Mean ITL", "ms", self.mean_itl_ms[:shown], first),
        ]

    def _chart(self, title: str, unit: str, values: FloatArray, marks: list[Mark]) -> Chart:
        many = len(self.gpus) > MANY
        series: list[Line | Scatter] = []
        ends: list[tuple[float, float, str]] = []
        for row, gpu in enumerate(self.gpus):
            label = f"server {gpu}" if not many else "" if row else "a server"
            series.append(Line(FACTORS[: len(values)], values[:, row], label, color=0 if many else row))
            end = self.breaks_at(row)
            if end is not None and end < len(values):
                ends.append((FACTORS[end], float(values[end, row]), f"server {gpu} breaks"))
        if ends:
            x, y, texts = (list(column) for column in zip(*ends, strict=True))
            series.append(Scatter(x, y, "breaks", color=BREAKS, texts=texts))
        log, x_label = "logarithmic" in unit, "growth of every rate"
        panel = Panel(series, title=title, x_label=x_label, y_label=unit, y_log=log, marks=marks)
        return chart(panel, x_format=_growth, from_zero=unit != "%", many=many)

    def rows(self) -> list[tuple[str, ...]]:
        """The charts as a table: growth, servers that break, largest mean TTFT and ITL of the servers that hold."""
        rows = []
        for k, factor in enumerate(FACTORS):
            broken = [gpu for gpu, holds in zip(self.gpus, self.holds[k], strict=True) if not holds]
            which = f" ({listed(broken)})" if broken and len(broken) < len(self.gpus) else ""
            slowest = (
                f"{each[k][self.holds[k]].max():,.0f} ms" if self.holds[k].any() else "–"
                for each in (self.mean_ttft_ms, self.mean_itl_ms)
            )
            rows.append((_growth(factor), f"{len(broken)} of {len(self.gpus)}{which}", *slowest))
        return rows


def _growth(factor: float) -> str:
    return f"{100 * (factor - 1):+.0f}%" if factor != 1 else "today"


def growth_of(
    plan: Plan, evaluate: Evaluate, *, predictor: str, limit: int | None = None, progress: Progress = silent
) -> GrowthCurves | None:
    """The servers of a plan, or `limit` of them, at growing rates; None without servers, or for a replayed trace.

    If `predictor` is the plan's predictor, the figures of the plan are used for today's rates. A server that breaks is
    not evaluated again: it is taken to break under more load too.
    """
    if not plan.bins or plan.workload.arrivals.trace is not None:
        return None
    gpus = choose_gpus(plan.evaluations, limit)
    figures = np.full((3, len(FACTORS), len(gpus)), math.nan)
    holds = np.zeros((len(FACTORS), len(gpus)), dtype=np.bool_)
    left = list(range(len(gpus)))
    for k, factor in enumerate(FACTORS):
        if not left:
            break
        progress("rates grow", k, len(FACTORS))
        if factor == 1.0 and predictor == plan.predictor:
            found = [plan.evaluations[gpu] for gpu in gpus]
        else:
            found = [*evaluate(plan.workload.scaled(factor), [plan.bins[gpus[row]] for row in left])]
        for row, each in zip(left, found, strict=True):
            served = 0.0 if each.memory_error else min(each.served_share, 1.0)
            figures[:, k, row] = served, each.mean_ttft_ms, each.mean_itl_ms
            holds[k, row] = each.feasible
        left = [row for row in left if holds[k, row]]
    return GrowthCurves(predictor, gpus, figures[0], figures[1], figures[2], holds)


def choose_gpus(evaluations: Evaluations, limit: int | None) -> tuple[int, ...]:
    """Indices of the servers to draw: all, or the slowest ones and an even selection of the rest."""
    count = len(evaluations)
    if limit is None or count <= limit:
        return tuple(range(count))
    ttft = np.nan_to_num(evaluations.mean_ttft_ms, nan=np.inf)
    ttft[evaluations.idle] = 0.0
    slowest_first = np.argsort(-ttft, kind="stable")
    worst = slowest_first[: (limit + 1) // 2].tolist()
    others = slowest_first[(limit + 1) // 2 :]
    spread = np.linspace(0, len(others) - 1, limit - len(worst)).round().astype(int)
    return tuple(sorted({*worst, *others[spread].tolist()}))
