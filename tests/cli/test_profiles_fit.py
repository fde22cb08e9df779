"""`packer profiles fit` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.cli import run
from packer.io.profiles import load_profile

BACKBONE = "model,phase,set_batch_size,actual_prompt_len,set_output_length,itl_mean_ms,status\n" + "".join(
    f"llama-3.1-8b-instruct,decode,{b},5,100,{9 + 0.05 * b},ok\n" for b in (1, 10, 50, 100, 200)
)


@pytest.fixture
def profiling(tmp_path: Path) -> str:
    """A folder with one micro-benchmark."""
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "latency_backbone.csv").write_text(BACKBONE)
    return str(folder)


def test_micro_benchmarks_make_a_profile(
    profiling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profile holds the fitted law, the base's memory, and who measured."""
    path = tmp_path / "mine.toml"
    arguments = [
        "profiles",
        "fit",
        "--profiling",
        profiling,
        "--name",
        "mine",
        "--note",
        "us",
        "-o",
        str(path),
    ]
    assert run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    profile = load_profile(str(path))
    assert told["fingerprint"] == profile.fingerprint
    assert profile.name == "mine"
    assert profile.latency.coefficients["base_ms"] == pytest.approx(9.0, rel=0.01)
    assert profile.memory == load_profile("h100-64gb/llama-3.1-8b-instruct").memory
    assert profile.provenance["measured_by"] == "us"
    assert run(arguments) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Nothing to fit"),
        (["--runs", "absent.csv"], "no such file"),
        (["--profiling", "."], "kv_capacity.csv"),
        (["--profiling", ".", "--base", "h100"], "Unknown profile"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Nothing to fit, or a missing table, is exit code 2 and leaves no file."""
    monkeypatch.chdir(tmp_path)
    assert run(["profiles", "fit", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())
