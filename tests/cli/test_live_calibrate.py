"""The options of `packer live calibrate`."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from packer.cli.live.calibrate import calibrate, duration, slots_of_servers
from packer.settings import Settings


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_durations_have_units(text: str, seconds: float) -> None:
    """Seconds without a unit, else s, m or h."""
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-5s", "10d", "nan", "1e9"])
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
    ],
)
def test_what_to_measure_must_be_clear(arguments: list[str], words: str, tmp_path: Path) -> None:
    """One of a launch file and a URL, the latter with its settings."""
    output = ["-o", str(tmp_path / "p.toml"), "--folder", str(tmp_path / "w")]
    done = CliRunner().invoke(calibrate, [*arguments, *output])
    assert done.exit_code == 2
    assert words in done.output
    assert not list(tmp_path.iterdir())
