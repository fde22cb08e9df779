"""A neutral description of a picture, drawn as a self-contained page (.html) or an image (.png, .svg).

    >>> curve = Line([8, 16, 32], [900, 1700, 2100], label="throughput")
    >>> panel = Panel([curve], x_label="adapters", y_label="tok/s", marks=(Mark(32, "Max_pack"),))
    >>> write_figure(Figure([panel], title="One GPU"), "curve.svg")

The position of a series in its panel decides its colour; `color` overrides it if panels must agree. Colours are safe
for colour-blind readers. Each has a contrast of at least 3:1 (WCAG 2.2, 1.4.11) against the light and the dark ground,
so a picture keeps its meaning in either theme. Markers and dashes distinguish series without colour.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7b6bd0", "#a87000", "#808080")
"""The palette of Okabe and Ito; hues that are too light are darkened."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Ground, ink and grid of a theme."""

    ground: str
    ink: str
    grid: str
    faint: str


LIGHT = Theme(ground="#ffffff", ink="#1b1f24", grid="#e3e6ea", faint="#57606a")
DARK = Theme(ground="#14171c", ink="#e6e8eb", grid="#2f353d", faint="#9aa4af")


Axis = Literal["x", "y"]
Values = Sequence[float] | npt.NDArray[Any]  # Numbers of a series; kept as a tuple of floats.


def known(value: float | None) -> float:
    """The value as a float; NaN, which is not drawn, for None."""
    return math.nan if value is None else float(value)


class _Columns:
    """Columns `x` and `y` of a series, which become tuples of floats."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            if hasattr(self, name):
                object.__setattr__(self, name, tuple(map(float, getattr(self, name))))


@dataclass(frozen=True, slots=True)
class Line(_Columns):
    """Points joined by a line; NaN leaves a gap. `color`: index into the palette, None takes the next."""

    x: Values
    y: Values
    label: str = ""
    color: int | None = None
    dashed: bool = False
    markers: bool = False


@dataclass(frozen=True, slots=True)
class Scatter(_Columns):
    """Points. `texts`: a tooltip for each point, for pages."""

    x: Values
    y: Values
    label: str = ""
    color: int | None = None
    texts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Bars(_Columns):
    """One bar for each category. `failed`: which bars represent a failure; these bars are drawn as outlines."""

    categories: Sequence[str]
    y: Values
    label: str = ""
    color: int | None = None
    failed: Sequence[bool] = ()


Series = Line | Scatter | Bars


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled line across the panel at a value of one axis ("x": vertical)."""

    at: float
    label: str = ""
    axis: Axis = "x"


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. A panel with bars has no series other than bars."""

    series: Sequence[Series]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    x_log: bool = False
    y_log: bool = False
    marks: Sequence[Mark] = ()

    def color(self, position: int) -> str:
        """Colour of the series at a position."""
        chosen = self.series[position].color
        return SERIES[(position if chosen is None else chosen) % len(SERIES)]


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels in a grid, read row by row."""

    panels: Sequence[Panel]
    title: str = ""
    caption: str = ""
    columns: int = 2
    panel_size: tuple[float, float] = field(default=(5.2, 3.4))

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) used."""
        columns = min(self.columns, len(self.panels))
        return math.ceil(len(self.panels) / columns), columns


def render_figure(figure: Figure, suffix: str) -> bytes:
    """The figure as the bytes of a file with this suffix; a page follows the reader's theme, an image is light."""
    if suffix == ".html":
        from packer.report.figures_svg import render_page

        return render_page(figure).encode("utf-8", "replace")
    from packer.report.figures_image import render_image

    return render_image(figure, suffix)


def write_figure(figure: Figure, path: str | os.PathLike[str], *, force: bool = True) -> None:
    """Write .html (without network), .png or .svg atomically; raises `ValidationError`, `OutputError`."""
    from packer.io.files import check_ending, check_writable, write_bytes

    suffix = check_ending(path, "picture")
    check_writable(path, force=force)
    write_bytes(path, render_figure(figure, suffix), force=force)
