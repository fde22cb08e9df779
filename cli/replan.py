"""`packer replan`: a running plan follows its workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli import options
from packer.cli.interrupt import interruptible
from packer.cli.output import check_output, note_estimated, progress_bar, show
from packer.cli.solve import finish, plan_options

if TYPE_CHECKING:
    from packer.plan import Plan

DEFAULT_OUTPUT = "replan.json"


@click.command()
@options.plan_argument
@options.workload_argument
@options.predictor_option
@options.gpus_option
@plan_options
@options.time_limit_option
@options.seed_option
@options.output_option(f"Where to write the plan.  [default: {DEFAULT_OUTPUT}; with --json nowhere]")
@options.force_option
@options.json_option
@options.quiet_option
def replan(
    plan_path: str,
    workload_path: str,
    predictor: str,
    gpus: int | None,
    max_replicas: int,
    confidence: float | None,
    margin: float | None,
    verify: bool,
    time_limit_s: float | None,
    seed: int,
    output: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Follow a changed workload: fewest GPUs, then fewest adapters moved from where they run.

    PLAN is the running plan, WORKLOAD the new fleet; adapters are matched by name. The servers keep their
    numbers, new ones come at the end.

    \b
    Example:
      packer replan plan.json examples/workloads/azure-conv-2023.csv -o next.json
    """
    from packer.io.plans import read_plan
    from packer.io.workloads import read_workload
    from packer.solvers.api import solve as run

    path = output if output is not None or as_json else DEFAULT_OUTPUT
    check_output(path, force=force)
    old = read_plan(plan_path)
    fleet = read_workload(workload_path)
    profiles = list(dict.fromkeys(item.profile for item in old.bins))
    for profile in profiles:
        note_estimated(profile, quiet=quiet)
    with interruptible() as stop, progress_bar(quiet=quiet) as progress:
        plan = run(
            fleet,
            profiles,
            "moves",
            solver="replan",
            predictor=predictor,
            max_gpus=gpus,
            seed=seed,
            time_limit_s=time_limit_s,
            max_replicas=max_replicas,
            confidence=confidence,
            margin=margin,
            old_plan=old,
            verify=verify,
            progress=progress,
            stop=stop,
        )
    code = finish(plan, path, named=output is not None, force=force, as_json=as_json, quiet=quiet)
    if not as_json and not quiet:
        show(*_changes(old, plan))
    return code


def _changes(old: Plan, plan: Plan) -> list[str]:
    """What the operator has to do."""
    before, now = set(old.workload.names), set(plan.workload.names)
    moved = [plan.workload.names[i] for i in plan.moves.adapters] if plan.moves else []
    servers = plan.moves.servers if plan.moves else ()
    kept = [server for server in servers if server is not None]
    lines = [
        f"Changes     {len(moved)} adapters move, {len(now - before)} are new, {len(before - now)} are gone; "
        f"servers: {len(kept)} stay, {len(servers) - len(kept)} start, {old.n_gpus - len(kept)} stop"
    ]
    if moved:
        shown = ", ".join(moved[:10])
        lines.append(f"Moving      {shown}" + (f" and {len(moved) - 10} more" if len(moved) > 10 else ""))
    renumbered = [f"{server} → {k}" for k, server in enumerate(servers) if server not in (None, k)]
    if renumbered:
        lines.append(f"Renumbered  {', '.join(renumbered)}")
    return lines
