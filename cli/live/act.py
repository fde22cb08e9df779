"""`packer live apply` and `follow`: change running servers to a plan, keep it valid, or rehearse that on a trace."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import packer
from packer.cli.declare import bundle, command, flag, option
from packer.cli.evaluate import MeasuredTraffic
from packer.cli.live.calibrate import duration
from packer.cli.options import FleetFile, Output, PlanArgument, Writing, common
from packer.cli.output import Table, note, write_json
from packer.cli.traffic import PrometheusOptions, refuse_unused
from packer.errors import IncompatibleError
from packer.io.files import write_text
from packer.operate.changes import with_goal
from packer.words import counted

if TYPE_CHECKING:
    from packer.operate.follow import Following
    from packer.operate.keeper import Decision
    from packer.operate.rehearse import Rehearsal


def whole(plan: packer.Plan) -> packer.Plan:
    """Return the plan. Raises `IncompatibleError` if an adapter has no server."""
    if not plan.bins or plan.unplaced:
        raise IncompatibleError("Expected a plan with a server for each adapter, got an infeasible one.")
    return plan


@bundle
class Applied:
    """The servers, and which changes are made.

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

    plan, fleet = whole(file.plan()), read_live_fleet(given.servers)
    acting = Acting(plan, fleet, out.note)
    names = [each.name for each in fleet.servers]
    with nullcontext() if given.dry_run else acting.held():
        changes = acting.changes(prune=given.prune)
        steps = ["write the routes for the router"] if acting.unwritten(acting.placement(acting.look())) else []
        steps += [step for change in changes for step in words(change, names)]
        listing = [*(f"{k}. {step}" for k, step in enumerate(steps, 1)), counted(len(steps), "step")]
        if given.dry_run or not steps:
            out.result({"steps": steps, "failed": []}, lambda: listing)
            return 0
        if not given.yes:
            for line in listing:
                click.echo(line, err=True)
            try:
                if not click.confirm("Make these changes?", err=True):
                    return 0
            except click.Abort as error:
                if isinstance(error.__context__, EOFError):
                    raise IncompatibleError("Nobody answered: --yes makes the changes without asking.") from None
                raise
        failed = apply(acting, changes, f"{plan.workload.name}: {plan.goal}")
    all_steps, faults = counted(len(steps), "step"), counted(len(failed), "failure")
    end = f"{faults} in {all_steps}: the same command goes on from here." if failed else f"{all_steps} done."
    out.result({"steps": steps, "failed": failed}, lambda: [*failed, end])
    for each in failed if out.quiet else ():
        note(each)
    return 3 if failed else 0


@bundle
class Followed:
    """The servers or the simulation, and how they are followed.

    servers: The servers, the router in front of them, and limits.
    simulate: Rehearse with this trace, a fleet that replays requests of the plan's adapters, on simulated servers.
    fleet: A fleet that is read at each look: its new adapters get a server, adapters that are not in it leave theirs.
    dry_run: Say what would be done, and do nothing.
    failures: With --simulate: servers that are lost on a day.
    html: Write a page with the servers and the changes after each look.
    output: With --simulate: write the result as JSON.
    """

    servers: str | None = option(metavar="FILE.toml")
    simulate: str | None = option(metavar="TRACE")
    fleet: str | None = option(metavar="FILE")
    dry_run: bool = flag()
    gpus: int | None = common("gpus", help="With --simulate: most GPUs at once.  [default: twice the plan's]")
    failures: float = option(type=click.FloatRange(min=0.0, max=1e4), default=1.0, metavar="N")
    slo: tuple[str, ...] = common("slo")
    html: str | None = option(metavar="FILE.html")
    output: str | None = option("-o", "--output", metavar="FILE.json")
    seed: int = common("seed")


@bundle
class Looks(MeasuredTraffic):
    """How often and where the traffic of the servers is measured.

    every_s: Time between two looks.
    log_path: Measure the rates in the last window of this access log, not from the servers' metrics.
    listen: Serve the state, the load of each server and its latencies, predicted and measured, at /metrics.
    """

    every_s: float | None = option("--every", type=duration, default="60s", metavar="60s")


