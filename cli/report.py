"""`packer report`: a plan as one page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from packer.cli import options
from packer.cli.output import check_output, note, note_estimated, print_json, progress_bar

if TYPE_CHECKING:
    from packer.plan import Plan
    from packer.report.curves import Curves

DEFAULT_OUTPUT = "report.html"
DEFAULT_CURVES = 6


@click.command()
@options.plan_argument
@options.output_option("Where to write the page.", default=DEFAULT_OUTPUT)
@click.option(
    "--predictor",
    default=None,
    metavar="NAME|PATH",
    help="Who judges the growing rates.  [default: the plan's predictor]",
)
@click.option(
    "--curves",
    "curves_limit",
    type=click.IntRange(min=0, max=100_000),
    default=DEFAULT_CURVES,
    show_default=True,
    metavar="N",
    help="Draw the growth of all rates for up to so many GPUs, the slowest first; 0 for none.",
)
@click.option(
    "--comparison",
    "comparison_path",
    default=None,
    metavar="FILE.json",
    help="A comparison of solvers to show beside the plan: what packer compare --json prints.",
)
@options.seed_option
@options.force_option
@options.json_option
@options.quiet_option
def report(
    plan_path: str,
    output: str,
    predictor: str | None,
    curves_limit: int,
    comparison_path: str | None,
    seed: int,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write a report: what is on each GPU, how far rates may grow, the bound, where the numbers come from.

    The page is one file that needs no network; it follows the reader's light or dark theme and prints well.

    \b
    Examples:
      packer report plan.json -o report.html
      packer compare fleet.csv --solvers greedy,maxbase --json > compared.json
      packer report plan.json --comparison compared.json --curves 60 -o report.html --force
    """
    from packer.io.files import write_text
    from packer.io.plans import read_plan
    from packer.report.render import render_report

    check_output(output, force=force)
    plan = read_plan(plan_path)
    comparison = read_comparison(comparison_path) if comparison_path else []
    for profile in dict.fromkeys(item.profile for item in plan.bins):
        note_estimated(profile, quiet=quiet)
    curves = draw_curves(plan, predictor, curves_limit, seed=seed, quiet=quiet) if curves_limit else None
    page = render_report(plan, curves=curves, comparison=comparison)
    write_text(output, page, force=force)
    note(f"wrote {output}", quiet=quiet)
    if as_json:
        drawn = [] if curves is None else list(curves.gpus)
        print_json({"output": output, "bytes": len(page.encode()), "gpus": plan.n_gpus, "curves": drawn})
    return 0


def draw_curves(plan: Plan, predictor: str | None, limit: int, *, seed: int, quiet: bool) -> Curves | None:
    """The plan's GPUs at growing rates, as its own predictor or another one judges them."""
    from packer.report.curves import growth_curves
    from packer.solvers.evaluator import Evaluator

    if not plan.bins:
        return None
    name = predictor or plan.predictor
    judge = Evaluator.load(name, list(dict.fromkeys(item.profile for item in plan.bins)), seed=seed)
    today = plan.evaluations if name == plan.predictor else None
    with progress_bar(quiet=quiet) as progress:
        return growth_curves(
            plan, judge.evaluate, predictor=name, today=today, limit=limit, progress=progress
        )


def read_comparison(path: str) -> Sequence[Mapping[str, object]]:
    """Rows of a comparison: a JSON list of flat objects with the same keys, or such a list under `rows`."""
    from packer.errors import FileFormatError, shown
    from packer.io.documents import parse_json
    from packer.io.files import read_text

    data = parse_json(read_text(path), path)
    rows = data.get("rows") if isinstance(data, dict) else data
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, dict) for row in rows)
        or any(row.keys() != rows[0].keys() for row in rows)
    ):
        raise FileFormatError(f"expected a list of rows with the same keys, got {shown(data)}.", path=path)
    for number, row in enumerate(rows, start=1):
        _check_cells(row, number, path)
    return rows


def _check_cells(row: Mapping[str, object], number: int, path: str) -> None:
    """Raise `FileFormatError` if a cell of the row holds cells itself."""
    from packer.errors import FileFormatError, shown

    for key, value in row.items():
        if not isinstance(value, str | int | float | None):
            raise FileFormatError(
                f"expected text, a number, true, false or null in each cell, got {shown(value)} as "
                f"{shown(key)} of entry {number}.",
                path=path,
            )
