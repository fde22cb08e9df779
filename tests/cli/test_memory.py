"""`packer memory` from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from packer.cli import run
from packer.io.profiles import write_profile
from packer.kv_shape import KvShape
from packer.profile import Profile

Capture = pytest.CaptureFixture[str]


def test_memory_table_and_plot(tmp_path: Path, capsys: Capture) -> None:
    """The table shows where the server stops starting, and the picture is drawn."""
    plot = tmp_path / "memory.svg"
    assert run(["memory", "--max-loras", "1..1024", "--max-lora-rank", "8..128", "--plot", str(plot)]) == 0
    assert "no start" in capsys.readouterr().out
    assert "slot rank 128" in plot.read_text("utf-8")


def test_sglang_has_a_slot_more_for_the_base_model(tmp_path: Path, toy_profile: Profile, capsys: Capture) -> None:
    """The table has no fleet: a note says that requests to the base model take a slot of SGLang."""
    path = tmp_path / "sglang.toml"
    write_profile(replace(toy_profile, engine=replace(toy_profile.engine, name="sglang", prefix_caching=None)), path)
    assert run(["memory", "--profile", str(path)]) == 0
    assert "one slot more than max_loras" in " ".join(capsys.readouterr().err.split())


def test_slots_below_the_needed_rank_are_too_small(capsys: Capture) -> None:
    """Slots of a smaller rank than the adapters' cannot hold them, and the table says so, which JSON lacks."""
    assert run(["memory", "--max-loras", "8", "--max-lora-rank", "64,128", "--rank-needed", "128"]) == 0
    assert capsys.readouterr().out.count("too small") == 1
    assert run(["memory", "--rank-needed", "128", "--json"]) == 2
    assert "--rank-needed has no effect with --json" in capsys.readouterr().out


def test_tokens_that_all_layers_keep_are_named_so(tmp_path: Path, toy_profile: Profile, capsys: Capture) -> None:
    """Where requests hold a state beside their tokens, `simulate` counts in other tokens than the table."""
    path = tmp_path / "states.toml"
    write_profile(replace(toy_profile, model=replace(toy_profile.model, kv_shape=KvShape(0, 0.0, 620.0))), path)
    assert run(["memory", "--profile", str(path)]) == 0
    assert "tokens that all layers keep" in capsys.readouterr().out


def test_ranks_that_a_version_refuses_are_shown_as_those_that_it_takes(capsys: Capture) -> None:
    """vLLM before 0.12 has no slots of rank 1: their column has the rank whose tokens it holds, once."""
    assert run(["memory", "--max-loras", "8", "--max-lora-rank", "1,8", "--set", "vllm-version=0.11.0"]) == 0
    found = capsys.readouterr().out
    assert "rank 1 " not in found
    assert found.count("305,") == 1
    assert run(["memory", "--max-lora-rank", "1", "--set", "vllm-version=0.12.0"]) == 0
    assert "rank 1\n" in capsys.readouterr().out


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
        ("--max-loras", "-1..8"),
        ("--max-loras", "8..1"),
        ("--max-loras", "x"),
        ("--max-lora-rank", "12"),
        ("--max-loras", ""),
    ],
)
def test_memory_refuses_bad_ranges(option: str, value: str, capsys: Capture) -> None:
    """A range that means nothing is a usage error that shows the right form."""
    assert run(["memory", option, value]) == 2
    assert "xpected" in capsys.readouterr().err


def test_memory_says_whether_the_profile_is_measured(toy_profile: Profile, tmp_path: Path, capsys: Capture) -> None:
    """Scripts see whether a table of memory rests on an estimate."""
    path = str(tmp_path / "toy.toml")
    write_profile(toy_profile, path)
    words = ["memory", "--max-loras", "8", "--max-lora-rank", "8", "--json"]
    assert run([*words, "--profile", path]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated"] is False
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["calibrated"] is True
