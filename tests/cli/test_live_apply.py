"""`packer live apply` on stand-ins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.cli import run
from packer.plan import Plan
from tests.live.stand_in import StandIn
from tests.operate.test_follow import plan, servers  # noqa: F401 - fixtures


def test_the_commands_apply_and_refuse(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command prints the steps of a dry run, carries them out with --yes, and needs servers or a trace."""
    plan.save(tmp_path / "plan.json")
    text = "".join(f'[[servers]]\nurl = "{each.url}"\n' for each in servers)
    (tmp_path / "servers.toml").write_text(f"schema = 1\n{text}[limits]\nsettle_s = 0.0\n")
    servers[0].adapters.pop("a1")
    for each in servers:
        each.longest = plan.bins[0].profile.engine.max_model_len
    words = ["live", "apply", str(tmp_path / "plan.json"), "--servers", str(tmp_path / "servers.toml")]
    assert run([*words, "--dry-run"]) == 0
    assert "load 'a1' on gpu-0" in capsys.readouterr().out
    assert "a1" not in servers[0].adapters
    assert {each.name for each in tmp_path.iterdir()} == {"plan.json", "servers.toml"}
    assert run([*words, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []
    assert "a1" in servers[0].adapters
    assert run(["live", "follow", str(tmp_path / "plan.json")]) == 2
