"""`packer live apply`: bring running servers to a plan."""

from __future__ import annotations

import click

from packer.cli.declare import bundle, command, flag, option
from packer.cli.options import Output, PlanArgument
from packer.errors import IncompatibleError
from packer.words import counted


@bundle
class Applied:
    """What is changed.

    servers: The servers, the router in front of them, and limits.
    dry_run: Print the changes and make none.
    yes: Make them without asking.
    prune: Unload adapters, too, that the plan does not name.
    """

    servers: str = option(metavar="FILE.toml", required=True)
    dry_run: bool = flag()
    yes: bool = flag()
    prune: bool = flag()


@command
def apply(file: PlanArgument, given: Applied, out: Output) -> int:
    """Bring running servers to a plan: load adapters, route, wait until requests have ended, unload.

    Prints the changes first. An adapter leaves a server only after its new servers hold it, answer and are routed to.
    A step that fails is tried again, then taken back; the state is written after each step, and the same command goes
    on where the last one stopped. Servers need VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. Exit code 3 means that a step
    failed: what it was about is served as before.

    \b
    Example:
      packer live apply plan.json --servers servers.toml --dry-run
    """
    from packer.live.act import Acting, apply, words
    from packer.live.fleet_file import read_live_fleet

    plan, fleet = file.plan(), read_live_fleet(given.servers)
    if not plan.bins or plan.unplaced:
        raise IncompatibleError("Expected a plan with a server for each adapter, got an infeasible one.")
    acting = Acting(plan, fleet, out.note)
    names = [each.name for each in fleet.servers]
    with acting.held():
        changes = acting.changes(prune=given.prune)
        steps = [step for change in changes for step in words(change, names)]
        listing = [*(f"{k}. {step}" for k, step in enumerate(steps, 1)), counted(len(steps), "step")]
        if given.dry_run or not steps:
            out.result({"steps": steps, "failed": []}, lambda: listing)
            return 0
        if not given.yes:
            for line in listing:
                click.echo(line, err=True)
            if not click.confirm("Make these changes?", err=True):
                return 0
        failed = apply(acting, changes, f"{plan.workload.name}: {plan.goal}")
    out.result(
        {"steps": steps, "failed": failed}, lambda: [*failed, f"{len(failed)} of {len(steps)} steps failed."]
    )
    return 3 if failed else 0
