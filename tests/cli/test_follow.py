from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import packer
from packer.cli import run
from packer.operate.follow import Following
from packer.plan import Plan


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
