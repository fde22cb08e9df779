"""A disk that is full while a command writes costs the result, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("only", ["simulate", "export", "workload generate", "predictor build"])
def test_a_full_disk(root: Path, only: str) -> None:
    """Exit code 2 without a traceback; old results stay, no half-written one appears, no temporary file stays."""
    script = root / "benchmarks" / "fuzz" / "faults.py"
    done = subprocess.run(
        [sys.executable, script, "--rounds", "1", "--faults", "none,full disk", "--only", only],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 findings" in done.stdout
