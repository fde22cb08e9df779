"""The picture of a frontier: latency over the number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from packer.evaluation import PLAN_FIGURES
from packer.goal import Limits
from packer.report.figures import Line, Mark, Panel
from packer.report.figures_svg import Chart, chart


def frontier_charts(rows: Sequence[Mapping[str, Any]], chosen: int, limits: Limits) -> list[Chart]:
    """TTFT and ITL over GPUs, with the goal and the plan's number of GPUs marked.

    `rows`: as `packer.planning.frontier.FrontierPoint.to_dict` gives them.
    `chosen`: GPUs of the plan.
    `limits`: of the adapters without a class.
    """
    gpus = [row["n_gpus"] for row in rows]

    def drawn(unit: str, goal: float, labels: Mapping[str, str]) -> Chart:
        lines = [Line(gpus, [row[key] for row in rows], text, markers=True) for key, text in labels.items()]
        marks = [Mark(chosen, "this plan"), *([Mark(goal, "goal", axis="y")] if math.isfinite(goal) else [])]
        title, log = PLAN_FIGURES[next(iter(labels))].title, "logarithmic" in unit
        panel = Panel(lines, title=title, x_label="GPUs", y_label=unit, y_log=log, marks=tuple(marks))
        return chart(panel, x_format=lambda gpus: f"{gpus:g}" if gpus.is_integer() else "")

    ttft = {"p95_ttft_ms": "all requests", "worst_adapter_ttft_ms": "worst adapter"}
    return [
        drawn("ms, logarithmic", limits.p95_ttft_ms, ttft),
        drawn("ms", limits.mean_itl_ms, {"mean_itl_ms": "all requests"}),
    ]
