"""Records of benchmarks, and the scripts that write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.testing.records import record_text

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDS = sorted(BENCHMARKS.rglob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_records_have_a_line_for_each_row(path: Path) -> None:
    """A record reads as it was written, and stands as the scripts write it: a new row changes one line."""
    text = path.read_text("utf-8")
    assert record_text(json.loads(text)) + "\n" == text


def test_tuples_are_written_as_they_are_read() -> None:
    """A script's rows may be tuples, which JSON has as lists: they take a line for each row, too."""
    rows = tuple((k, f"fleet {k}") for k in range(60))
    assert record_text({"rows": rows}) == record_text({"rows": [list(row) for row in rows]})


def test_scripts_run_with_packer_installed_alone() -> None:
    """A script imports packer and what lies beside it: only an editable checkout has `benchmarks` among its packages,
    and `python -m` from the top of a checkout, as the command for faults of servers has it."""
    others = [path for path in BENCHMARKS.rglob("*.py") if path != BENCHMARKS / "live" / "faults.py"]
    assert [path.name for path in others if "from benchmarks" in path.read_text("utf-8")] == []
