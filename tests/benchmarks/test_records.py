"""Records of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.records import record_text

RECORDS = sorted((Path(__file__).resolve().parents[2] / "benchmarks").rglob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_records_have_a_line_for_each_row(path: Path) -> None:
    """A record reads as it was written, and stands as the scripts write it: a new row changes one line."""
    text = path.read_text("utf-8")
    assert record_text(json.loads(text)) + "\n" == text
