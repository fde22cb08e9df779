"""Panels as inline SVG for pages: no script, colours from the page's CSS variables, values as tooltips."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup, escape

from packer.report.figures import Bars, Line, Mark, Panel, Scatter, Series, Values
from packer.report.palette import SERIES

_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 26.0, 18.0, 36.0
_BAR, _BAR_GAP = 14.0, 8.0
_TEXT = Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>')
_MOST_TOOLTIPS = 400
"""A line with more points has no tooltips: they would make the page large."""

Format = Callable[[float], str]


class Chart(NamedTuple):
    """A drawn panel; `legend`: (class, label) of each labelled series; `many`: thin lines."""

    title: str
    unit: str
    svg: Markup
    legend: list[tuple[str, str]]
    many: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value; values outside the range end at its edge."""
        low, high, at = (self._level(v) for v in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def _level(self, value: float) -> float:
        return math.log10(max(value, self.low, 1e-300)) if self.log else value

    def ticks(self) -> list[float]:
        """Round values inside the range."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            wide = len(decades) > 3
            steps = (1.0,) if wide else (1.0, 2.0, 5.0)
            found = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = nice_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            found = [k * step for k in range(first, first + 12)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def nice_step(rough: float) -> float:
    """Smallest of 1, 2, 2.5, 5, 10 × 10^k that is at least `rough`."""
    if rough <= 0:
        return 1.0
    base = 10.0 ** math.floor(math.log10(rough))
    return next((m * base for m in (1.0, 2.0, 2.5, 5.0) if m * base >= rough * (1 - 1e-9)), 10.0 * base)


def chart(
    panel: Panel,
    *,
    width: int = 340,
    height: int = 220,
    x_format: Format = "{:g}".format,
    from_zero: bool = True,
    many: bool = False,
) -> Chart:
    """The panel as an `svg` element, with its title, unit and legend.

    Colours are the classes `c0` … `c6` and the page's ink.
    """
    legend = [
        (_kind(series, _color(series, position)), series.label)
        for position, series in enumerate(panel.series)
        if series.label
    ]
    if any(isinstance(series, Bars) for series in panel.series):
        svg = _bars_svg(panel, width)
    else:
        x, y = _scales(panel, width, height, from_zero=from_zero)
        parts = _grid(x, y, x_format, width, height)
        for position, series in enumerate(panel.series):
            parts += _series_parts(series, _color(series, position), x, y)
        label = _TEXT.format("axis", (_LEFT + width - _RIGHT) / 2, height - 4, "middle", panel.x_label)
        svg = _svg([*parts, *_marks(panel, x, y), label], width, height, panel)
    return Chart(panel.title, panel.y_label, svg, legend, many)


def _kind(series: Series, color: str) -> str:
    """Classes of a series in the legend."""
    if isinstance(series, Line):
        return f"{color} dashed" if series.dashed else color
    return f"dot {color}" if isinstance(series, Scatter) else f"box {color}"


def _color(series: Series, position: int) -> str:
    return f"c{(position if series.color is None else series.color) % len(SERIES)}"


def short_number(value: float) -> str:
    """A tick: 25k instead of 25,000."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:,g}"


def _svg(parts: Sequence[Markup], width: float, height: float, panel: Panel) -> Markup:
    form = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return form.format(width, height, escape(panel.title or panel.y_label), Markup("").join(parts))


def _bars_svg(panel: Panel, width: int) -> Markup:
    """Horizontal bars: a row for each category, its name above; a bar that failed is an outline."""
    bars = [(k, item) for k, item in enumerate(panel.series) if isinstance(item, Bars)]
    names = list(dict.fromkeys(name for _, item in bars for name in item.categories))
    top = max([value for _, item in bars for value in item.y if math.isfinite(value)], default=0.0)
    scale = Scale(0.0, top * 1.02 or 1.0, 2.0, width - 52.0)
    step = 15.0 + len(bars) * _BAR + _BAR_GAP
    parts = []
    for n, name in enumerate(names):
        at = n * step
        parts.append(Markup('<text class="tick" x="2" y="{:.1f}">{}</text>').format(at + 11, name))
        for row, (position, item) in enumerate(bars):
            for k, category in enumerate(item.categories):
                if category != name or not math.isfinite(item.y[k]):
                    continue
                end, y = scale(item.y[k]), at + 15.0 + row * _BAR
                kind = _color(item, position) + (" failed" if item.failed and item.failed[k] else "")
                form = '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
                told = f"{name}{f', {item.label}' if item.label else ''}: {item.y[k]:,.6g}"
                length = max(0.5, end - scale.start)
                parts.append(Markup(form).format(kind, scale.start, y, length, _BAR - 2, told))
                form = '<text class="tick" x="{:.1f}" y="{:.1f}">{}</text>'
                parts.append(Markup(form).format(end + 4, y + 10, short_number(float(f"{item.y[k]:.4g}"))))
    return _svg([*parts, *_bar_marks(panel, scale, len(names) * step)], width, len(names) * step, panel)


def _bar_marks(panel: Panel, scale: Scale, height: float) -> list[Markup]:
    form = '<line class="mark" x1="{0:.1f}" y1="0" x2="{0:.1f}" y2="{1:.1f}"><title>{2}</title></line>'
    return [
        Markup(form).format(scale(mark.at), height, mark.label) for mark in panel.marks if mark.axis == "y"
    ]


def _finite(values: Values, *, positive: bool) -> list[float]:
    return [v for v in values if math.isfinite(v) and (v > 0 or not positive)]


def _scales(panel: Panel, width: int, height: int, *, from_zero: bool) -> tuple[Scale, Scale]:
    xs: list[float] = []
    ys: list[float] = []
    for series in panel.series:
        if isinstance(series, Bars):
            continue
        xs += _finite(series.x, positive=panel.x_log)
        ys += _finite(series.y, positive=panel.y_log)
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


def _grid(x: Scale, y: Scale, x_format: Format, width: int, height: int) -> list[Markup]:
    line = Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>')
    parts = []
    for tick in y.ticks():
        at = round(y(tick), 1)
        parts.append(line.format(_LEFT, width - _RIGHT, at, at))
        parts.append(_TEXT.format("tick", _LEFT - 5, at + 3.5, "end", short_number(tick)))
    for tick in x.ticks():
        at = round(x(tick), 1)
        parts.append(_TEXT.format("tick", at, height - _BOTTOM + 14, "middle", x_format(tick)))
    return parts


def _marks(panel: Panel, x: Scale, y: Scale) -> list[Markup]:
    parts = []
    form = Markup('<line class="mark" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>')
    for item in panel.marks:
        scale, other = (x, y) if item.axis == "x" else (y, x)
        at, (c, d) = scale(item.at), sorted((other.start, other.end))
        left, top, w, h = (at, c, 0.0, d - c) if item.axis == "x" else (c, at, d - c, 0.0)
        parts.append(form.format(left, top, left + w, top + h))
        if item.label:
            parts.append(_label(item, left, top, w, x.end))
    return parts


def _label(item: Mark, left: float, top: float, w: float, end: float) -> Markup:
    """The name of a mark: above the frame for a value of x, at the right end over the line for one of y."""
    if item.axis == "x":
        right = left > end - 90
        at, y, anchor = (left - 2, top - 5, "end") if right else (left, top - 5, "start")
    else:
        # Above the frame are the names of values of x.
        at, y, anchor = left + w, top - 4 if top > 2 * _TOP else top + 11, "end"
    form = '<text class="note" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'
    return Markup(form).format(at, y, anchor, item.label)


def _series_parts(series: Series, color: str, x: Scale, y: Scale) -> list[Markup]:
    match series:
        case Line():
            form = '<path class="line {}{}" d="{}"/>'
            line = Markup(form).format(
                color, " dashed" if series.dashed else "", _path(series.x, series.y, x, y)
            )
            kind, radius = (color, 2.5) if series.markers else ("hit", 5.0)
            return [line, *_points(series, kind, radius, (), x, y)]
        case Scatter():
            return _points(series, color, 3.5, series.texts, x, y)
        case Bars():
            return []


def _points(
    series: Line | Scatter, kind: str, radius: float, texts: Sequence[str], x: Scale, y: Scale
) -> list[Markup]:
    """A circle at each value, with the value as its tooltip; none for a long line without markers."""
    if kind == "hit" and (len(series.x) > _MOST_TOOLTIPS or not series.label):
        return []
    form = Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>')
    parts = []
    for k, (a, b) in enumerate(zip(series.x, series.y, strict=True)):
        if math.isfinite(a) and math.isfinite(b):
            told = texts[k] if texts else series.label
            parts.append(form.format(kind, x(a), y(b), radius, f"{told}: {a:,.6g}, {b:,.6g}"))
    return parts


def _path(xs: Values, ys: Values, x: Scale, y: Scale) -> str:
    """Moves and lines; a gap where a value is missing."""
    words, pen_down = [], False
    for a, b in zip(xs, ys, strict=True):
        if not (math.isfinite(a) and math.isfinite(b)):
            pen_down = False
            continue
        words.append(f"{'L' if pen_down else 'M'}{x(a):.1f} {y(b):.1f}")
        pen_down = True
    return "".join(words)
