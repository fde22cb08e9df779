"""`packer predictor build`: what predictors are trained on."""

from __future__ import annotations

import click

from packer.cli.declare import bundle, command, option, values
from packer.cli.options import OneProfile, Writing, common


@bundle
class DatasetOptions:
    """How many scenarios, and where they run.

    rows: Scenarios.
    jobs: Processes. [default: all cores]
    backend: Where they run: on this machine, or on a Ray cluster.
    """

    rows: int = option(type=click.IntRange(1, 10_000_000), default=22_000)
    seed: int = common("seed")
    jobs: int | None = option(type=click.IntRange(1, 4096), metavar="N")
    backend: str = option(type=click.Choice(("processes", "ray")), default="processes")
    output: str = common("output", help="Where to write the dataset (Parquet).", required=True)


@command
def build(kind: OneProfile, given: DatasetOptions, out: Writing) -> None:
    """Simulate servers with the twin: the paper's grid, mixtures of rates, ranks and lengths, many near
    the edge of starvation, and one in 11 with 512 to 4,096 adapters.

    An interrupted build goes on where it stopped when the same command is given again.

    \b
    Example:
      packer predictor build --profile h100-64gb/llama-3.1-8b-instruct --rows 22000 -o data.parquet
    """
    from packer.predictors.build import build_dataset
    from packer.predictors.dataset import read_dataset

    out.check(given.output)
    profile = kind.profile(out)
    with out.progress() as progress:
        build_dataset(
            profile, given.output, **values(given, "output", "jobs"), jobs=given.jobs or -1, force=out.force,
            progress=progress,
        )  # fmt: skip
    out.result(lambda: {**read_dataset(given.output).summary(), "output": given.output}, list)
    out.note(f"{given.output}: {given.rows} scenarios of {profile.label}")
