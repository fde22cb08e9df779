"""`packer train`: learn to judge servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from packer.cli.options import force_option, json_option, output_option, quiet_option, seed_option

if TYPE_CHECKING:
    from packer.predictors.store import Model

KINDS = ("forest", "boosting", "tree", "svm", "knn")
SHOWN = (
    "throughput_smape",
    "starvation_macro_f1",
    "mean_itl_ms_smape",
    "mean_ttft_ms_smape",
    "median_ttft_ms_smape",
)


@click.command()
@click.argument("dataset_path", metavar="DATASET")
@click.option(
    "--kind", type=click.Choice(KINDS), default="boosting", show_default=True, help="What to train."
)
@click.option(
    "--search",
    is_flag=True,
    help="Choose hyperparameters by a halving grid search with five grouped folds (slow).",
)
@click.option(
    "--refine",
    is_flag=True,
    help="Search the smallest trees that keep the accuracy, and print them as rules (with --kind tree).",
)
@click.option(
    "--draw", metavar="FILE", help="Draw the tree of the verdict here: .svg, .png or .pdf (with --kind tree)."
)
@seed_option
@output_option("Where to write the predictor, as in forest.packer.", required=True)
@force_option
@json_option
@quiet_option
def train(
    dataset_path: str,
    kind: str,
    search: bool,
    refine: bool,
    draw: str | None,
    seed: int,
    output: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train a predictor on a dataset and print its model card: scores on scenarios that it has not seen.

    \b
    Example:
      packer train data.parquet --kind boosting -o boosting.packer
      packer train data.parquet --kind tree --refine --draw verdict.svg -o tree.packer
      packer solve fleet.csv --predictor ./boosting.packer
    """
    from packer.cli.output import check_output, note, print_json, progress_bar
    from packer.errors import IncompatibleError
    from packer.predictors.dataset import read_dataset
    from packer.predictors.drawing import draw_tree
    from packer.predictors.store import write_model
    from packer.predictors.targets import STARVED
    from packer.predictors.train import train as fit

    if (refine or draw) and kind != "tree":
        raise IncompatibleError(f"--refine and --draw need --kind tree, got --kind {kind}.")
    if refine and search:
        raise IncompatibleError("--refine searches by itself: leave --search away.")
    check_output(output, force=force)
    check_output(draw, force=force)
    data = read_dataset(dataset_path)
    with progress_bar(quiet=quiet) as bar:
        model = fit(kind, data, seed=seed, search=search, refine=refine, progress=bar)
    write_model(model, output, force=force)
    if draw is not None:
        draw_tree(model, STARVED, draw, force=force)
    if as_json:
        print_json(dict(model.header))
    elif not quiet:
        _print(model, rules=refine)
    note(
        f"{output}: {kind} for {data.spec.profile}, trained on {model.header['rows_used']} rows", quiet=quiet
    )


def _print(model: Model, *, rules: bool) -> None:
    from packer.cli.output import show, table
    from packer.predictors.rules import rules_of

    card = model.header["scores"]
    rows = [[name, part["rows"], *(_cell(part, key) for key in SHOWN)] for name, part in card.items()]
    columns = ["held out", "rows", "throughput", "macro F1", "ITL", "mean TTFT", "median TTFT"]
    show(
        table(
            f"{model.kind}: scores on held-out scenarios",
            columns,
            rows,
            caption="SMAPE in percent (0–200 form), F1 of the starvation verdict.",
        )
    )
    if rules:
        for output in ("starved", "served_share"):
            found = rules_of(model, output)
            show(f"{output}: {len(found)} rules", *(f"  {rule}" for rule in found))


def _cell(part: dict[str, Any], key: str) -> str:
    value = part[key]
    if value is None:
        return "–"
    return f"{value:.3f}" if key.endswith("f1") else f"{value:.1f}"
