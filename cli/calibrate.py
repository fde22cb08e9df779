"""`packer calibrate`: make a profile from measurements."""

from __future__ import annotations

import click

from packer.cli import LazyGroup

LAZY = {"fit": "packer.cli.calibrate_fit:fit", "live": "packer.cli.calibrate_live:live"}
SHORT_HELP = {
    "fit": "Fit a profile to tables of micro-benchmarks and runs.",
    "live": "Measure real vLLM servers, started here or running at a URL.",
}


@click.group(cls=LazyGroup, lazy=LAZY, short=SHORT_HELP)
def calibrate() -> None:
    """Make the profile of a server from measurements.

    \b
    Example:
      packer calibrate live --launch vllm-cpu/launch.toml --budget 10m -o profile.toml
    """
