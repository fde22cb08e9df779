"""The picture of a frontier: latency over the number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packer.evaluation import PLAN_FIGURES
from packer.report.figures import Line, Mark, Panel
from packer.report.figures_svg import Chart, chart
from packer.slo import Limits


def frontier_charts(rows: Sequence[Mapping[str, Any]], chosen: int, limits: Limits) -> list[Chart]:
    """TTFT and ITL over GPUs, with the goal and the plan's number of GPUs marked.

    `rows`: as `packer.operate.frontier.FrontierPoint.to_dict` gives them.
    `chosen`: GPUs of the plan.
    `limits`: of the adapters without a class.
    """
    gpus = [row["n_gpus"] for row in rows]
    ttft = Panel(
        [
            Line(gpus, [row["p95_ttft_ms"] for row in rows], "all requests", markers=True),
            Line(gpus, [row["worst_adapter_ttft_ms"] for row in rows], "worst adapter", markers=True),
        ],
        title=PLAN_FIGURES["p95_ttft_ms"].title,
        x_label="GPUs",
        y_label="ms, logarithmic",
        y_log=True,
        marks=(Mark(chosen, "this plan"), Mark(limits.p95_ttft_ms, "goal", axis="y")),
    )
    itl = Panel(
        [Line(gpus, [row["mean_itl_ms"] for row in rows], "all requests", markers=True)],
        title=PLAN_FIGURES["mean_itl_ms"].title,
        x_label="GPUs",
        y_label="ms",
        marks=(Mark(chosen, "this plan"), Mark(limits.mean_itl_ms, "goal", axis="y")),
    )
    return [
        chart(panel, x_format=lambda gpus: f"{gpus:g}" if gpus.is_integer() else "") for panel in (ttft, itl)
    ]
