"""The picture of a validation on real servers: measured against predicted figures."""

from __future__ import annotations

from collections.abc import Sequence

from packer.evaluation import FIGURES
from packer.live.validate import SMAPE_OF, BinReport, gauges
from packer.report.figures import Bars, Figure, Line, Panel, known

GAUGES = (("running", "requests running"), ("waiting", "requests waiting"), ("kv_usage", "KV cache used"))
LATENCIES = ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms")


def validation_figure(reports: Sequence[BinReport], title: str) -> Figure:
    """Bars of throughput, latencies and errors per server, then the gauges over time, measured and predicted."""
    names = [f"server {report.index}" for report in reports]
    panels = [_bars(reports, names, name) for name in ("total_token_throughput", *LATENCIES)]
    titles = {name: FIGURES[name].title for name in SMAPE_OF}
    errors = [Bars(names, [known(r.errors.get(key)) for r in reports], title) for key, title in titles.items()]
    panels.append(Panel(errors, title="Error (SMAPE, 0–200 form)", y_label="%"))
    for report in reports:
        panels += _overlays(report)
    return Figure(panels, title=title)


def _bars(reports: Sequence[BinReport], names: Sequence[str], figure: str) -> Panel:
    sides = ("measured", "predicted")
    series = [Bars(names, [known(each.mean(side, figure)) for each in reports], side) for side in sides]
    return Panel(series, title=FIGURES[figure].title, y_label=FIGURES[figure].unit)


def _overlays(report: BinReport) -> list[Panel]:
    """The first repeat's gauges against the twin's timeline."""
    if not report.runs or report.runs[0].outcome.load is None:
        return []
    run = report.runs[0]
    measured, predicted = gauges(run.outcome), run.simulation.timeline
    panels = []
    for name, label in GAUGES:
        series = [
            Line(measured["time_s"], measured[name], "measured", markers=True),
            Line(predicted["time_s"].to_list(), predicted[name].to_list(), "predicted", dashed=True),
        ]
        panels.append(Panel(series, title=f"server {report.index}: {label}", x_label="s"))
    return panels
