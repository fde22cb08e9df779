"""Figures as one page with Plotly inside: no network, follows the reader's light or dark theme."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable
from typing import Any

from packer.report.figures import Area, Band, Bars, Figure, Line, Mark, Panel, Scatter, ThemeName
from packer.report.palette import DARK, LIGHT, THEMES, Theme

_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "x")
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_PX_PER_INCH = 96
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{margin:0;font-family:{font};background:{ground};color:{ink}}}
p{{margin:0 2rem 1.5rem;max-width:70rem}}{dark_css}</style>
</head><body><div id="figure"></div>{caption}
<script>{plotly}</script>
<script>
const spec = {spec};
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const theme = () => spec.theme === "auto" ? (dark.matches ? "dark" : "light") : spec.theme;
const layout = () => Object.assign({{}}, spec.layout, {{template: spec.templates[theme()]}});
Plotly.newPlot("figure", spec.data, layout(), {{responsive: true, displaylogo: false}});
dark.addEventListener("change", () => Plotly.react("figure", spec.data, layout()));
</script></body></html>
"""


def render_page(figure: Figure, theme: ThemeName = "auto") -> str:
    """The page."""
    from plotly.offline import get_plotlyjs

    traces = [
        trace for number, panel in enumerate(figure.panels, start=1) for trace in _traces(panel, number)
    ]
    spec = {
        "data": traces,
        "layout": _layout(figure),
        "templates": {name: _template(colors) for name, colors in THEMES.items()},
        "theme": theme,
    }
    base = DARK if theme == "dark" else LIGHT
    dark_css = ""
    if theme == "auto":
        dark_css = f"@media (prefers-color-scheme: dark){{body{{background:{DARK.ground};color:{DARK.ink}}}}}"
    return _PAGE.format(
        title=html.escape(figure.title or "packer"),
        font=_FONT,
        ground=base.ground,
        ink=base.ink,
        dark_css=dark_css,
        caption=f"<p>{html.escape(figure.caption)}</p>" if figure.caption else "",
        plotly=get_plotlyjs(),
        spec=script_json(spec),
    )


