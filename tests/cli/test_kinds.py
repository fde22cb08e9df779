"""The servers that commands plan with."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.cli import run


@pytest.mark.parametrize(
    "words",
    [
        ["solve", "--no-verify", "--max-replicas", "1", "-o", "plan.json"],
        ["schedule", "--rates", "rates.csv", "-o", "day.json"],
    ],
)
def test_a_server_starts_with_the_largest_rank_of_the_fleet(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --tensor-parallel-size servers have as many GPUs as a slot of the fleet's largest rank needs."""
    monkeypatch.chdir(tmp_path)
    Path("fleet.csv").write_text("adapter,rank,rate\na,16,0.05\n")
    Path("rates.csv").write_text("adapter,00:00,12:00\na,0.02,0.05\n")
    command, *others = words
    assert run([command, "fleet.csv", "--gpu", "l4", "--model", "Qwen/Qwen3-32B", *others]) == 0
    assert capsys.readouterr().out.startswith("8 × L4 as 1 server of 8 ")
