"""The benchmark of the solvers: its suite, and that a run can be continued."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def suite(root: Path) -> ModuleType:
    """benchmarks/solvers/suite.py as a module."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("solver_suite", root / "benchmarks" / "solvers" / "suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_suite_covers_rates_ranks_sizes_and_profiles(suite: ModuleType) -> None:
    """At least 60 fleets: every mix of rates and ranks on both profiles, 16 to 4,096 adapters, and traces."""
    instances = list(suite.suite())
    assert len({each.name for each in instances}) == len(instances) >= 60
    drawn = [each for each in instances if each.source is None]
    mixes = Counter((each.profile, each.rates, each.ranks) for each in drawn)
    assert len(mixes) == 2 * len(suite.RATES) * len(suite.RANKS)
    assert {min(each.adapters for each in drawn), max(each.adapters for each in drawn)} == {16, 4096}
    assert len({each.seed for each in drawn}) == len(drawn)
    assert sum(each.source is not None for each in instances) >= 4


def test_a_fleet_is_the_same_every_time(suite: ModuleType) -> None:
    """Seeds decide everything; files are read as they are."""
    for instance in (next(iter(suite.suite())), list(suite.suite())[-1]):
        first, second = instance.workload(), instance.workload()
        assert first.adapters == second.adapters
        assert len(first) == instance.adapters


def test_a_run_is_continued_not_repeated(root: Path, tmp_path: Path) -> None:
    """A second call with the same results file finds everything done; the summary reads what was written."""
    folder, results = root / "benchmarks" / "solvers", tmp_path / "results.jsonl"
    options = ["--predictor", "tree", "--time-limit", "5", "--only", "llama-16-low-rank-8"]
    options += ["--solvers", "greedy-paper", "greedy"]
    command = [sys.executable, str(folder / "run.py"), *options, "--results", str(results)]
    subprocess.run(command, check=True, capture_output=True)
    first = results.read_text("utf-8")
    rows = [json.loads(line) for line in first.splitlines()]
    assert {row["solver"] for row in rows} == {"greedy-paper", "greedy"}
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert again.stdout == ""
    assert results.read_text("utf-8") == first
    page = subprocess.run(
        [sys.executable, str(folder / "summarise.py"), "--results", str(results)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "greedy needs more GPUs than greedy-paper | 0 of 1" in page
    assert str(root) not in page
