"""The picture of how far the rates of each GPU may grow."""

from __future__ import annotations

import math

from packer.plan import Plan
from packer.report.figures import Bars, Panel
from packer.report.figures_svg import Chart, chart
from packer.room import grouped, spans

MOST_BARS = 8
"""Groups of equal GPUs in the picture, those with the least room."""
MARKS = {"slo": "Latency limits kept to", "queue": "Queue steady to", "starvation": "No starvation to"}


def room_charts(plan: Plan) -> list[Chart]:
    """By how much every rate may grow until limits break, a queue grows and the server starves."""
    shown = sorted(grouped(plan.rooms)[:MOST_BARS], key=lambda row: row[0])
    names = [f"GPU {spans(gpus)}" for gpus, _ in shown]
    charts = []
    for mark, title in MARKS.items() if shown else ():
        factors = [getattr(room, mark) for _, room in shown]
        growths = [math.nan if factor is None else round(100.0 * (factor - 1.0)) for factor in factors]
        charts.append(chart(Panel([Bars(names, growths)], title=title, y_label="growth of every rate, %")))
    return charts
