"""`packer report`: a plan as one page for people."""

from __future__ import annotations

from pathlib import Path

import click

from packer.cli.declare import bundle, command, option, values
from packer.cli.options import PlanArgument, Writing, common
from packer.cli.traffic import refuse_unused


@bundle
class ReportPage:
    """What the page shows.

    curves: Draw the growth of all rates for up to so many GPUs, the slowest first; 0 for none.
    comparison_path: A comparison of solvers to show beside the plan: what packer compare --json prints.
    """

    output: str = common("output", help="Where to write the page.", default="report.html")
    predictor: str | None = common(
        "predictor", default=None, help="What evaluates the growing rates.  [default: the plan's predictor]"
    )
    curves: int = option(type=click.IntRange(min=0, max=100_000), default=6, metavar="N")
    comparison_path: str | None = option("--comparison", metavar="FILE.json")
    seed: int | None = common("seed", default=None, help="Seed of the growing rates.  [default: the plan's]")


@command
def report(file: PlanArgument, page: ReportPage, out: Writing) -> None:
    """Write a report: what is on each GPU, how far rates may grow, the bound, where the numbers come from.

    The page is one file that needs no network; it follows the reader's light or dark theme and prints well.

    \b
    Examples:
      packer report plan.json -o report.html
      packer compare fleet.csv --solvers greedy,maxbase --json > compared.json
      packer report plan.json --comparison compared.json --curves 60 -o report.html --force
    """
    from packer.report.page import read_comparison, write_report

    out.check(page.output, what="page")
    refuse_unused("--curves 0", () if page.curves else ("predictor", "seed"))
    plan = file.plan()
    comparison = read_comparison(page.comparison_path, plan.workload) if page.comparison_path else ()
    out.note_profiles(*(item.profile for item in plan.bins))
    with out.progress() as progress:
        given = values(page, "output", "comparison_path") | {"force": out.force, "progress": progress}
        growth = write_report(plan, page.output, comparison=comparison, **given)
    out.note(f"wrote {page.output}")
    size = Path(page.output).stat().st_size
    drawn = [] if growth is None else list(growth.gpus)
    out.result({"output": page.output, "bytes": size, "gpus": plan.n_gpus, "curves": drawn}, list)
