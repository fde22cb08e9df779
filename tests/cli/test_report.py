"""`packer report` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packer.cli import run
from packer.plan import Plan

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def report(toy_plan: Callable[..., Plan], tmp_path: Path) -> Callable[[object], int]:
    """Reports on a small plan with a comparison as its text or as data; the exit code."""
    toy_plan(["a", "b"]).save(tmp_path / "plan.json")

    def make(comparison: object) -> int:
        path = tmp_path / "compared.json"
        path.write_text(comparison if isinstance(comparison, str) else json.dumps(comparison))
        page = str(tmp_path / "report.html")
        words = ["report", str(tmp_path / "plan.json"), "--comparison", str(path), "--curves", "0"]
        return run([*words, "-o", page])

    return make


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"rows": rows}])
def test_comparisons_are_shown(report: Callable[[object], int], tmp_path: Path, wrap: Any) -> None:
    """What packer compare prints is on the page, whatever order the keys of a row have."""
    rows = [
        {"solver": "greedy", "gpus": 3, "runtime_s": 0.5},
        {"gpus": None, "solver": "other\ud800", "runtime_s": None},
    ]
    assert report(wrap(rows)) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "greedy" in page
    assert r"other\ud800" in page


@pytest.mark.parametrize(
    ("comparison", "message"),
    [
        ([{"solver": "a"}, {"solver": ["b"]}], "got ['b'] as 'solver' of entry 2"),
        ([{"solver": {"x": 1}}], "got {'x': 1} as 'solver' of entry 1"),
        ([{"solver": "a"}, {"gpus": 1}], "rows with the same keys, got [{"),
        ([1], "rows with the same keys, got [1]"),
        (
            {"workload": "other", "rows": [{"adapters": 30}]},
            "expected a comparison on the plan's workload, 'workload' of 2 adapters, got 'other' of 30",
        ),
        ([{"adapters": 30}], "of 2 adapters, got 'workload' of 30"),
        ({"row": []}, "rows with the same keys, got {'row': []}"),
        ("{", "row 1: expected JSON"),
    ],
)
def test_bad_comparisons_are_refused(
    report: Callable[[object], int], tmp_path: Path, capsys: Capture, comparison: object, message: str
) -> None:
    """A comparison that is no table of plain cells is an input error that shows where, and no page is made."""
    assert report(comparison) == 2
    err = capsys.readouterr().err
    assert "compared.json" in err
    assert message in err
    assert not (tmp_path / "report.html").exists()


def test_odd_columns_are_text(report: Callable[[object], int], tmp_path: Path) -> None:
    """A column may be called anything that JSON can say, half of a character included."""
    assert report([{"x\ud800": 1}]) == 0
    assert r"x\ud800" in (tmp_path / "report.html").read_text("utf-8")


def test_a_page_is_html(toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture) -> None:
    """Another ending is refused before the work: a PDF of that name could not be opened."""
    toy_plan(["a", "b"]).save(tmp_path / "plan.json")
    assert run(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "r.pdf")]) == 2
    assert "Expected a page's file to end in .html, .htm, got" in capsys.readouterr().err
    assert not (tmp_path / "r.pdf").exists()
    assert run(["report", str(tmp_path / "plan.json"), "--curves", "0", "--seed", "0"]) == 2
    assert "--seed has no effect with --curves 0" in capsys.readouterr().err
