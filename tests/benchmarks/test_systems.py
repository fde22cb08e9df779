"""The comparison with the papers is complete, and its document is what the results say."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from packer.twin.cluster.system import load_system, system_names


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """benchmarks/systems/run.py."""
    monkeypatch.syspath_prepend(str(root / "benchmarks" / "systems"))
    import run

    yield run
    for name in ("run", "rows", "caraserve", "caraserve_server"):
        sys.modules.pop(name, None)


@pytest.fixture
def results(root: Path) -> dict[str, Any]:
    """What was measured last."""
    found: dict[str, Any] = json.loads((root / "benchmarks" / "systems" / "results.json").read_text("utf-8"))
    return found


def test_document_is_written_from_the_results(bench: ModuleType, results: dict[str, Any], root: Path) -> None:
    """No figure is edited by hand."""
    assert (root / "docs" / "systems.md").read_text("utf-8") == bench.page(results)
    whole = (root / "benchmarks" / "systems" / "results.md").read_text("utf-8")
    assert whole == bench.document(results).replace("](", "](../../docs/")
    assert set(results) == set(bench.PAPERS)


def test_every_preset_has_a_row(results: dict[str, Any], bench: ModuleType) -> None:
    """A system that `packer systems` offers was run for a row: what a section reads is noted, not declared."""
    ran = {name for section in results.values() for name in section["presets"]}
    assert ran == set(system_names())


def test_presets_are_those_that_a_section_ran(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A section can't claim a system that it never loaded."""

    def section(seeds: int) -> Any:
        load_system("hrw")
        return bench.Section("test", "", "", (), (), presets=("vllm",))

    monkeypatch.setattr(bench, "import_module", lambda name: SimpleNamespace(section=section))
    assert bench.measured("test", 1)["presets"] == ["hrw"]


def test_rows_are_whole(results: dict[str, Any], bench: ModuleType) -> None:
    """A row with a result has a rule; one that is not kept says why; constants say where they come from."""
    for name, section in results.items():
        assert section["seeds"] > 1, name
        for row in section["rows"]:
            assert (row["kept"] is None) or row["rule"], (name, row["what"])
            assert row["kept"] is not False or row["note"], (name, row["what"])
        assert {constant["mark"] for constant in section["constants"]} <= set(bench.MARKS)


def test_figure_5_of_caraserve(bench: ModuleType) -> None:
    """The toy example's four latencies and two decisions are exact."""
    import caraserve_server

    rows = caraserve_server.toy_rows()
    assert len(rows) == 4
    assert all(row.kept for row in rows)
