"""What every command owes its user: an example, no colours in a pipe, data for scripts."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from packer.cli import cli, run


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
    """Each command prints JSON on demand, or its result is a file or a script anyway."""
    names = {name for param in COMMANDS[words].params for name in param.opts}
    assert names & {"--json", "-o", "--output", "--folder"} or words == "completion" or "folder" in names


@pytest.mark.parametrize("words", COMMANDS)
def test_options_are_explained(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help page of every command prints, and says of which file or number an option wants."""
    assert run([*words.split(), "--help"]) == 0
    assert "Usage: packer" in capsys.readouterr().out


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
