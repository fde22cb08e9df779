"""The capacity script that users write for themselves works as shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import packer

PROFILE = "h100-64gb/llama-3.1-8b-instruct"
HEADER = "adapter,rank,rate,input_tokens,output_tokens\n"


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "examples" / "capacity_script.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_more_traffic_needs_no_fewer_gpus(root: Path, tmp_path: Path) -> None:
    """One line for each factor, with GPUs that grow with the traffic, are those of `packer solve`, and their price."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text(HEADER + "".join(f"a{i},{8 if i % 2 else 16},0.6,1500,60\n" for i in range(40)))
    done = _run(root, str(fleet), "--factors", "0.25", "1", "--price", "2.5")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [float(row[0]) for row in rows] == [0.25, 1.0]
    gpus = [int(row[3]) for row in rows]
    assert gpus == sorted(gpus)
    assert gpus[-1] > gpus[0]
    assert [float(row[4].replace(",", "")) for row in rows] == [n * 1825.0 for n in gpus]
    assert gpus[1] == packer.recommend(packer.read_workload(fleet), packer.load_profile(PROFILE)).n_gpus


def test_hopeless_traffic_is_told(root: Path, tmp_path: Path) -> None:
    """Prompts that take longer than the goal allows make the factor infeasible: exit code 3, no traceback."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text(HEADER + "slow,16,0.05,30000,200\n")
    done = _run(root, str(fleet), "--factors", "4")
    assert done.returncode == 3, done.stderr
    assert "infeasible" in done.stdout


def test_bad_workload_is_one_line(root: Path, tmp_path: Path) -> None:
    """A missing file is a message and exit code 2."""
    done = _run(root, str(tmp_path / "none.csv"))
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert "Traceback" not in done.stderr
