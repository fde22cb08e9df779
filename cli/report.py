"""`packer report`: a plan as one page for people."""

from __future__ import annotations

from pathlib import Path

from packer.cli.declare import bundle, command, option
from packer.cli.options import PlanFile, Writing, output_option


@bundle
class Page:
    """What the page shows.

    comparison_path: A comparison of solvers to show beside the plan: what packer compare --json prints.
    """

    output: str = output_option("Where to write the page.", default="report.html")
    comparison_path: str | None = option("--comparison", metavar="FILE.json")


@command
def report(file: PlanFile, page: Page, out: Writing) -> None:
    """Write a report: what is on each GPU, how far rates may grow, the bound, where the numbers come from.

    The page is one file that needs no network; it follows the reader's light or dark theme and prints well.

    \b
    Examples:
      packer report plan.json -o report.html
      packer compare fleet.csv --solvers greedy,maxbase --json > compared.json
      packer report plan.json --comparison compared.json -o report.html --force
    """
    from packer.report.page import read_comparison, write_report

    out.check(page.output)
    plan = file.plan()
    comparison = read_comparison(page.comparison_path) if page.comparison_path else ()
    out.note_profiles(*(item.profile for item in plan.bins))
    write_report(plan, page.output, comparison=comparison, force=out.force)
    out.note(f"wrote {page.output}")
    size = Path(page.output).stat().st_size
    out.result({"output": page.output, "bytes": size, "gpus": plan.n_gpus}, list)
