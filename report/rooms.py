"""How far the rates of each GPU may grow: the table and its picture."""

from __future__ import annotations

import math

from packer.plan import Plan
from packer.report.figures import Bars, Panel
from packer.report.figures_svg import Chart, chart
from packer.room import grouped, spans
from packer.twin.hours import LEVELS

MOST_BARS = 8
"""Groups of equal GPUs in the picture, those with the least room."""
MARKS = {"slo": "Latency limits kept to", "queue": "Queue steady to", "starvation": "No starvation to"}


def room_rows(plan: Plan) -> list[tuple[str, ...]]:
    """For each GPU, or several equal ones, how far its rates may grow, what limits it at which load, and what helps."""
    return [
        (
            spans(gpus),
            *(growth(getattr(room, mark)) for mark in MARKS),
            f"{room.limit}: {room.usage}" if room.limit else "–",
            room.advice or "–",
        )
        for gpus, room in sorted(grouped(plan.rooms), key=lambda row: row[0])
    ]


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


def growth(factor: float | None) -> str:
    """A factor of the rates in percent, "+23 %"; "> +300 %" where no larger one was tried; a dash for none."""
    if factor is None:
        return "–"
    return f"{'> ' if factor >= LEVELS[-1] else ''}+{100 * (factor - 1):.0f} %"
