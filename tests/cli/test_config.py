"""Defaults from `packer.toml` and `[tool.packer]`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.cli import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACKER_CONFIG", raising=False)
    return tmp_path


def profile_of(capsys: Capture, *words: str) -> str:
    """Profile that `packer memory` used."""
    assert run(["memory", "--max-loras", "8", "--max-lora-rank", "8", "--json", *words]) == 0
    return str(json.loads(capsys.readouterr().out)["profile"])


QWEN = "h100-64gb/qwen-2.5-7b-instruct"
LLAMA = "h100-64gb/llama-3.1-8b-instruct"


def test_top_level_keys_hold_for_every_command(folder: Path, capsys: Capture) -> None:
    """A key at the top is the default of that option; the command line wins."""
    assert profile_of(capsys) == LLAMA
    (folder / "packer.toml").write_text(f'profile = "{QWEN}"\ntime-limit = 5\n')
    assert profile_of(capsys) == QWEN
    assert profile_of(capsys, "--profile", LLAMA) == LLAMA


def test_command_tables_win_over_the_top(folder: Path, capsys: Capture) -> None:
    """A command's own table is more particular than the top of the file."""
    (folder / "packer.toml").write_text(f'profile = "{QWEN}"\n[memory]\nprofile = "{LLAMA}"\n')
    assert profile_of(capsys) == LLAMA


def test_pyproject_table(folder: Path, capsys: Capture) -> None:
    """[tool.packer] says the same, unless there is a packer.toml."""
    (folder / "pyproject.toml").write_text(f'[tool.packer.memory]\nprofile = "{QWEN}"\n')
    assert profile_of(capsys) == QWEN
    (folder / "packer.toml").write_text("")
    assert profile_of(capsys) == LLAMA


def test_nested_commands_and_flags(folder: Path, capsys: Capture) -> None:
    """Sub-commands have tables below their group's, lists and switches included."""
    (folder / "packer.toml").write_text(
        '[workload.generate]\nranks = [64]\nadapters = 3\nforce = true\noutput = "f.csv"\n'
    )
    (folder / "f.csv").write_text("old")
    assert run(["workload", "generate"]) == 0
    assert (folder / "f.csv").read_text().count(",64,") == 3
    capsys.readouterr()


def test_environment_names_or_silences_the_file(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PACKER_CONFIG is another file, or none if it is empty."""
    (folder / "packer.toml").write_text(f'profile = "{QWEN}"\n')
    monkeypatch.setenv("PACKER_CONFIG", "")
    assert profile_of(capsys) == LLAMA
    (folder / "other.toml").write_text(f'profile = "{QWEN}"\n')
    monkeypatch.setenv("PACKER_CONFIG", "other.toml")
    assert profile_of(capsys) == QWEN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[memory]\nprofil = 'x'\n", "Did you mean 'profile'?"),
        ("[memory\n", "not TOML"),
        ("memory = 3\n", "expected a table"),
        ("profile = 'nowhere'\n", "nowhere"),
    ],
)
def test_mistakes_are_named(folder: Path, capsys: Capture, text: str, message: str) -> None:
    """A wrong key, a damaged file or a bad value is an input error that names the place."""
    (folder / "packer.toml").write_text(text)
    assert run(["memory"]) == 2
    assert message in capsys.readouterr().err


def test_help_works_whatever_the_file_holds(folder: Path, capsys: Capture) -> None:
    """The list of commands needs no configuration."""
    (folder / "packer.toml").write_text("[")
    assert run(["--help"]) == 0
    assert "solve" in capsys.readouterr().out
