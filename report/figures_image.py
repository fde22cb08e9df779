"""Figures as images: matplotlib without a screen and without global state."""

from __future__ import annotations

import io
import os
import warnings
from typing import TYPE_CHECKING, Any

from packer.report.figures import LIGHT, Bars, Figure, Line, Panel, Scatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^Pvx"
_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "packer", "svg.fonttype": "none"}
_SETTINGS |= {"font.family": "DejaVu Sans", "font.size": 9}


def render_image(figure: Figure, suffix: str) -> bytes:
    """The bytes of a .png (150 dpi) or .svg; the same figure gives the same bytes."""
    os.environ["MPLBACKEND"] = "agg"  # no other backend is needed; an invalid one would break the import
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    rows, columns = figure.grid
    width, height = figure.panel_size
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if suffix == ".svg" else {"Software": None}
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that is not in the font is drawn as a box
        size = (width * columns, height * rows + 0.5)
        canvas = Canvas(figsize=size, layout="constrained", facecolor=LIGHT.ground)
        FigureCanvasAgg(canvas)
        grid = canvas.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(grid, figure.panels, strict=False):
            _draw(axes, panel)
        for axes in grid[len(figure.panels) :]:
            axes.set_axis_off()
        if figure.title:
            canvas.suptitle(_text(figure.title), color=LIGHT.ink, fontweight="bold", wrap=True)
        if figure.caption:
            canvas.supxlabel(_text(figure.caption), color=LIGHT.faint, fontsize=8, wrap=True)
        canvas.savefig(buffer, format=suffix[1:], dpi=150, metadata=metadata)
    return buffer.getvalue()


def _text(label: str) -> str:
    """A label as plain text: no mathtext, no control characters, no lone surrogates (SVG is XML)."""
    shown = "".join(sign if sign.isprintable() else " " for sign in label)
    return shown.encode("utf-8", "replace").decode().replace("$", r"\$")


def _draw(axes: Axes, panel: Panel) -> None:
    for position, series in enumerate(panel.series):
        color, label = panel.color(position), _text(series.label)
        match series:
            case Bars():
                pass
            case Line():
                marker = _MARKERS[position % len(_MARKERS)] if series.markers else None
                style: dict[str, Any] = {"linestyle": "--" if series.dashed else "-", "marker": marker, "markersize": 4}
                axes.plot(series.x, series.y, color=color, label=label, **style)
            case Scatter():
                marker = _MARKERS[position % len(_MARKERS)]
                axes.scatter(series.x, series.y, color=color, label=label, s=16, marker=marker)
    _draw_bars(axes, panel)
    _style(axes, panel)
    _draw_marks(axes, panel)
    if any(series.label for series in panel.series):
        colors: dict[str, Any] = {"labelcolor": LIGHT.ink, "facecolor": LIGHT.ground, "edgecolor": LIGHT.grid}
        axes.legend(fontsize=8, framealpha=0.8, **colors)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    bars = [(k, item) for k, item in enumerate(panel.series) if isinstance(item, Bars)]
    if not bars:
        return
    categories = list(dict.fromkeys(name for _, item in bars for name in item.categories))
    place = {name: i for i, name in enumerate(categories)}
    width = 0.8 / len(bars)
    for order, (position, item) in enumerate(bars):
        shift, color = (order - (len(bars) - 1) / 2) * width, panel.color(position)
        spots = [place[name] + shift for name in item.categories]
        drawn = axes.bar(spots, item.y, width, color=color, label=_text(item.label))
        for bar, failed in zip(drawn, item.failed, strict=False):
            if failed:
                bar.set(facecolor="none", edgecolor=color, linestyle="--")
    crowded = len(categories) > 8 or max(map(len, categories), default=0) > 12
    turned: dict[str, Any] = {"rotation": 60, "ha": "right"} if crowded else {"rotation": 0, "ha": "center"}
    axes.set_xticks(range(len(categories)), [_text(name) for name in categories], **turned)


def _style(axes: Axes, panel: Panel) -> None:
    axes.set_facecolor(LIGHT.ground)
    axes.set_axisbelow(True)
    axes.grid(color=LIGHT.grid, linewidth=0.7)
    axes.tick_params(colors=LIGHT.faint)
    for spine in axes.spines.values():
        spine.set_color(LIGHT.grid)
    axes.set_title(_text(panel.title), color=LIGHT.ink, fontsize=10)
    axes.set_xlabel(_text(panel.x_label), color=LIGHT.ink)
    axes.set_ylabel(_text(panel.y_label), color=LIGHT.ink)
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("log")
    elif panel.series and axes.get_ylim()[0] > 0:
        axes.set_ylim(bottom=0)


def _draw_marks(axes: Axes, panel: Panel) -> None:
    for mark in panel.marks:
        line = axes.axvline if mark.axis == "x" else axes.axhline
        line(mark.at, color="#808080", linestyle=":", linewidth=1.3)
        behind = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}  # a label is read over any curve
        style: dict[str, Any] = {"fontsize": 8, "color": LIGHT.faint, "clip_on": True, "ha": "right", "bbox": behind}
        if mark.axis == "x":  # the label climbs along its line on the left
            place, label = axes.get_xaxis_transform(), f" {_text(mark.label)} "
            axes.text(mark.at, 0.98, label, transform=place, va="top", rotation=90, **style)
        else:
            place = axes.get_yaxis_transform()
            axes.text(0.99, mark.at, _text(mark.label), transform=place, va="bottom", **style)
