"""What every command owes its user: an example, no colours in a pipe, data for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from packer.cli import cli, run
from packer.cli.config import every_option
from packer.cli.declare import FEW_OPTIONS, option_sections
from packer.goal import OF_MANY, level


def walk(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with what is typed to get it."""
    if not isinstance(command, click.Group):
        yield " ".join(words), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None, name
        yield from walk(child, (*words, name))


COMMANDS = dict(walk(cli))


@pytest.mark.parametrize("words", COMMANDS)
def test_help_has_an_example_that_names_the_command(words: str) -> None:
    """Each help page shows how the command is really typed."""
    text = COMMANDS[words].help or ""
    assert "Example" in text
    assert f"packer {words}" in text.split("Example", 1)[1]


@pytest.mark.parametrize("words", COMMANDS)
def test_results_reach_scripts(words: str) -> None:
    """Each command can print JSON, and can be silent."""
    names = {name for param in every_option(COMMANDS[words]) for name in param.opts}
    assert {"--json", "--quiet"} <= names


@pytest.mark.parametrize("words", COMMANDS)
def test_a_long_page_has_sections(words: str) -> None:
    """A command with many options shows them by what they are about; none is left over, and none stands twice."""
    known = [name for names in option_sections().values() for name in names]
    assert len(known) == len(set(known))
    options = every_option(COMMANDS[words])
    if len(options) >= FEW_OPTIONS:
        assert {max(each.opts, key=len)[2:] for each in options} - set(known) == set()


@pytest.mark.parametrize("words", COMMANDS)
def test_options_are_explained(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help page of every command prints, and says in words what each option is for."""
    assert run([*words.split(), "--help"]) == 0
    assert "Usage: packer" in capsys.readouterr().out
    options = every_option(COMMANDS[words])
    bare = [param.name for param in options if not (param.help or "").partition("[default")[0].strip()]
    assert bare == []


def test_the_help_of_slo_says_which_statistics_limit_servers() -> None:
    """All statistics of one adapter's requests limit adapters, but for quantiles of the ITL, which limit servers."""
    (slo,) = (each.help or "" for each in every_option(COMMANDS["solve"]) if each.name == "slo")
    of_servers = {key for key in OF_MANY if level(key) == "server"}
    assert of_servers == {f"{quantile}_itl_ms" for quantile in ("median", "p90", "p95", "p99")}
    assert "quantiles of itl_ms limit servers" in slo


@pytest.mark.parametrize(
    "words",
    [
        "profiles list",
        "profiles show h100-64gb/qwen-2.5-7b-instruct",
        "workload describe {fleet}",
        "workload describe {fleet} --json",
    ],
)
def test_quiet_commands_print_nothing_but_json(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --quiet the tables stay away; JSON is still printed."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("adapter,rank,rate\na,8,0.1\n", "utf-8")
    assert run([*words.format(fleet=fleet).split(), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert bool(out) == ("--json" in words)
    assert err == ""


@pytest.mark.parametrize("variable", ["NO_COLOR", None])
def test_no_colours_outside_a_terminal(
    variable: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Output that goes to a pipe, or with NO_COLOR anywhere, holds no escape sequences and no progress."""
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    assert run(["memory", "--max-loras", "8", "--max-lora-rank", "8"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert err == ""


@pytest.mark.parametrize("words", [[], ["live"], ["workload"]])
def test_a_group_alone_shows_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Who types a group without a command gets its commands, not an error that repeats the usage."""
    assert run(words) == 2
    err = capsys.readouterr().err
    assert err.count("Usage:") == 1
    assert "Commands:" in err
    assert "Error" not in err
