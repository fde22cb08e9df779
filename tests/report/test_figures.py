from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from packer.errors import OutputError, ValidationError
from packer.report.figures import (
    DARK,
    LIGHT,
    SERIES,
    Bars,
    Figure,
    Line,
    Mark,
    Panel,
    Scatter,
    render_figure,
    write_figure,
)

HOSTILE = ("</script><script>alert(1)</script>", "$\\frac{", "a\nb\x00\x1b[31m", "\ud800", "{{7*7}}", "名前 ��")


def every_kind(label: str = "series") -> Figure:
    """A figure with every kind of series, mark and scale."""
    x = np.array([1.0, 10.0, 100.0])
    curves = Panel(
        [Line(x, x * 2, label), Scatter(x, [1, np.nan, 3], label, texts=[label] * 3)],
        title=label,
        x_label=label,
        y_label="tok/s",
        x_log=True,
        y_log=True,
        marks=(Mark(10, label), Mark(5, "limit", axis="y")),
    )
    bars = Panel([Bars([label, "b"], [1, 2], "x"), Bars(["b"], [3], "y")])
    return Figure([curves, bars, Panel([])], title=label, caption=label)


@pytest.mark.parametrize("suffix", [".html", ".png", ".svg"])
def test_writes_each_suffix(tmp_path: Path, suffix: str) -> None:
    """The suffix decides the format."""
    path = tmp_path / f"figure{suffix}"
    write_figure(every_kind(), path)
    start = {".html": b"<!doctype html>", ".png": b"\x89PNG", ".svg": b"<?xml"}[suffix]
    assert path.read_bytes().startswith(start)


def test_labels_of_marks_are_read_over_curves(tmp_path: Path) -> None:
    """The label of a mark has a ground of its own, as curves run below it."""
    write_figure(Figure([Panel([], marks=[Mark(5, "limit", axis="y")])]), tmp_path / "x.svg")
    assert "opacity: 0.8" in (tmp_path / "x.svg").read_text().partition(">limit<")[0]


def test_unknown_suffix_is_refused(tmp_path: Path) -> None:
    """A suffix that can't be drawn is an error before anything is written."""
    with pytest.raises(ValidationError, match=r"\.html, \.png, \.svg"):
        write_figure(every_kind(), tmp_path / "figure.pdf")
    assert not list(tmp_path.iterdir())


def test_existing_file_needs_force(tmp_path: Path) -> None:
    """An existing picture is only replaced on demand."""
    path = tmp_path / "figure.svg"
    path.write_text("mine")
    with pytest.raises(OutputError):
        write_figure(every_kind(), path, force=False)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_same_figure_same_bytes(suffix: str) -> None:
    """Images are reproducible byte for byte."""
    assert render_figure(every_kind(), suffix) == render_figure(every_kind(), suffix)


def test_a_long_title_is_wrapped_within_the_picture() -> None:
    """Title and caption that are wider than the picture take further lines: its edges stay empty."""
    from matplotlib.image import imread

    words = "a fleet with a long name on a server with a long name " * 5
    figure = Figure([Panel([Line([1.0, 2.0], [1.0, 2.0], "x")])], title=words, caption=words)
    pixels = imread(io.BytesIO(render_figure(figure, ".png")))
    assert (pixels[:, [0, -1]] == pixels[0, 0]).all()


def test_page_needs_no_network() -> None:
    """The page holds everything: no link, no source, no import."""
    page = render_figure(every_kind(), ".html").decode()
    assert "src=" not in page
    assert "url(" not in page
    assert re.findall(r"href=.[^ >]*", page) == ['href="data:,"']
    assert len(page) < 50_000


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_labels_stay_text(name: str) -> None:
    """A label can't become markup, script or mathtext in any format."""
    page = render_figure(every_kind(name), ".html").decode(errors="strict")
    parser = _Elements()
    parser.feed(page)
    assert parser.scripts == 0
    ElementTree.fromstring(render_figure(every_kind(name), ".svg"))


def test_values_are_tooltips_and_gaps_are_left_out() -> None:
    """A page shows each value on hovering; NaN is no point."""
    page = render_figure(every_kind(), ".html").decode()
    told = re.findall(r"<title>(series: [^<]*)</title>", page)
    assert told == ["series: 1, 2", "series: 10, 20", "series: 100, 200", "series: 1, 1", "series: 100, 3"]


@pytest.mark.parametrize("suffix", [".html", ".svg"])
def test_bars_that_failed_look_different(suffix: str) -> None:
    """What failed is an outline, so that it is not read as a result."""
    fine = Figure([Panel([Bars(["a", "b"], [1, 2])])])
    failed = Figure([Panel([Bars(["a", "b"], [1, 2], failed=[False, True])])])
    assert render_figure(fine, suffix) != render_figure(failed, suffix)


@pytest.mark.parametrize("suffix", [".html", ".svg"])
def test_unequal_columns_are_refused(suffix: str) -> None:
    """x and y must pair up."""
    with pytest.raises(ValueError, match=r"short|same first dimension"):
        render_figure(Figure([Panel([Line([1, 2], [1])])]), suffix)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("ground", [LIGHT.ground, DARK.ground])
@pytest.mark.parametrize("color", SERIES)
def test_palette_has_contrast_on_both_grounds(color: str, ground: str) -> None:
    """Every series colour keeps 3:1 against white and against the dark ground."""
    light, dark = sorted((_luminance(color), _luminance(ground)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3.0
