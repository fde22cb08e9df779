"""Panels as small inline SVG for the report: no script, colours from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from packer.report.figures import Area, Band, Bars, Line, Mark, Panel, Scatter, Values

_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 26.0, 12.0, 36.0


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


def render_panel(
    panel: Panel,
    *,
    width: int = 340,
    height: int = 220,
    x_format: Callable[[float], str] = "{:g}".format,
    y_format: Callable[[float], str] = "{:,g}".format,
    from_zero: bool = True,
) -> Markup:
    """An `svg` element. Colours are the classes `c0` … `c6` of the series and the ink of the page.

    Raises
    ------
    ValueError
        The panel holds bars, which the report draws as HTML.
    """
    if any(isinstance(item, Bars) for item in panel.series):
        raise ValueError("inline panels hold lines, areas and points")
    x, y = _scales(panel, width, height, from_zero=from_zero)
    parts = [*_grid(x, y, x_format, y_format, width, height), *_marks(panel, x, y)]
    for position, series in enumerate(panel.series):
        color = f"c{(position if series.color is None else series.color) % 7}"
        parts.extend(_series(series, color, x, y))
    parts.append(_axis_labels(panel, width, height))
    title = escape(panel.title or panel.y_label)
    body = Markup("").join(parts)
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        width, height, title, body
    )


def _finite(values: Values, *, positive: bool) -> list[float]:
    return [v for v in values if math.isfinite(v) and (v > 0 or not positive)]


def _scales(panel: Panel, width: int, height: int, *, from_zero: bool) -> tuple[Scale, Scale]:
    xs: list[float] = []
    ys: list[float] = []
    for series in panel.series:
        if isinstance(series, Bars):
            continue
        xs += _finite(series.x, positive=panel.x_log)
        for column in (series.low, series.high) if isinstance(series, Area) else (series.y,):
            ys += _finite(column, positive=panel.y_log)
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


def _grid(
    x: Scale,
    y: Scale,
    x_format: Callable[[float], str],
    y_format: Callable[[float], str],
    width: int,
    height: int,
) -> list[Markup]:
    parts = []
    for tick in y.ticks():
        at = round(y(tick), 1)
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                _LEFT, width - _RIGHT, at, at
            )
        )
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
                _LEFT - 5, at + 3.5, y_format(tick)
            )
        )
    for tick in x.ticks():
        at = round(x(tick), 1)
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                at, height - _BOTTOM + 14, x_format(tick)
            )
        )
    return parts


def _marks(panel: Panel, x: Scale, y: Scale) -> list[Markup]:
    parts = []
    items: tuple[Band | Mark, ...] = (*panel.bands, *panel.marks)
    for item in items:
        scale, other = (x, y) if item.axis == "x" else (y, x)
        low, high = (item.low, item.high) if isinstance(item, Band) else (item.at, item.at)
        a, b = sorted((scale(low), scale(high)))
        c, d = sorted((other.start, other.end))
        left, top, w, h = (a, c, b - a, d - c) if item.axis == "x" else (c, a, d - c, b - a)
        if isinstance(item, Band):
            form = '<rect class="band" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>'
            parts.append(Markup(form.format(left, top, w, h)))
        else:
            form = '<line class="mark" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'
            parts.append(Markup(form.format(left, top, left + w, top + h)))
        if item.label:
            at, anchor = (left + 4, "start") if item.axis == "x" else (left + w, "end")
            form = '<text class="note" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>'
            parts.append(
                Markup(form).format(at, top + (0.4 * h if item.axis == "x" else 13), anchor, item.label)
            )
    return parts


def _series(series: Line | Scatter | Area | Bars, color: str, x: Scale, y: Scale) -> list[Markup]:
    match series:
        case Line():
            form = '<path class="line {}{}" d="{}"/>'
            return [
                Markup(form).format(
                    color, " dashed" if series.dashed else "", _path(series.x, series.y, x, y)
                )
            ]
        case Scatter():
            points = [
                (a, b)
                for a, b in zip(series.x, series.y, strict=True)
                if math.isfinite(a) and math.isfinite(b)
            ]
            return [
                Markup(f'<circle class="{color}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5"/>')
                for a, b in points
            ]
        case Area():
            rows = [
                (a, low, high)
                for a, low, high in zip(series.x, series.low, series.high, strict=True)
                if all(math.isfinite(v) for v in (a, low, high))
            ]
            ring = [(a, high) for a, _, high in rows] + [(a, low) for a, low, _ in reversed(rows)]
            points_text = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in ring)
            return [Markup(f'<polygon class="area {color}" points="{points_text}"/>')]
        case Bars():
            return []


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


def _axis_labels(panel: Panel, width: int, height: int) -> Markup:
    middle = (_LEFT + width - _RIGHT) / 2
    return Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>').format(
        middle, height - 4, panel.x_label
    )