@command
def follow(file: PlanArgument, given: Followed, looks: Looks, metrics: PrometheusOptions, out: Writing) -> int:
    """Keep a plan true on running servers: adapters follow the load, servers start and stop.

    At each look the load is measured (from the servers' own metrics, or --log, or --url) and the twin says what each
    server holds within the goal. A server that has too much gives adapters to others; adapters
    of a server that is lost go to the servers that answer; a server starts or stops where that is worth its cost. With
    a plan that has a spare GPU (--spare 1) the servers have to hold without any one of them. Each change is printed
    with its reason. Ctrl-C leaves everything serving.

    \b
    Examples:
      packer live follow plan.json --servers servers.toml --dry-run --html follow.html
      packer live follow plan.json --servers servers.toml --every 60s --listen 0.0.0.0:9878
      packer live follow plan.json --simulate week.csv
    """
    if (given.servers is None) == (given.simulate is None):
        raise click.UsageError("Give either --servers or --simulate.")
    if given.simulate is not None:
        of_servers = ("fleet", "dry_run", "html", "log_path", "window_s", "listen")
        refuse_unused("--simulate", (*of_servers, "url", "export_path", "source_names"))
    else:
        refuse_unused("--servers", ("output", "failures", "gpus"))
    plan = whole(file.plan())
    out.check(given.output)
    out.check(given.html, what="page")
    fleet = plan.workload.held_to(given.slo or None)
    if given.simulate is not None:
        return _rehearsed(plan, fleet, given, looks, out)
    return _followed(plan, fleet, given, looks, metrics, out)


def _rehearsed(plan: packer.Plan, fleet: packer.Workload, given: Followed, looks: Looks, out: Writing) -> int:
    from packer.operate.rehearse import rehearse

    replayed = FleetFile(workload_path=given.simulate or "").fleet()
    unknown = set(replayed.names) - set(fleet.names)
    if replayed.arrivals.trace is None or unknown:
        raise IncompatibleError(
            f"Expected {given.simulate} to replay requests of the plan's adapters"
            + (f", got {sorted(unknown)[0]!r}." if unknown else ", got a fleet without a trace.")
        )
    traced, size = replace(replayed, slo=fleet.slo), max(item.gpus for item in plan.bins)
    if given.gpus is not None and given.gpus < size * len(plan.bins):
        raise IncompatibleError(f"Expected --gpus to be at least the plan's {plan.n_gpus}, got {given.gpus}.")
    with out.progress() as progress:
        found = rehearse(
            plan, traced, servers=given.gpus and given.gpus // size, failures_per_day=given.failures,
            period_s=looks.every_s or 60.0, seed=given.seed, progress=progress,
        )  # fmt: skip
    write_json(found.to_dict(), given.output)
    out.result(found.to_dict, lambda: _lines(found))
    return 0


def _lines(found: Rehearsal) -> list[Table | str]:
    rows = [
        (
            each.name, f"{each.gpu_hours:.1f}", f"{each.gpu_hours / found.hindsight_gpu_hours - 1:+.0%}",
            f"{each.within:.2%}", each.starts, each.loads, each.failures,
        )
        for each in found.outcomes
    ]  # fmt: skip
    columns = ("servers", "GPU-hours", "hindsight", "within limits", "starts", "loads", "failures")
    return [
        Table(f"{counted(found.hours, 'hour')} of requests", columns, rows),
        f"Hindsight, each hour alone: {found.hindsight_gpu_hours:.0f} GPU-hours; at least {found.fewest_loads} loads.",
        *(f"{name}: {source}." for name, source in found.sources.items()),
    ]


def _followed(
    plan: packer.Plan, fleet: packer.Workload, given: Followed, looks: Looks, metrics: PrometheusOptions, out: Writing
) -> int:
    from packer.live.act import Acting
    from packer.live.fleet_file import read_live_fleet
    from packer.operate.drift import with_base
    from packer.operate.follow import Following
    from packer.report.metrics import live_metrics, live_page, rows_of

    measured = looks.reader(metrics, once=False)
    source = None if measured is None else lambda: with_base(plan, measured()[0])
    acting = Acting(plan, read_live_fleet(given.servers or ""), out.note)
    following = Following(acting, fleet, looks.every_s or 60.0, source, given.dry_run, span_s=looks.window_s)

    told = ""

    def after(made: list[Decision]) -> None:
        nonlocal told
        told, before = following.last_error, told
        if out.quiet and told not in ("", before):
            note(told)
        rows = rows_of(following)
        exporter.text = live_metrics(following, rows)
        for each in following.log[-len(made) :] if made else ():
            out.result(each, lambda each=each: _said(each, following))  # type: ignore[misc]
        if given.html is not None:
            write_text(given.html, live_page(following, rows))

    def read_again() -> packer.Workload:
        return with_goal(packer.read_workload(given.fleet or ""), plan).held_to(given.slo or None)

    again = None if given.fleet is None else read_again
    with looks.exporter(out) as exporter, nullcontext() if given.dry_run else acting.held():
        following.run(after, again)
    return 0


def _said(entry: dict[str, Any], following: Following) -> list[Table | str]:
    failed = entry.get("failed", [])
    done = f", {counted(len(failed), 'failure')}" if failed else f" {'would be ' * following.dry_run}done"
    return [f"{entry['why']}: {counted(len(entry['steps']), 'step')}{done}", *entry["steps"], *failed]
