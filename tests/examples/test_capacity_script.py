"""The capacity script that users write for themselves works as shown."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import packer

PROFILE = "h100-64gb/llama-3.1-8b-instruct"
HEADER = "adapter,rank,rate,input_tokens,output_tokens\n"
Script = Callable[..., SimpleNamespace]


@pytest.fixture
def script(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Runs the script with arguments, as `python` does: its exit code and what it prints."""
    path = str(root / "examples" / "capacity_script.py")

    def run(*arguments: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(path, run_name="__main__")
        out, err = capsys.readouterr()
        return SimpleNamespace(code=end.value.code, out=out, err=err)

    return run


def test_more_traffic_needs_no_fewer_gpus(script: Script, tmp_path: Path) -> None:
    """One line for each factor, with GPUs that grow with the traffic, are those of `packer solve`, and their price."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text(HEADER + "".join(f"a{i},{8 if i % 2 else 16},0.6,1500,60\n" for i in range(40)))
    done = script(fleet, "--factors", "0.25", "1", "--price", "2.5")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()[2:]]
    assert [float(row[0]) for row in rows] == [0.25, 1.0]
    gpus = [int(row[3]) for row in rows]
    assert gpus == sorted(gpus)
    assert gpus[-1] > gpus[0]
    assert [float(row[4].replace(",", "")) for row in rows] == [n * 1825.0 for n in gpus]
    assert gpus[1] == packer.recommend(packer.read_workload(fleet), packer.load_profile(PROFILE)).n_gpus


def test_hopeless_traffic_is_told(script: Script, tmp_path: Path) -> None:
    """Prompts that take longer than the goal allows make the factor infeasible: exit code 3, no traceback."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text(HEADER + "slow,16,0.05,30000,200\n")
    done = script(fleet, "--factors", "4")
    assert done.code == 3, done.err
    assert "infeasible" in done.out


def test_bad_workload_is_one_line(script: Script, tmp_path: Path) -> None:
    """A missing file is a message and exit code 2."""
    done = script(tmp_path / "none.csv")
    assert done.code == 2
    assert "no such file" in done.err
