"""`packer schedule`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from packer.cli import run
from packer.io.plans import read_plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet of two hot adapters in the day and quiet nights."""
    monkeypatch.chdir(tmp_path)
    Path("fleet.csv").write_text("adapter,rank,rate\n" + "".join(f"a{i},8,1\n" for i in range(30)))
    rows = (f"a{i},0.02,3,3,0.02\n" for i in range(30))
    Path("day.csv").write_text("adapter,night,morning,noon,evening\n" + "".join(rows))


def test_a_day_becomes_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer servers at night, a static plan to deploy, and cron triggers for those that are off."""
    words = ["schedule", "fleet.csv", "--rates", "day.csv", "--period", "21600", "--margin", "0"]
    assert run([*words, "--static", "plan.json", "--keda", "keda.yaml", "-o", "schedule.json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(Path("schedule.json").read_text())
    assert found["gpu_hours"] < found["static_gpu_hours"]
    assert [period["periods"] for period in found["periods"]] == [["night"], ["morning", "noon"], ["evening"]]
    assert len(read_plan("plan.json").bins) == found["static_gpus"]
    triggers = list(yaml.safe_load_all(Path("keda.yaml").read_text()))
    assert len(triggers) == found["static_gpus"] - found["periods"][0]["gpus"]
    assert triggers[0]["spec"]["triggers"][0]["metadata"]["end"] == "0 18 * * *"
    assert f"the static plan of {found['static_gpus']} GPUs takes" in " ".join(out.split())


def test_rates_or_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """One of them, and not both."""
    assert run(["schedule", "fleet.csv"]) == 2
    assert run(["schedule", "fleet.csv", "--rates", "day.csv", "--trace", "day.csv"]) == 2
    assert capsys.readouterr().err.count("either --rates or --trace") == 2
