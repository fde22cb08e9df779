from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from packer.report.figures import Bars, Line, Mark, Panel, Scatter
from packer.report.figures_svg import Scale, chart, nice_step


def test_values_land_where_they_belong() -> None:
    """A linear scale is proportional, a logarithmic one by ratios, and nothing leaves the frame."""
    linear, log = Scale(0, 10, 0, 100), Scale(1, 100, 0, 100, log=True)
    assert (linear(0), linear(5), linear(10), linear(99)) == (0, 50, 100, 100)
    assert (log(1), log(10), log(0.0)) == pytest.approx((0, 50, 0))


@pytest.mark.parametrize(("rough", "step"), [(0.7, 1), (1.2, 2), (2.2, 2.5), (3, 5), (7, 10), (0, 1), (13, 20)])
def test_steps_are_round(rough: float, step: float) -> None:
    """Ticks stand at 1, 2, 2.5 or 5 times a power of ten."""
    assert nice_step(rough) == pytest.approx(step)


@pytest.mark.parametrize("low", [1e-3, 0.7, 34.0, 96.0, 4e4])
@pytest.mark.parametrize("ratio", [1.7, 2.4, 4.9, 5.1, 30.0, 1e6])
def test_a_logarithmic_axis_has_two_ticks_at_least(low: float, ratio: float) -> None:
    """One label says nothing about the others on a logarithmic axis, however narrow its range is."""
    ticks = Scale(low, low * ratio, 0.0, 1.0, log=True).ticks()
    assert 2 <= len(ticks) <= 12
    assert all(low <= tick <= low * ratio for tick in ticks)


def test_panel_is_xml_with_every_part() -> None:
    """Every kind of series becomes an element, and text stays text."""
    panel = Panel(
        [Line([1, 2, 3], [1, math.nan, 3]), Scatter([1, 2], [1, math.nan])],
        title="<x>",
        x_label="a & b",
        marks=(Mark(2, "</svg>"), Mark(1, axis="y")),
    )
    root = ElementTree.fromstring(str(chart(panel).svg))
    tags = [element.tag for element in root.iter()]
    assert tags.count("path") == tags.count("circle") == 1
    path = root.find("path")
    assert path is not None
    assert path.attrib["d"].count("M") == 2
    assert "</svg>" in [element.text for element in root.iter("text")]


def test_empty_panels_are_drawn() -> None:
    """A panel without a single finite value is an empty frame, not an error."""
    for log in (False, True):
        ElementTree.fromstring(str(chart(Panel([Line([math.nan], [math.nan])], y_log=log)).svg))


def test_bars_are_rows() -> None:
    """Each bar is a rectangle as long as its value."""
    panel = Panel([Bars(["a"], [1], "x"), Bars(["a"], [3], "y", failed=[True])])
    rects = list(ElementTree.fromstring(str(chart(panel).svg)).iter("rect"))
    widths = [float(rect.attrib["width"]) for rect in rects]
    assert widths[1] == pytest.approx(3 * widths[0], abs=0.2)
    assert len({rect.attrib["x"] for rect in rects}) == 1
    assert ["failed" in rect.attrib["class"] for rect in rects] == [False, True]
