"""`packer predictor describe`: what a dataset holds."""

from __future__ import annotations

from packer.cli.declare import argument, bundle, command
from packer.cli.options import Output
from packer.cli.output import Table
from packer.words import number


@bundle
class DescribeOptions:
    """The dataset."""

    dataset_path: str = argument("DATASET")


@command
def describe(given: DescribeOptions, out: Output) -> None:
    """What a dataset holds: profile, scenarios by family, how many starve.

    \b
    Example:
      packer predictor describe data.parquet
    """
    from packer.predictors.dataset import read_dataset

    facts = read_dataset(given.dataset_path).summary()
    rows = [[name, found["scenarios"], found["starved"]] for name, found in facts["families"].items()]
    title = (
        f"{given.dataset_path}: {facts['scenarios']} scenarios of {facts['profile']}, seed {facts['seed']}, "
        f"{number(100 * facts['starved_share'], 1)} % starved"
    )
    out.result(facts, lambda: [title, Table(None, ["family", "scenarios", "starved"], rows)])