def script_json(value: object) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _values(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _traces(panel: Panel, number: int) -> list[dict[str, Any]]:
    """Plotly traces of a panel; a label is text, never markup."""
    axes = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
    traces: list[dict[str, Any]] = []
    for position, series in enumerate(panel.series):
        color = panel.color(position)
        common = {
            **axes,
            "name": html.escape(series.label),
            "showlegend": bool(series.label),
            "legend": "legend" if number == 1 else f"legend{number}",
        }
        match series:
            case Bars():
                names = [html.escape(name) for name in series.categories]
                traces.append(
                    {**common, "type": "bar", "x": names, "y": _values(series.y), "marker": {"color": color}}
                )
            case Area():
                edge = {**common, "type": "scatter", "mode": "lines", "line": {"width": 0, "color": color}}
                x = _values(series.x)
                traces.append(
                    {**edge, "x": x, "y": _values(series.low), "showlegend": False, "hoverinfo": "skip"}
                )
                traces.append(
                    {**edge, "x": x, "y": _values(series.high), "fill": "tonexty", "fillcolor": _faded(color)}
                )
            case Line():
                traces.append(
                    {
                        **common,
                        "type": "scatter",
                        "mode": "lines+markers" if series.markers else "lines",
                        "x": _values(series.x),
                        "y": _values(series.y),
                        "line": {"color": color, "dash": "dash" if series.dashed else "solid"},
                        "marker": {"symbol": _SYMBOLS[position % len(_SYMBOLS)]},
                    }
                )
            case Scatter():
                traces.append(
                    {
                        **common,
                        "type": "scatter",
                        "mode": "markers",
                        "x": _values(series.x),
                        "y": _values(series.y),
                        "text": [html.escape(text) for text in series.texts],
                        "marker": {"color": color, "symbol": _SYMBOLS[position % len(_SYMBOLS)]},
                    }
                )
    return traces


def _faded(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def _layout(figure: Figure) -> dict[str, Any]:
    rows, columns = figure.grid
    layout: dict[str, Any] = {
        "title": {"text": html.escape(figure.title)},
        "height": round(rows * figure.panel_size[1] * 1.25 * _PX_PER_INCH) + 80,
        "margin": {"l": 70, "r": 30, "t": 90, "b": 60},
        "barmode": "stack" if any(panel.stacked for panel in figure.panels) else "group",
        "shapes": [],
        "annotations": [],
    }
    gap_x, gap_y = 0.09, 0.34 / rows if rows > 1 else 0.0
    width, height = (1 - gap_x * (columns - 1)) / columns, (1 - gap_y * (rows - 1)) / rows
    for index, panel in enumerate(figure.panels):
        row, column = divmod(index, columns)
        left, bottom = column * (width + gap_x), 1 - row * (height + gap_y) - height
        _add_axes(layout, panel, index + 1, (left, left + width), (max(0.0, bottom), bottom + height))
        _add_marks(layout, panel, index + 1)
    return layout


def _add_axes(
    layout: dict[str, Any], panel: Panel, number: int, x: tuple[float, float], y: tuple[float, float]
) -> None:
    suffix = "" if number == 1 else str(number)
    bars = any(isinstance(item, Bars) for item in panel.series)
    layout[f"xaxis{suffix}"] = {
        "domain": x,
        "anchor": f"y{suffix}",
        "title": {"text": html.escape(panel.x_label)},
        "type": "category" if bars else "log" if panel.x_log else "linear",
    }
    layout[f"yaxis{suffix}"] = {
        "domain": y,
        "anchor": f"x{suffix}",
        "title": {"text": html.escape(panel.y_label)},
        "type": "log" if panel.y_log else "linear",
        "rangemode": "tozero",
    }
    layout[f"legend{suffix}"] = {
        "x": x[0],
        "y": y[1],
        "xanchor": "left",
        "yanchor": "bottom",
        "orientation": "h",
    }
    if panel.title:
        layout["annotations"].append(
            {
                "text": f"<b>{html.escape(panel.title)}</b>",
                "x": (x[0] + x[1]) / 2,
                "y": y[1],
                "yshift": 28,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "center",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )


def _add_marks(layout: dict[str, Any], panel: Panel, number: int) -> None:
    suffix = "" if number == 1 else str(number)
    items: tuple[Band | Mark, ...] = (*panel.bands, *panel.marks)
    for item in items:
        across = f"{'y' if item.axis == 'x' else 'x'}{suffix} domain"
        along = f"{item.axis}{suffix}"
        low, high = (item.low, item.high) if isinstance(item, Band) else (item.at, item.at)
        ends = (
            {"x0": low, "x1": high, "y0": 0, "y1": 1}
            if item.axis == "x"
            else {"y0": low, "y1": high, "x0": 0, "x1": 1}
        )
        refs = {"xref": along, "yref": across} if item.axis == "x" else {"yref": along, "xref": across}
        style: dict[str, Any] = {"type": "line", "line": {"dash": "dot", "width": 1.5, "color": "#808080"}}
        if isinstance(item, Band):
            style = {
                "type": "rect",
                "fillcolor": "rgba(128,128,128,0.15)",
                "line": {"width": 0},
                "layer": "below",
            }
        layout["shapes"].append({**style, **refs, **ends})
        if item.label:
            layout["annotations"].append(_mark_label(item, panel, refs))


def _mark_label(item: Mark | Band, panel: Panel, refs: dict[str, str]) -> dict[str, Any]:
    at = item.low if isinstance(item, Band) else item.at
    log = panel.x_log if item.axis == "x" else panel.y_log
    at = math.log10(at) if log and at > 0 else at  # annotations on log axes take exponents; shapes don't
    position = {"x": at, "y": 1, "textangle": -90, "xanchor": "right", "yanchor": "top"}
    if isinstance(item, Band):
        position |= {"textangle": 0, "xanchor": "left"}
    if item.axis == "y":
        position = {"x": 1, "y": at, "textangle": 0, "xanchor": "right", "yanchor": "bottom"}
    return {"text": html.escape(item.label), "showarrow": False, "font": {"size": 11}, **refs, **position}


def _template(theme: Theme) -> dict[str, Any]:
    axis = {
        "gridcolor": theme.grid,
        "linecolor": theme.faint,
        "zerolinecolor": theme.grid,
        "automargin": True,
    }
    return {
        "layout": {
            "paper_bgcolor": theme.ground,
            "plot_bgcolor": theme.ground,
            "font": {"color": theme.ink, "family": _FONT},
            "xaxis": axis,
            "yaxis": axis,
            "hovermode": "closest",
        }
    }
