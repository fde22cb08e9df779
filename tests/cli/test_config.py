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
    (folder / "packer.toml").write_text('set = ["max_model_len=4096"]\n[memory]\nmax-model-len = 8192\n')
    assert "max_model_len 8192" in profile_of(capsys)


def test_typed_settings_leave_others_of_the_file(folder: Path, capsys: Capture) -> None:
    """Each setting of --set is an option of its own: one that is typed replaces that one of the file alone."""
    (folder / "packer.toml").write_text('vllm-version = "0.11.0"\nmax-num-seqs = 64\n')
    found = profile_of(capsys, "--max-num-seqs", "128")
    assert "version 0.11.0" in found
    assert "max_num_seqs 128" in found


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("max-lora-rank = 7\n", (), "Expected --max-lora-rank (in packer.toml) to be one of"),
        ("max-num-seqs = -5\n", (), "Expected --max-num-seqs (in packer.toml) to be a whole number"),
        ("max-num-seqs = -5\n", ("--max-num-seqs", "-6"), "Expected --max-num-seqs to be a whole number"),
    ],
)
def test_rules_name_the_option_that_breaks_them(
    folder: Path, capsys: Capture, text: str, words: tuple[str, ...], said: str
) -> None:
    """Whoever set a value, on the command line or in the file, reads its name there, not a parameter's of the
    library."""
    (folder / "packer.toml").write_text(text)
    (folder / "f.csv").write_text("adapter,rank,rate\na,8,1\n")
    assert run(["simulate", "f.csv", "--max-loras", "1", *words]) == 2
    assert said in capsys.readouterr().err


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


def test_environment_names_or_silences_the_file(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("[memory\n", "expected TOML"),
        ("memory = 3\n", "expected a table"),
        ("profile = 'nowhere'\n", "nowhere"),
        ("time_limit = 5\n", "no command has an option --time_limit. Did you mean 'time-limit'?"),
        ("profle = 'x'\n", "Did you mean 'profile'?"),
        ("version = '1'\n", "no command has an option --version"),
        ("solve = 3\n", "expected a table"),
        ("[slove]\ntime-limit = 5\n", "packer has no command 'slove'. Did you mean 'solve'?"),
        ("[workload.generat]\nadapters = 3\n", "packer workload has no command 'generat'. Did you mean 'generate'?"),
        ("[workload]\nseed = 1\n", "packer workload has no command 'seed'"),
        ("[live]\ndoctor = 1\n", "expected a table"),
        ("[memory]\nquiet = 1\n", "key 'memory.quiet': expected true or false"),
        ("[memory]\njson = {}\n", "key 'memory.json': expected true or false"),
        ("[memory]\nprofile = true\n", "key 'memory.profile': expected text, a number"),
        ("[memory]\nprofile = 2024-05-01\n", "key 'memory.profile': expected text, a number"),
        ("[memory]\nmax-lora-rank = [[8]]\n", "key 'memory.max-lora-rank': expected text, a number"),
        ("[memory]\nmax-lora-rank = 8.5\n", "8.5"),
    ],
)
def test_mistakes_are_named(folder: Path, capsys: Capture, text: str, message: str) -> None:
    """A wrong key, a damaged file or a bad value is an input error that names the place."""
    (folder / "packer.toml").write_text(text)
    assert run(["memory"]) == 2
    assert message in capsys.readouterr().err


def test_every_kind_of_group_passes_defaults_on(folder: Path, capsys: Capture) -> None:
    """Commands get their defaults however their group holds them: from a table of their own or from the top."""
    (folder / "packer.toml").write_text("[profiles.list]\nquiet = true\n[live.doctor]\njson = true\n")
    assert run(["profiles", "list"]) == 0
    assert capsys.readouterr().out == ""
    run(["live", "doctor", "--url", "http://127.0.0.1:9"])
    assert "checks" in json.loads(capsys.readouterr().out)
    (folder / "packer.toml").write_text("quiet = true\n")
    assert run(["profiles", "list"]) == 0
    assert capsys.readouterr().out == ""


def test_what_another_command_knows_is_no_mistake(folder: Path, capsys: Capture) -> None:
    """An option of some command may stand at the top, and any command's table in the file."""
    (folder / "packer.toml").write_text(
        "repeats = 2\n[live.validate]\nduration = '1m'\n[predictor.build]\nrows = 5\n[profiles.estimate]\n"
    )
    assert profile_of(capsys) == LLAMA


def test_help_works_whatever_the_file_holds(folder: Path, capsys: Capture) -> None:
    """The list of commands needs no configuration."""
    (folder / "packer.toml").write_text("[")
    assert run(["--help"]) == 0
    assert "solve" in capsys.readouterr().out


def test_a_default_acts_where_it_applies(folder: Path) -> None:
    """The exponent of a power law in the file says nothing of a log that names its adapters; typed, it is refused."""
    (folder / "packer.toml").write_text("exponent = 2.0\n")
    rows = "".join(f"{k},a{k % 2},5,6\n" for k in range(120))
    (folder / "log.csv").write_text(f"time,model,input_tokens,output_tokens\n{rows}")
    command = ["workload", "from-log", "log.csv", "--rank", "8", "-o", "fleet.csv"]
    assert run(command) == 0
    assert run([*command, "--force", "--exponent", "2"]) == 2


def test_a_typed_profile_wins_over_a_gpu_and_a_model(folder: Path, capsys: Capture) -> None:
    """The command line wins over the file also where it names the server in the other way."""
    (folder / "packer.toml").write_text('gpu = "h200"\nmodel = "Qwen/Qwen3-8B"\n')
    (folder / "fleet.csv").write_text("adapter,rank,rate\na,8,0.01\n")
    assert run(["solve", "fleet.csv", "--profile", QWEN, "--objective", "gpus", "--no-verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["profile"] == QWEN
