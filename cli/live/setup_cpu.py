"""`packer live setup-cpu`."""

from __future__ import annotations

from pathlib import Path

import click

from packer.cli.declare import argument, bundle, command, option
from packer.cli.options import Writing

FOLDER = click.Path(file_okay=False)


@bundle
class CpuSetup:
    """Where, and with what.

    python: An interpreter that has vLLM already.
    find_links: Where a CPU build of torch lies. [default: that of uv or pip]
    """

    folder: str = argument("[FOLDER]", type=FOLDER, default="vllm-cpu")
    python: str | None = option(metavar="PATH")
    find_links: str | None = option(metavar="DIR|URL")


@command
def setup_cpu(given: CpuSetup, out: Writing) -> None:
    """Make an environment with vLLM for the CPU, a tiny model and its adapters, and FOLDER/launch.toml.

    \b
    Example:
      packer live setup-cpu vllm-cpu && packer live calibrate --launch vllm-cpu/launch.toml
    """
    from packer.live.setup import setup_cpu as make

    place = place_of(given.folder, out)
    ready(make(place, python=given.python, find_links=given.find_links, progress=out.note), out)


def place_of(folder: str, out: Writing) -> Path:
    """The folder, refused before long work if its launch file is there and would be replaced."""
    place = Path(folder)
    if (place / "launch.toml").exists():
        out.check(str(place / "launch.toml"))
    return place


def ready(launch: Path, out: Writing) -> None:
    """Say where the launch file is and what to do with it."""
    out.result({"launch": str(launch)}, lambda: [f"Ready: packer live calibrate --launch {launch}"])
