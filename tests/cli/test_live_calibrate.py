"""The options of `packer live calibrate`."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from packer.cli import run
from packer.cli.live.calibrate import duration, slots_of_servers
from packer.settings import Settings

URL = ["--url", "http://127.0.0.1:9", "--profile", "p", "--max-loras", "8", "--max-lora-rank", "16"]


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_durations_have_units(text: str, seconds: float) -> None:
    """Seconds without a unit, else s, m or h."""
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-5s", "10d", "500ms", "5mm", "nan", "1e9"])
def test_bad_durations_are_refused(text: str) -> None:
    """The message shows the form and the value."""
    with pytest.raises(click.BadParameter, match="10m"):
        duration(text)


def test_servers_are_pairs() -> None:
    """Slots and rank of each server."""
    assert slots_of_servers("8x16,32X8") == (Settings(8, 16), Settings(32, 8))


@pytest.mark.parametrize("text", ["8", "8x", "8x16x2", "axb"])
def test_bad_servers_are_refused(text: str) -> None:
    """Anything but pairs of whole numbers."""
    with pytest.raises(click.BadParameter, match="SLOTSxRANK"):
        slots_of_servers(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --launch or --url"),
        (["--launch", "a", "--url", "b"], "either --launch or --url"),
        (["--url", "http://127.0.0.1:9"], "--profile"),
        (["--launch", "a", "--max-loras", "9"], "--max-loras has no effect with --launch"),
        (["--launch", "a", "--api-key-env", "KEY"], "--api-key-env has no effect with --launch"),
        ([*URL, "--servers", "64x64"], "--servers has no effect with --url"),
    ],
)
def test_what_to_measure_must_be_clear(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of a launch file and a URL, the latter with its settings, and no option of the other."""
    output = ["-o", str(tmp_path / "p.toml"), "--folder", str(tmp_path / "w")]
    assert run(["live", "calibrate", *arguments, *output]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doctor --url http://a:1 --python python", "--python has no effect with --url"),
        ("setup-cpu folder --python python --find-links links", "--find-links has no effect with --python"),
    ],
)
def test_options_of_an_environment_without_effect_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interpreter does nothing for a server that runs, nor the place of torch for an interpreter that has it."""
    assert run(["live", *words.split()]) == 2
    assert message in capsys.readouterr().err
