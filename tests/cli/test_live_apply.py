"""`packer live apply` on stand-ins."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from packer.cli import run
from packer.plan import Plan
from tests.live.stand_in import StandIn
from tests.operate.test_follow import plan, servers  # noqa: F401 - fixtures


def told(servers: list[StandIn], plan: Plan, folder: Path, more: str = "") -> list[str]:  # noqa: F811
    """The command, with the plan and the servers in files."""
    plan.save(folder / "plan.json")
    text = "".join(f'[[servers]]\nurl = "{each.url}"\n' for each in servers)
    (folder / "servers.toml").write_text(f"schema = 1\n{text}[limits]\nsettle_s = 0.0\n{more}")
    for each in servers:
        each.longest = plan.bins[0].profile.engine.max_model_len
    return ["live", "apply", str(folder / "plan.json"), "--servers", str(folder / "servers.toml")]


def test_the_commands_apply_and_refuse(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command prints the steps of a dry run, carries them out with --yes, and needs servers or a trace."""
    servers[0].adapters.pop("a1")
    words = told(servers, plan, tmp_path)
    assert run([*words, "--dry-run"]) == 0
    assert "load 'a1' on gpu-0" in capsys.readouterr().out
    assert {each.name for each in tmp_path.iterdir()} == {"plan.json", "servers.toml"}
    assert run([*words, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []
    assert "a1" in servers[0].adapters
    assert run(["live", "follow", str(tmp_path / "plan.json")]) == 2


def test_what_went_wrong_is_said_without_a_terminal_and_quietly(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A question that nobody can answer names --yes, and is no interrupt; --quiet hides no step that failed."""
    servers[0].adapters.pop("a1")
    servers[0].faults = [("/v1/load_lora_adapter", 0, "400")]
    words = told(servers, plan, tmp_path, "tries = 1\n")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run(words) == 2
    assert "Nobody answered: --yes makes the changes" in capsys.readouterr().err
    assert run([*words, "--yes", "--quiet"]) == 3
    assert "packer: load 'a1' on gpu-0: gpu-0: /v1/load_lora_adapter: HTTP 400" in capsys.readouterr().err
    assert run([*words, "--yes"]) == 3
    assert "1 failure in 2 steps: the same command goes on" in capsys.readouterr().out, "its route is not made either"
    servers[0].faults = []
    assert run([*words, "--yes"]) == 0
    assert "2 steps done." in capsys.readouterr().out


def test_the_router_is_told_of_adapters_that_need_not_move(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Servers that hold what the plan says are routed to; the step is listed, and done again where the file is lost."""
    router = f'[router]\nformat = "nginx"\nfile = "packer.conf"\nreload = "echo . >> {tmp_path}/reloads"\n'
    words, file = told(servers, plan, tmp_path, router), tmp_path / "packer.conf"
    steps = []
    for given in (["--dry-run"], ["--yes"], ["--yes"]):
        assert run([*words, *given, "--json"]) == 0
        steps.append(json.loads(capsys.readouterr().out)["steps"])
        assert file.exists() == (given == ["--yes"])
    assert steps == [["write the routes for the router"], ["write the routes for the router"], []]
    file.unlink()
    assert run([*words, "--yes"]) == 0
    assert "a3" in file.read_text()
    state = json.loads((tmp_path / "servers.state.json").read_text())
    assert state["servers"]["gpu-0"] == {"a0": 1.0, "a1": 1.0}
    (tmp_path / "servers.state.json").write_text(json.dumps(state | {"doing": "route as the state says"}))
    assert run([*words, "--yes"]) == 0
    assert (tmp_path / "reloads").read_text().count(".") == 3, "packer was ended before the router had read the file"


def test_a_router_file_of_the_wrong_kind_is_refused_before_the_first_load(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Servers that hold nothing yet have no routes, but the plan will give them some."""
    for each in servers:
        each.adapters.clear()
    (tmp_path / "packer.conf").mkdir()
    words = told(servers, plan, tmp_path, '[router]\nformat = "nginx"\nfile = "packer.conf"\n')
    for given in ("--dry-run", "--yes"):
        assert run([*words, given]) == 2
        assert "Expected `file` of [router] to be a file" in capsys.readouterr().err
    assert not any(each.adapters for each in servers)


def test_a_router_that_fails_to_read_its_file_is_asked_until_it_does(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Where packer was ended before a reload and the next one fails, the right file is no reason to leave it there."""
    router = f'[router]\nformat = "nginx"\nfile = "packer.conf"\nreload = "test -e {tmp_path}/well"\n'
    words, well = told(servers, plan, tmp_path, f"tries = 1\n{router}"), tmp_path / "well"
    well.touch()
    assert run([*words, "--yes"]) == 0
    state = json.loads((tmp_path / "servers.state.json").read_text())
    (tmp_path / "servers.state.json").write_text(json.dumps(state | {"doing": "route as the state says"}))
    well.unlink()
    assert [run([*words, "--yes"]) for _ in range(2)] == [3, 3]
    well.touch()
    assert run([*words, "--yes"]) == 0
