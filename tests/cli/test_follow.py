from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packer
from packer.cli import run
from packer.errors import OutputError
from packer.operate.follow import Following
from packer.plan import Plan

Capture = pytest.CaptureFixture[str]


def test_a_log_is_followed_as_it_ends(
    toy_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command measures the last window of a log, whose busiest one is over, with and without --every."""
    plan, plan_path = toy_plan(["a", "b", "c", "d"]), tmp_path / "plan.json"
    plan.save(plan_path)
    text = "".join(f'[[servers]]\nurl = "http://127.0.0.1:{9000 + k}"\n' for k in range(len(plan.bins)))
    (tmp_path / "servers.toml").write_text(f"schema = 1\n{text}")
    times = np.concatenate([np.arange(0, 3600, 2.0), np.arange(3600, 7200, 40.0)]) + 1_767_225_600
    usage = '"usage": {"prompt_tokens": 100, "completion_tokens": 50}'
    log = "\n".join(f'{{"timestamp": {t:.0f}, "model": "a", {usage}}}' for t in times)
    (tmp_path / "log.jsonl").write_text(log, "utf-8")
    seen: list[packer.Workload] = []
    monkeypatch.setattr(Following, "run", lambda self, *_: seen.append(self.read()))
    words = f"live follow {plan_path} --servers {tmp_path}/servers.toml --log {tmp_path}/log.jsonl --dry-run"
    for more in ([], ["--every", "30s"]):
        assert run([*words.split(), *more]) == 0
        assert seen.pop().rates.tolist() == [pytest.approx(0.025, rel=0.3)]


def test_what_has_no_effect_is_refused(toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture) -> None:
    """Limits of a class that no adapter has, and options of the measurement without one, are said to have no effect."""
    plan_path = tmp_path / "plan.json"
    toy_plan(["a", "b"]).save(plan_path)
    words = ["live", "follow", str(plan_path)]
    assert run([*words, "--servers", "servers.toml", "--slo", "gold:p95_ttft_ms=900"]) == 2
    assert "Expected limits for an slo_class of the fleet" in capsys.readouterr().err
    for more in (["--window", "60"], ["--gateway", "vllm"]):
        assert run([*words, "--simulate", "trace.csv", *more]) == 2
        assert f"{more[0]} has no effect with --simulate" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--slo", "mean_itl_ms=50"]])
def test_a_fleet_that_is_read_again_keeps_the_goal(
    more: list[str], toy_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers are judged by the plan's goal, or --slo, also after the file of the fleet has changed."""
    made, plan_path = toy_plan(["a", "b"]), tmp_path / "plan.json"
    goal = made.workload.held_to("p95_ttft_ms=900")
    replace(made, workload=goal).save(plan_path)
    (tmp_path / "servers.toml").write_text('schema = 1\n[[servers]]\nurl = "http://127.0.0.1:9000"\n')
    (tmp_path / "fleet.csv").write_text("adapter,rank,rate\na,8,0.1\nnew,8,0.1\n")
    seen: list[packer.Workload] = []
    monkeypatch.setattr(Following, "run", lambda _self, _after, fleet: seen.append(fleet()))
    words = ["live", "follow", str(plan_path), "--servers", f"{tmp_path}/servers.toml", "--dry-run", *more]
    assert run([*words, "--fleet", str(tmp_path / "fleet.csv")]) == 0
    assert seen[0].names == ("a", "new")
    assert seen[0].slo == goal.held_to(tuple(more[1:])).slo


def test_requests_to_the_base_model_are_followed(
    toy_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests to the base model have its name in a log, and another one in the plan."""
    made, plan_path = toy_plan(["a", "plain"]), tmp_path / "plan.json"
    fleet = made.workload
    adapters = tuple(replace(each, rank=0) if each.name == "plain" else each for each in fleet.adapters)
    replace(made, workload=replace(fleet, adapters=adapters)).save(plan_path)
    (tmp_path / "servers.toml").write_text('schema = 1\n[[servers]]\nurl = "http://127.0.0.1:9000"\n')
    usage, model = '"usage": {"prompt_tokens": 100, "completion_tokens": 50}', made.bins[0].profile.model.name
    rows = [(k, each) for k in range(0, 3600, 20) for each in ("a", model)]
    log = "\n".join(f'{{"timestamp": {1_767_225_600 + k}, "model": "{name}", {usage}}}' for k, name in rows)
    (tmp_path / "log.jsonl").write_text(log, "utf-8")
    seen: list[packer.Workload] = []
    monkeypatch.setattr(Following, "run", lambda self, *_: seen.append(self.read()))
    words = ["live", "follow", str(plan_path), "--servers", f"{tmp_path}/servers.toml", "--dry-run"]
    assert run([*words, "--log", f"{tmp_path}/log.jsonl"]) == 0
    assert sorted(seen[0].names) == ["a", "plain"]


def test_quiet_hides_no_error_and_a_page_no_change(
    toy_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """With --quiet an error is said once while it lasts; a page that can't be written hides no change."""
    toy_plan(["a", "b"]).save(tmp_path / "plan.json")
    (tmp_path / "servers.toml").write_text('schema = 1\n[[servers]]\nurl = "http://127.0.0.1:9000"\n')
    entry = {"time_s": 0.0, "why": "a server was lost", "steps": ["load 'a' on gpu-0"], "loads": 1}

    def looks(self: Following, after: Callable[[list[object]], None], _fleet: object) -> None:
        self.log = [entry]
        for self.last_error in ("gpu-0 is away", "gpu-0 is away", "", "gpu-0 is away"):
            with suppress(OutputError):
                after([None])

    monkeypatch.setattr(Following, "run", looks)
    words = ["live", "follow", f"{tmp_path}/plan.json", "--servers", f"{tmp_path}/servers.toml", "--dry-run"]
    assert run([*words, "--quiet"]) == 0
    assert capsys.readouterr().err.count("packer: gpu-0 is away") == 2
    monkeypatch.setattr("packer.cli.live.act.write_text", write_nothing)
    assert run([*words, "--html", f"{tmp_path}/follow.html"]) == 0
    assert "load 'a' on gpu-0" in capsys.readouterr().out


def write_nothing(path: str, _text: str) -> None:
    raise OutputError(f"{path}: no space left on device")
