"""Figures as one page of inline SVG: no network, no script, the reader's light or dark theme."""

from __future__ import annotations

from packer.report.figures import Figure
from packer.report.figures_svg import chart
from packer.report.templates import render

WIDTH = 440
"""Width of a panel in the units of its drawing; the page scales it."""


def render_page(figure: Figure) -> str:
    """The page; the same figure gives the same bytes."""
    wide, high = figure.panel_size
    charts = [chart(panel, width=WIDTH, height=round(WIDTH * high / wide)) for panel in figure.panels]
    return render("figure.html", figure=figure, charts=charts, columns=figure.grid[1])
