"""The samples in the page of file formats are read as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from packer.io.clusters import read_cluster
from packer.io.profiles import load_profile
from packer.io.workloads import read_workload
from packer.traces.read import read_trace

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "formats.md"
SAMPLES = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("csv", read_workload),
    ("json", read_workload),
    ("yaml", read_workload),
    ("csv", read_trace),
    ("jsonl", read_trace),
    ("toml", read_cluster),
    ("toml", load_profile),
]


def test_every_sample_has_a_reader() -> None:
    """The samples are those that the next test reads, in this order."""
    assert [language for language, _ in SAMPLES] == [language for language, _ in READERS]


@pytest.mark.parametrize("number", range(len(READERS)))
def test_samples_are_read(number: int, tmp_path: Path) -> None:
    """What the page shows as a file is one."""
    (language, text), (_, reader) = SAMPLES[number], READERS[number]
    path = tmp_path / f"sample.{language}"
    path.write_text(text, "utf-8")
    assert reader(path) is not None
