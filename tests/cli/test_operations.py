"""`packer whatif`, `memory`, `evaluate` and `completion` from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from packer.cli import run
from packer.cli.whatif import conclusion
from packer.io.profiles import write_profile
from packer.plan import Plan
from packer.profile import Profile

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def plan_path(toy_plan: Callable[..., Plan], tmp_path: Path) -> str:
    """A plan file of four light adapters on two servers."""
    path = tmp_path / "plan.json"
    toy_plan(["a", "b", "c", "d"]).save(path)
    return str(path)


def test_whatif_holds_and_breaks(plan_path: str, capsys: Capture) -> None:
    """A light plan holds at its rates and breaks at absurd ones, with exit code 3 and the GPU's number."""
    assert run(["whatif", plan_path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True
    assert run(["whatif", plan_path, "--rate-factor", "2000", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is False
    assert found["breaks_first"] in (0, 1)
    assert all(gpu["starved"] for gpu in found["gpus"])


def test_whatif_adds_and_removes(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """Adapters come from a workload file and go by name; one that no slot can hold breaks the plan."""
    add = tmp_path / "add.csv"
    add.write_text("adapter,rank,rate\nnew,8,0.1\n")
    assert run(["whatif", plan_path, "--add", str(add), "--remove", "a"]) == 0
    assert "The plan holds." in capsys.readouterr().out
    add.write_text("adapter,rank,rate\nhuge,64,0.1\n")
    assert run(["whatif", plan_path, "--add", str(add)]) == 3
    assert "huge" in capsys.readouterr().out
    assert run(["whatif", plan_path, "--remove", "nobody"]) == 2


def test_memory_table_and_plot(tmp_path: Path, capsys: Capture) -> None:
    """The table shows where the server stops starting, and the picture is drawn."""
    plot = tmp_path / "memory.svg"
    assert run(["memory", "--max-loras", "1..1024", "--max-lora-rank", "8..128", "--plot", str(plot)]) == 0
    assert "no start" in capsys.readouterr().out
    assert "slot rank 128" in plot.read_text("utf-8")


def test_memory_agrees_with_the_twin(capsys: Capture) -> None:
    """Every figure is the memory model's, and the largest number of slots is really the last that starts."""
    from packer.io.profiles import load_profile
    from packer.twin.memory.policy import kv_cache_tokens, memory_error

    assert run(["memory", "--max-loras", "8,64", "--max-lora-rank", "16,128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    profile = load_profile(found["profile"])
    for row in found["rows"]:
        tokens = kv_cache_tokens(profile, profile.settings(row["max_loras"], row["max_lora_rank"]))
        assert row["kv_cache_tokens"] == max(0, tokens)
    for rank, most in found["largest_max_loras"].items():
        assert memory_error(profile, profile.settings(most, int(rank))) is None
        assert memory_error(profile, profile.settings(most + 1, int(rank))) is not None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-loras", "0..8"),
        ("--max-loras", "8..1"),
        ("--max-loras", "x"),
        ("--max-lora-rank", "12"),
        ("--max-loras", ""),
    ],
)
def test_memory_refuses_bad_ranges(option: str, value: str, capsys: Capture) -> None:
    """A range that means nothing is a usage error that shows the right form."""
    assert run(["memory", option, value]) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_the_shells_own(shell: str, capsys: Capture) -> None:
    """Each script is accepted by its shell, where that is installed."""
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_PACKER_COMPLETE" in script
    binary = shutil.which(shell)
    if binary is not None:
        subprocess.run([binary, "-n"], input=script, text=True, check=True, timeout=20)


def test_completion_offers_commands_and_formats(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """What the shell asks for is answered: commands, options and their values."""
    for words, wanted in (
        ("packer ex", "export"),
        ("packer export --for", "--format"),
        ("packer export --format k", "k8s"),
    ):
        monkeypatch.setenv("_PACKER_COMPLETE", "fish_complete")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", words.split()[-1])
        with pytest.raises(SystemExit):
            run([])
        assert wanted in capsys.readouterr().out


def test_whatif_names_what_has_no_place(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """Adapters without a place and GPUs that break are told apart: servers that hold are not called broken."""
    add = tmp_path / "add.csv"
    add.write_text("adapter,rank,rate\nhuge,64,0.1\n")
    assert run(["whatif", plan_path, "--add", str(add)]) == 3
    out = capsys.readouterr().out
    assert "The servers hold, but 1 adapter has no place." in out
    assert "breaks" not in out
    assert conclusion(2, 4, 0).startswith("The plan breaks: 2 of 4 GPUs. ")
    assert conclusion(2, 4, 3).startswith("The plan breaks: 2 of 4 GPUs, and 3 adapters have no place. ")


def test_whatif_needs_a_server_that_is_used(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """Where every adapter goes and none finds a place, nothing is left to judge: that is said."""
    add = tmp_path / "add.csv"
    add.write_text("adapter,rank,rate\nhuge,64,0.1\n")
    words = [word for name in "abcd" for word in ("--remove", name)]
    assert run(["whatif", plan_path, "--add", str(add), *words]) == 2
    assert "nothing to judge" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["whatif", "evaluate"])
def test_estimates_are_marked(command: str, plan_path: str, capsys: Capture) -> None:
    """A verdict that rests on an estimated profile says so in each form of output; quiet says nothing."""
    assert run([command, plan_path]) == 0
    out, err = capsys.readouterr()
    assert "estimated, not calibrated" in out
    assert "estimated, not calibrated" in err
    assert run([command, plan_path, "--json"]) == 0
    assert '"calibrated": false' in capsys.readouterr().out
    assert run([command, plan_path, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_memory_says_whether_the_profile_is_measured(
    toy_profile: Profile, tmp_path: Path, capsys: Capture
) -> None:
    """Scripts see whether a table of memory rests on an estimate."""
    path = str(tmp_path / "toy.toml")
    write_profile(toy_profile, path)
    words = ["memory", "--max-loras", "8", "--max-lora-rank", "8", "--json"]
    assert run([*words, "--profile", path]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated"] is False
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["calibrated"] is True
