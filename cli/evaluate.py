"""`packer evaluate`: a finished plan judged again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from packer.cli import options
from packer.cli.output import check_output, note, number, print_json, show, table
from packer.cli.servers import note_estimates, servers

if TYPE_CHECKING:
    from packer.plan import Plan

FIGURES = (
    ("total_token_throughput", "tok/s", 0),
    ("mean_ttft_ms", "TTFT ms", 0),
    ("mean_itl_ms", "ITL ms", 1),
)


@click.command()
@options.plan_argument
@options.predictor_option
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    default=None,
    help="Seed of the judge.  [default: one that the search did not use]",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=1.0, max=1e7),
    default=None,
    metavar="SECONDS",
    help="Simulated time of each server (twin only).  [default: until the verdict is clear]",
)
@options.rate_factor_option
@options.output_option("Write the plan with the new evaluations to this file.")
@options.force_option
@options.json_option
@options.quiet_option
def evaluate(
    plan_path: str,
    predictor: str,
    seed: int | None,
    duration_s: float | None,
    rate_factor: float,
    output: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Judge a plan again: another predictor, seed, duration or load.

    Rates are taken as they are, without the margin that the plan was made with. Exit code 3 means that a
    server starves or does not start.

    \b
    Examples:
      packer evaluate plan.json --seed 7
      packer evaluate plan.json --duration 14400 --rate-factor 1.2
      packer evaluate plan.json --predictor forest --json
    """
    from packer.io.plans import plan_to_dict, read_plan, write_plan
    from packer.operate.evaluate import evaluate_plan
    from packer.plan import Status

    check_output(output, force=force)
    plan = read_plan(plan_path)
    note_estimates(plan.bins, quiet=quiet)
    found = evaluate_plan(plan, predictor, seed=seed, duration_s=duration_s, rate_factor=rate_factor)
    if output is not None:
        write_plan(found, output, force=force)
    if as_json:
        print_json(plan_to_dict(found))
    elif not quiet:
        show(_comparison(plan, found), *_verdict(found))
    if output is not None:
        note(f"wrote {output}", quiet=quiet)
    return 3 if found.status is Status.INFEASIBLE else 0


def _comparison(plan: Plan, found: Plan) -> Any:
    columns = ["GPU", "adapters", "offered tok/s"]
    for _, label, _ in FIGURES:
        columns += [label, "(plan)"]
    rows = []
    for k, item in enumerate(found.bins):
        new, old = found.evaluations[k], plan.evaluations[k]
        cells: list[object] = [k, len(item.adapters), number(new.offered_tok_s, 0)]
        for name, _, digits in FIGURES:
            cells += [number(getattr(new, name), digits), number(getattr(old, name), digits)]
        verdict = "memory error" if new.memory_error else "starved" if new.starved else "ok"
        rows.append([*cells, verdict])
    title = f"{plan.workload.name}: judged by {found.predictor}, beside the plan's figures ({plan.predictor})"
    return table(title, [*columns, "verdict"], rows, left=())


def _verdict(found: Plan) -> list[str]:
    bad = int((~found.evaluations.feasible).sum())
    lines = [
        f"{found.n_gpus - bad} of {found.n_gpus} GPUs serve their load (seed {found.seed})",
        f"Judged for {servers(found.bins)}",
    ]
    if found.unplaced:
        lines.append(f"{len(found.unplaced)} adapters have no GPU in this plan")
    return lines
