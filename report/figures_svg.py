"""Panels as inline SVG for pages: no script, colours from the page's CSS variables, values as tooltips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from packer.report.figures import SERIES, Bars, Figure, Line, Panel, Scatter, Series, Values
from packer.report.templates import render

_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 26.0, 18.0, 36.0
_MOST_TOOLTIPS = 400  # Lines with more points have no tooltips, which would make the page large.
_PAGE_WIDTH = 440  # Width of a panel in SVG units; the page scales it.
Format = Callable[[float], str]


class Chart(NamedTuple):
    """A drawn panel. `legend`: (CSS class, label) of each labelled series. `many`: draw thin lines."""

    title: str
    unit: str
    svg: Markup
    legend: list[tuple[str, str]]
    many: bool = False


class Curve(NamedTuple):
    """A series in pixels: CSS class and path of its line ("": points only), and points with their tooltips."""

    line: str
    path: str
    kind: str
    radius: float
    points: list[tuple[float, float, str]]


def render_page(figure: Figure) -> str:
    """A page of inline SVG; the same figure gives the same bytes."""
    wide, high = figure.panel_size
    height = round(_PAGE_WIDTH * high / wide)
    charts = [chart(panel, width=_PAGE_WIDTH, height=height) for panel in figure.panels]
    return render("figure.html", figure=figure, charts=charts, columns=figure.grid[1])


@dataclass(frozen=True, slots=True)
class Scale:
    """Map values to pixels, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value; values outside the range are clipped to its edge."""
        low, high, at = (self._level(v) for v in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def _level(self, value: float) -> float:
        return math.log10(max(value, self.low, 1e-300)) if self.log else value

    def ticks(self) -> list[float]:
        """Round values inside the range; on a narrow logarithmic one, too, at equal steps."""
        step = nice_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        found = [k * step for k in range(first, first + 12)]
        if self.log and self.high > 5.0 * self.low:  # two of 1, 2, 5, 10 at least
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1.0,) if len(decades) > 3 else (1.0, 2.0, 5.0)
            found = [step * 10.0**decade for decade in decades for step in steps]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def nice_step(rough: float) -> float:
    """Smallest of 1, 2, 2.5, 5, 10 × 10^k that is at least `rough`."""
    if rough <= 0:
        return 1.0
    base = 10.0 ** math.floor(math.log10(rough))
    return next((m * base for m in (1.0, 2.0, 2.5, 5.0) if m * base >= rough * (1 - 1e-9)), 10.0 * base)


def chart(
    panel: Panel, *, width: int = 340, height: int = 220, x_format: Format = "{:g}".format,
    from_zero: bool = True, many: bool = False,
) -> Chart:  # fmt: skip
    """The panel as an `svg` element with title, unit and legend; colours are the CSS classes `c0` … `c6`."""
    chosen = (k if series.color is None else series.color for k, series in enumerate(panel.series))
    coloured = [(each, f"c{k % len(SERIES)}") for each, k in zip(panel.series, chosen, strict=True)]
    bars = [(item, color) for item, color in coloured if isinstance(item, Bars)]
    given: dict[str, Any] = {"panel": panel, "width": width, "short": short_number}
    if bars:
        given |= _rows(bars, width)
    else:
        x, y = _scales(panel, width, height, from_zero=from_zero)
        curves = [_curve(item, color, x, y) for item, color in coloured if not isinstance(item, Bars)]
        given |= {"x": x, "y": y, "height": height, "x_format": x_format, "curves": curves, "rows": ()}
    legend = [(_kind(series, color), series.label) for series, color in coloured if series.label]
    return Chart(panel.title, panel.y_label, Markup(render("chart.html", **given)), legend, many)


def _kind(series: Series, color: str) -> str:
    """CSS classes of a series in the legend."""
    if isinstance(series, Line):
        return f"{color} dashed" if series.dashed else color
    return f"dot {color}" if isinstance(series, Scatter) else f"box {color}"


def short_number(value: float) -> str:
    """The label of a tick: 25k instead of 25,000."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:,g}"


def _rows(bars: Sequence[tuple[Bars, str]], width: int) -> dict[str, Any]:
    """Horizontal bars: a row for each category, with (place in the row, CSS class, value, tooltip) of each bar."""
    names = list(dict.fromkeys(name for item, _ in bars for name in item.categories))
    rows: dict[str, list[tuple[int, str, float, str]]] = {name: [] for name in names}
    for place, (item, color) in enumerate(bars):
        failed = item.failed or (False,) * len(item.y)
        for name, value, bad in zip(item.categories, item.y, failed, strict=True):
            if math.isfinite(value):
                text = f"{name}{f', {item.label}' if item.label else ''}: {value:,.6g}"
                rows[name].append((place, f"{color} failed" if bad else color, value, text))
    top = max((bar[2] for row in rows.values() for bar in row), default=0.0)
    scale = Scale(0.0, top * 1.02 or 1.0, 2.0, width - 52.0)
    step = 23.0 + 14.0 * len(bars)
    return {"x": scale, "rows": rows, "step": step, "height": len(names) * step}


def _scales(panel: Panel, width: int, height: int, *, from_zero: bool) -> tuple[Scale, Scale]:
    xs: list[float] = []
    ys: list[float] = []
    for series in panel.series:
        if isinstance(series, Bars):
            continue
        xs += [x for x in series.x if math.isfinite(x) and (x > 0 or not panel.x_log)]
        ys += [y for y in series.y if math.isfinite(y) and (y > 0 or not panel.y_log)]
    for mark in panel.marks:
        (xs if mark.axis == "x" else ys).append(mark.at)
    return (
        Scale(*_range(xs, panel.x_log), _LEFT, width - _RIGHT, panel.x_log),
        Scale(*_range(ys, panel.y_log, from_zero=from_zero), height - _BOTTOM, _TOP, panel.y_log),
    )


def _range(values: Sequence[float], log: bool, *, from_zero: bool = False) -> tuple[float, float]:
    if not values:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(values), max(values)
    if log:
        return low / 1.3, high * 1.3
    if from_zero and low >= 0:
        return 0.0, high * 1.05 or 1.0
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _curve(series: Line | Scatter, color: str, x: Scale, y: Scale) -> Curve:
    """The series in pixels; a line without markers has tooltips too, unless it is long or has no label."""
    texts = (series.texts if isinstance(series, Scatter) else ()) or [series.label] * len(series.x)
    points = [
        (x(a), y(b), f"{text}: {a:,.6g}, {b:,.6g}")
        for a, b, text in zip(series.x, series.y, texts, strict=True)
        if math.isfinite(a) and math.isfinite(b)
    ]
    if isinstance(series, Scatter):
        return Curve("", "", color, 3.5, points)
    line = f"{color} dashed" if series.dashed else color
    path = _path(series.x, series.y, x, y)
    if series.markers:
        return Curve(line, path, color, 2.5, points)
    named = series.label and len(series.x) <= _MOST_TOOLTIPS
    return Curve(line, path, "hit", 5.0, points if named else [])


def _path(xs: Values, ys: Values, x: Scale, y: Scale) -> str:
    """The `d` attribute of an SVG path; missing values leave gaps."""
    words, pen_down = [], False
    for a, b in zip(xs, ys, strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen_down = False
            continue
        words.append(f"{'L' if pen_down else 'M'}{x(a):.1f} {y(b):.1f}")
        pen_down = True
    return "".join(words)
