"""`packer whatif`: does the running plan still hold?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from packer.cli import options
from packer.cli.output import note, number, print_json, progress_bar, show, table
from packer.cli.servers import calibrated, note_estimates, servers

if TYPE_CHECKING:
    from rich.table import Table

    from packer.evaluation import Evaluations
    from packer.operate.changes import Changed
    from packer.plan import Plan


@click.command()
@options.plan_argument
@options.rate_factor_option
@click.option(
    "--add", "add_path", default=None, metavar="WORKLOAD", help="A workload file of adapters that come."
)
@click.option("--remove", multiple=True, metavar="ADAPTER", help="An adapter that goes; repeatable.")
@click.option(
    "--predictor", default=None, metavar="NAME|PATH", help="Who judges.  [default: the plan's predictor]"
)
@options.seed_option
@options.json_option
@options.quiet_option
def whatif(
    plan_path: str,
    rate_factor: float,
    add_path: str | None,
    remove: tuple[str, ...],
    predictor: str | None,
    seed: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Does the running plan still hold when rates grow, adapters come or go? Which GPU breaks first?

    Servers keep their settings; a new adapter goes to the least loaded server with large enough slots. Exit
    code 3 means that a server breaks or an adapter finds no server: packer replan then makes the next plan.

    \b
    Examples:
      packer whatif plan.json --rate-factor 1.2
      packer whatif plan.json --add new.csv --remove old-adapter
    """
    from packer.errors import IncompatibleError
    from packer.io.plans import read_plan
    from packer.io.workloads import read_workload
    from packer.operate.changes import changed_plan
    from packer.solvers.evaluator import Evaluator
    from packer.solvers.headroom import headroom

    plan = read_plan(plan_path)
    add = read_workload(add_path).adapters if add_path else ()
    changed = changed_plan(plan, rate_factor=rate_factor, add=add, remove=remove)
    if not changed.bins:
        raise IncompatibleError("No GPU of the plan has an adapter then, so there is nothing to judge.")
    note_estimates(changed.bins, quiet=quiet)
    judge = Evaluator.load(
        predictor or plan.predictor, list(dict.fromkeys(b.profile for b in changed.bins)), seed=seed
    )
    with progress_bar(quiet=quiet) as progress:
        progress("servers", 0, 2)
        found = judge.evaluate(changed.workload, changed.bins)
        progress("headroom", 1, 2)
        room = headroom(changed.workload, changed.bins, judge)
    first = breaks_first(found, room)
    broken = int((~found.feasible).sum())
    holds = not broken and not changed.homeless
    verdict = conclusion(broken, len(changed.gpus), len(changed.homeless))
    if as_json:
        print_json(
            {
                "holds": holds,
                "calibrated": calibrated(changed.bins),
                "breaks_first": None if first is None else changed.gpus[first],
                "homeless": list(changed.homeless),
                "gpus": [
                    {
                        "gpu": gpu,
                        "adapters": len(changed.bins[k].adapters),
                        "offered_tok_s": found[k].offered_tok_s,
                        "total_token_throughput": found[k].total_token_throughput,
                        "starved": found[k].starved,
                        "memory_error": found[k].memory_error,
                        "mean_ttft_ms": found[k].mean_ttft_ms,
                        "mean_itl_ms": found[k].mean_itl_ms,
                        "headroom": room[k],
                    }
                    for k, gpu in enumerate(changed.gpus)
                ],
            }
        )
    elif not quiet:
        show(*_table(plan, changed, found, room, first), verdict)
    else:
        note(verdict, quiet=holds)
    return 0 if holds else 3


def breaks_first(found: Evaluations, room: Sequence[float | None]) -> int | None:
    """The GPU with the least room: a broken one that serves least, else the lowest factor."""
    if len(found) == 0:
        return None
    order = [
        (0, row.served_share, k) if not row.feasible else (1, room[k] or float("inf"), k)
        for k, row in enumerate(found)
    ]
    return min(order)[2]


def _table(
    plan: Plan,
    changed: Changed,
    found: Evaluations,
    room: Sequence[float | None],
    first: int | None,
) -> list[Table | str]:
    from packer.cli.plan_table import growth

    rows = []
    for k, gpu in enumerate(changed.gpus):
        new, old = found[k], plan.evaluations[gpu]
        verdict = "memory error" if new.memory_error else "starved" if new.starved else "holds"
        rows.append(
            (
                gpu,
                len(changed.bins[k].adapters),
                number(new.offered_tok_s, 0),
                number(old.offered_tok_s, 0),
                number(new.total_token_throughput, 0),
                number(new.mean_ttft_ms, 0),
                number(old.mean_ttft_ms, 0),
                growth(room[k]),
                verdict,
            )
        )
    columns = (
        "GPU",
        "adapters",
        "offered tok/s",
        "(plan)",
        "tok/s",
        "TTFT ms",
        "(plan)",
        "headroom",
        "verdict",
    )
    lines: list[Table | str] = [table(f"{plan.workload.name}, changed", columns, rows, left=())]
    if first is not None:
        what = "breaks first" if not found.feasible.all() else "would break first"
        lines.append(f"GPU {changed.gpus[first]} {what}.")
    if changed.homeless:
        lines.append(f"No server has slots large enough for: {', '.join(changed.homeless[:20])}.")
    lines.append(f"Judged for {servers(changed.bins)}.")
    return lines


def conclusion(broken: int, gpus: int, homeless: int) -> str:
    """Whether the plan holds, in a sentence: GPUs that break, and adapters without a place."""
    if not broken and not homeless:
        return "The plan holds."
    placeless = f"{homeless} adapter{'s have' if homeless > 1 else ' has'} no place"
    if not broken:
        return f"The servers hold, but {placeless}. packer replan makes the next plan."
    text = f"The plan breaks: {broken} of {gpus} GPUs"
    return f"{text}{f', and {placeless}' if homeless else ''}. packer replan makes the next one."
