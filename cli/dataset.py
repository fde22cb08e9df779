"""`packer dataset`: what predictors are trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from packer.cli.options import (
    force_option,
    json_option,
    output_option,
    profile_option,
    quiet_option,
    seed_option,
)

if TYPE_CHECKING:
    from packer.predictors.dataset import Dataset


@click.group()
def dataset() -> None:
    """Datasets for training predictors: servers judged by the twin.

    \b
    Example:
      packer dataset build --rows 20000 -o data.parquet
      packer dataset describe data.parquet
    """


@dataset.command()
@profile_option
@click.option(
    "--rows", type=click.IntRange(1, 10_000_000), default=20_000, show_default=True, help="Scenarios."
)
@seed_option
@click.option(
    "--jobs", type=click.IntRange(1, 4096), default=None, metavar="N", help="Processes.  [default: all cores]"
)
@click.option(
    "--backend",
    type=click.Choice(["processes", "ray"]),
    default="processes",
    show_default=True,
    help="Where they run: on this machine, or on a Ray cluster.",
)
@output_option("Where to write the dataset (Parquet).", required=True)
@force_option
@json_option
@quiet_option
def build(
    profile_name: str,
    rows: int,
    seed: int,
    jobs: int | None,
    backend: str,
    output: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Judge servers with the twin: the paper's grid, mixtures of rates, ranks and lengths, and many near the
    edge of starvation.

    An interrupted build goes on where it stopped when the same command is given again.

    \b
    Example:
      packer dataset build --profile h100-64gb/llama-3.1-8b-instruct --rows 20000 -o data.parquet
    """
    import time

    from packer.cli.output import note, note_estimated, print_json, progress_bar
    from packer.io.profiles import load_profile
    from packer.predictors.build import Backend, build_dataset
    from packer.predictors.dataset import read_dataset

    profile = load_profile(profile_name)
    note_estimated(profile, quiet=quiet)
    where: Backend = "ray" if backend == "ray" else "processes"
    started = time.monotonic()
    at_start: list[int] = []
    with progress_bar(quiet=quiet) as bar:

        def update(what: str, done: int, total: int) -> None:
            at_start[:] = at_start or [done]
            bar(what + _left(started, done - at_start[0], total - done), done, total)

        build_dataset(
            profile,
            output,
            rows=rows,
            seed=seed,
            jobs=jobs if jobs is not None else -1,
            backend=where,
            force=force,
            progress=update,
        )
    if as_json:
        print_json({**summarise(read_dataset(output)), "output": output})
    else:
        note(f"{output}: {rows} scenarios of {profile.label}", quiet=quiet)


def _left(started: float, done: int, missing: int) -> str:
    """How long it will still take, in words."""
    import time

    if not done or not missing:
        return ""
    seconds = (time.monotonic() - started) / done * missing
    return f", {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"


@dataset.command()
@click.argument("dataset_path", metavar="DATASET")
@json_option
@quiet_option
def describe(dataset_path: str, as_json: bool, quiet: bool) -> None:
    """What a dataset holds: profile, scenarios by family, how many starve.

    \b
    Example:
      packer dataset describe data.parquet
    """
    from packer.cli.output import number, print_json, show, table
    from packer.predictors.dataset import read_dataset

    data = read_dataset(dataset_path)
    facts = summarise(data)
    if as_json:
        print_json(facts)
    elif not quiet:
        rows = [[name, found["scenarios"], found["starved"]] for name, found in facts["families"].items()]
        show(
            f"{dataset_path}: {len(data)} scenarios of {data.spec.profile}, seed {data.spec.seed}, "
            f"{number(100 * facts['starved_share'])} % starved",
            table(None, ["family", "scenarios", "starved"], rows),
        )


def summarise(data: Dataset) -> dict[str, Any]:
    """Facts of a dataset, JSON-able."""
    families = {
        name: {
            "scenarios": int((data.family == name).sum()),
            "starved": int(data.starved[data.family == name].sum()),
        }
        for name in sorted(set(data.family.tolist()))
    }
    return {
        "profile": data.spec.profile,
        "fingerprint": data.spec.fingerprint,
        "seed": data.spec.seed,
        "scenarios": len(data),
        "starved_share": float(data.starved.mean()),
        "digest": data.digest,
        "families": families,
    }
