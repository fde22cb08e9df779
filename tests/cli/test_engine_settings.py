"""Engine settings of `packer solve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.cli import run
from packer.io.plans import read_plan

Capture = pytest.CaptureFixture[str]


def test_engine_settings_replace_those_of_the_profile(tmp_path: Path, capsys: Capture) -> None:
    """A plan starts its servers with the settings given, the best of several, and a running plan keeps its own."""
    fleet, path = tmp_path / "fleet.csv", tmp_path / "plan.json"
    fleet.write_text("adapter,rank,rate\na,8,1.5\nb,8,1.5\n")
    words = [
        "solve",
        str(fleet),
        "--objective",
        "gpus",
        "-o",
        str(path),
        "--force",
        "--max-model-len",
        "8192",
    ]
    assert run([*words, "--max-num-seqs", "64"]) == 0
    engine = read_plan(path).bins[0].profile.engine
    assert (engine.max_num_seqs, engine.max_model_len) == (64, 8192)
    fleet.write_text("adapter,rank,rate\na,8,6\n")
    assert run([*words, "--max-num-seqs", "4,512"]) == 0
    assert {item.profile.engine.max_num_seqs for item in read_plan(path).bins} == {512}
    capsys.readouterr()
    assert (
        run(["solve", str(fleet), "--from", str(path), "--max-num-seqs", "64", "-o", str(tmp_path / "x")])
        == 2
    )
    assert "leave out --profile and engine settings" in capsys.readouterr().err
    assert run(["solve", str(fleet), "--max-num-seqs", "1000000"]) == 2
