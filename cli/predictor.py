"""`packer predictor`: what predictors are trained on, and training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.declare import argument, bundle, command, flag, option, values
from packer.cli.options import Writing, common
from packer.cli.output import Table
from packer.cli.settings import OneProfile
from packer.errors import IncompatibleError
from packer.io.shipped import table
from packer.words import number

if TYPE_CHECKING:
    from packer.predictors.store import Model


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


SHOWN = table("packer.cli", "metrics.toml")["model-card"]  # Score → column head and digits.


@bundle
class TrainingOptions:
    """The dataset and what is trained on it.

    kind: What to train.
    search: Choose hyperparameters by successive halving over the paper's grid, with five grouped folds (slow).
    refine: Search the smallest trees that keep the accuracy, and print them as rules (with --kind tree).
    """

    dataset_path: str = argument("DATASET")
    kind: str = option(type=click.Choice(("forest", "boosting", "tree", "svm", "knn")), default="boosting")
    search: bool = flag()
    refine: bool = flag()
    seed: int = common("seed")
    output: str = common("output", help="Where to write the predictor, as in forest.packer.", required=True)


@command
def train(given: TrainingOptions, out: Writing) -> None:
    """Train a predictor on a dataset and print its model card: scores on scenarios that it has not seen.

    \b
    Example:
      packer predictor train data.parquet --kind boosting -o boosting.packer
      packer predictor train data.parquet --kind tree --refine -o tree.packer
      packer solve fleet.csv --predictor ./boosting.packer
    """
    from packer.predictors.dataset import read_dataset
    from packer.predictors.store import write_model
    from packer.predictors.train import train as fit

    if given.refine and given.kind != "tree":
        raise IncompatibleError(f"--refine needs --kind tree, got --kind {given.kind}.")
    if given.refine and given.search:
        raise IncompatibleError("--refine includes a search: leave out --search.")
    out.check(given.output)
    data = read_dataset(given.dataset_path)
    with out.progress() as progress:
        model = fit(given.kind, data, **values(given, "dataset_path", "kind", "output"), progress=progress)
    write_model(model, given.output, force=out.force)
    out.result(dict(model.header), lambda: _card(model, rules=given.refine))
    used = model.header["rows_used"]
    out.note(f"{given.output}: {given.kind} for {data.spec.profile}, trained on {used} rows")


def _card(model: Model, *, rules: bool) -> list[Table | str]:
    from packer.predictors.rules import rules_of

    card = model.header["scores"]
    rows = [
        [name, part["rows"], *(number(part[key], digits) for key, (_, digits) in SHOWN.items())]
        for name, part in card.items()
    ]
    columns = ["held out", "rows", *(head for head, _ in SHOWN.values())]
    caption = "SMAPE in percent (0–200 form), F1 of starvation."
    title = f"{model.kind}: scores on held-out scenarios"
    lines: list[Table | str] = [Table(title, columns, rows, caption=caption)]
    for output in ("starved", "served_share") if rules else ():
        found = rules_of(model, output)
        lines += [f"{output}: {len(found)} rules", *(f"  {rule}" for rule in found)]
    return lines
