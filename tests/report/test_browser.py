"""Pages in a real browser: no message on the console, no request, themes, and the search box."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packer.plan import Plan
from packer.report.figures import DARK, LIGHT, Figure, Line, Mark, Panel, write_figure
from packer.report.growth import Evaluate, growth_of
from packer.report.page import render_report
from packer.room import Room


@pytest.fixture
def page(toy_plan: Callable[..., Plan], saturating: Evaluate, tmp_path: Path) -> Path:
    """The report of a large plan with hostile names among its adapters."""
    names = [f"customer-{k:04d}" for k in range(994)]
    names += ['"><script>alert(1)</script>', "{{7*7}}", "<img src=http://x/y>", "\u2028\u202e", "needle", "' onload='"]
    plan = toy_plan(names, gpus=60)
    path = tmp_path / "report.html"
    rooms = tuple(Room(1.0 + k % 5 / 10) for k in range(60))
    growth = growth_of(plan, saturating, predictor="saturating")
    path.write_text(render_report(dataclasses.replace(plan, rooms=rooms), growth=growth), "utf-8")
    return path


def background(browser: Any) -> tuple[int, ...]:
    """Colour behind the page, as the browser computes it."""
    css = browser.script("return getComputedStyle(document.body).backgroundColor")
    return tuple(int(part) for part in css.removeprefix("rgb(").rstrip(")").split(","))


def as_rgb(color: str) -> tuple[int, ...]:
    """#rrggbb as numbers."""
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.parametrize(
    ("scheme", "media", "ground"),
    [
        ("light", "screen", LIGHT),
        ("dark", "screen", DARK),
        ("light", "print", LIGHT),
        ("dark", "print", LIGHT),
    ],
)
def test_report_in_each_theme(browser: Any, page: Path, scheme: str, media: str, ground: Any) -> None:
    """The page follows the theme, prints on white, loads nothing and leaves the console empty."""
    browser.open(page, scheme=scheme, media=media)
    assert browser.messages() == []
    assert background(browser) == as_rgb(ground.ground)
    assert browser.script("return performance.getEntriesByType('resource').length") == 0
    assert browser.script("return document.querySelectorAll('script').length") == 1
    assert browser.script("return document.querySelectorAll('img').length") == 0


@pytest.mark.parametrize("width", [1280, 320])
def test_report_does_not_overflow(browser: Any, page: Path, width: int) -> None:
    """On a laptop, and on a small phone, nothing sticks out sideways."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.command("Emulation.setDeviceMetricsOverride", **size)
    browser.open(page)
    widths = browser.script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    browser.command("Emulation.clearDeviceMetricsOverride")
    assert widths[0] <= widths[1]


def test_search_finds_an_adapter(browser: Any, page: Path) -> None:
    """Typing a name leaves its row, opened, and hides the others."""
    browser.open(page)
    browser.script("document.querySelector('#find').focus()")
    browser.command("Input.insertText", text="needle")
    shown = browser.script(
        "const open = '.adapters details:not([hidden])[open] tbody tr:not([hidden])';"
        "return Array.from(document.querySelectorAll(open))"
        ".map(row => row.cells[0].textContent)"
    )
    assert shown == ["needle"]
    assert browser.messages() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figure_page_draws_itself(browser: Any, tmp_path: Path, scheme: str) -> None:
    """A picture's page draws its curves without network or messages, on the ground of the theme."""
    path = tmp_path / "figure.html"
    panel = Panel([Line([1, 2], [3, 4], "<b>x</b>")], x_label="adapters", marks=(Mark(1.5, "Max_pack"),))
    write_figure(Figure([panel], title="T"), path)
    browser.open(path, scheme=scheme)
    assert browser.messages() == []
    assert browser.script("return document.querySelectorAll('#figure figure > svg path.line.c0').length") == 1
    assert browser.script("return document.documentElement.scrollWidth <= window.innerWidth")
    assert background(browser) == as_rgb((DARK if scheme == "dark" else LIGHT).ground)
    assert browser.script("return performance.getEntriesByType('resource').length") == 0
