"""`packer solve` of a trace of requests: for which of its loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.cli import run
from packer.io.plans import load_plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are written there."""
    monkeypatch.chdir(tmp_path)


def test_how_a_trace_was_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that takes a trace says that requests in whole steps are spread, and which requests are left out:
    those far in time from the others, and those without tokens. What was said is no part of a plan: it can be read."""
    rows = "".join(f"{3 * (k // 4)},a{k % 2},8,300,20\n" for k in range(400)) + "9,a0,8,5,0\n9e7,a0,8,300,20\n"
    Path("trace.csv").write_text("timestamp,adapter,rank,input_tokens,output_tokens\n" + rows)
    solve = ["solve", "trace.csv", "--load", "replay", "-o", "a.json"]
    for words in (solve, ["simulate", "trace.csv", "--max-loras", "2"]):
        assert run(words) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert "timestamps come in steps of 3 s" in said
        assert "left out 1 of 401 requests, which have no tokens" in said
        assert "left out 1 request far in time from all others" in said
        assert run([*words, "--quiet", "--force"]) == 0
        assert "packer: left" not in capsys.readouterr().err
    load_plan("a.json")
    assert run(["workload", "from-log", "trace.csv", "--replay", "-o", "file.json", "--quiet"]) == 0
    assert run(["simulate", "file.json", "--max-loras", "2"]) == 0
    assert "timestamps come in steps of 3 s" in " ".join(capsys.readouterr().err.split())


def test_a_trace_is_planned_for_its_busiest_hour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace of requests gets the plan of its busiest hour, which is said; or that of its requests as they were."""
    times = [*(4.0 * k for k in range(900)), *(3600.0 + 0.5 * k for k in range(7200))]
    rows = "".join(f"{t},a{k % 2},8,300,20\n" for k, t in enumerate(times))
    path = tmp_path / "trace.csv"
    path.write_text("timestamp,adapter,rank,input_tokens,output_tokens\n" + rows)
    plans = {}
    for load in (None, "peak", "mean", "replay"):
        words = ["solve", str(path), *(["--load", load] if load else []), "-o", f"{load}.json"]
        assert run(words) == 0
        said = " ".join(capsys.readouterr().err.split())
        plans[load] = load_plan(f"{load}.json")
        if load == "replay":
            assert "its requests as they were: in hindsight, without a margin" in said
        else:
            assert "log of 2 h: planned for" in said
            assert ("--load replay" in said) == (load is None)
    assert plans[None].workload.rate == plans["peak"].workload.rate == pytest.approx(2.0, rel=0.01)
    assert plans["mean"].workload.rate == pytest.approx(1.125, rel=0.01)
    assert plans["replay"].workload.arrivals.trace is not None
    assert all(plan.workload.arrivals.trace is None for load, plan in plans.items() if load != "replay")
