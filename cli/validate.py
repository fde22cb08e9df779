"""`packer validate`: a plan on real servers, predicted against measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from packer.cli.calibrate_live import Duration
from packer.cli.options import force_option, json_option, plan_argument, quiet_option, seed_option
from packer.cli.servers import calibrated, note_estimates, servers

if TYPE_CHECKING:
    from pathlib import Path

    from packer.plan import Plan
    from packer.twin.live.validate import BinReport, Validation


@click.command()
@plan_argument
@click.option("--launch", "launch_path", required=True, metavar="FILE.toml", help="How to start the servers.")
@click.option("--duration", "duration_s", type=Duration(), default="120s", show_default=True, metavar="2m")
@click.option(
    "--repeats", type=click.IntRange(1, 100), default=1, show_default=True, help="With other seeds."
)
@click.option("--parallel", type=click.IntRange(1, 64), default=1, show_default=True, help="Servers at once.")
@click.option("--gpus", default="", metavar="0,1,…", help="CUDA devices to share out among the servers.")
@click.option(
    "--profile",
    "profile_name",
    default=None,
    metavar="NAME|FILE.toml",
    help="Predict with this profile instead of the plan's.",
)
@click.option("--bins", "chosen", default="", metavar="0,2,…", help="Only these GPUs of the plan.")
@click.option("--trace", default=None, metavar="FILE", help="Replay this trace instead of Poisson arrivals.")
@click.option(
    "--folder", default="live-results", show_default=True, metavar="DIR", help="Keeps results; resumes."
)
@click.option("-o", "--output", default=None, metavar="FILE.json", help="Write the report as JSON.")
@click.option("--html", default=None, metavar="FILE.html", help="Write a page with overlays.")
@seed_option
@force_option
@json_option
@quiet_option
def validate(
    plan_path: str,
    launch_path: str,
    duration_s: float,
    repeats: int,
    parallel: int,
    gpus: str,
    profile_name: str | None,
    chosen: str,
    trace: str | None,
    folder: str,
    output: str | None,
    html: str | None,
    seed: int,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run every server of a plan for real, send its traffic and compare with the twin.

    A server that doesn't start is a result. Servers are always stopped, also on Ctrl-C; what was measured
    until then is reported and marked as partial, and the same command goes on from there.

    \b
    Example:
      packer validate plan.json --launch vllm-cpu/launch.toml --duration 2m --html validation.html
    """
    from dataclasses import replace
    from pathlib import Path

    from packer.cli.output import check_output, progress_bar
    from packer.io.plans import read_plan
    from packer.io.profiles import load_profile
    from packer.twin.live.launch import read_launch
    from packer.twin.live.validate import Validation, ValidationSpec

    targets = [check_output(path, force=force) for path in (output, html)]
    plan, launch = read_plan(plan_path), read_launch(launch_path)
    profile = load_profile(profile_name) if profile_name is not None else None
    numbers = _numbers(chosen, "--bins", len(plan.bins)) or list(range(len(plan.bins)))
    bins = [plan.bins[i] for i in numbers]
    bins = bins if profile is None else [replace(b, profile=profile) for b in bins]
    note_estimates(bins, quiet=quiet)
    fleet = plan.workload if trace is None else _replayed(plan, trace)
    spec = ValidationSpec(duration_s, repeats, parallel, seed, tuple(_numbers(gpus, "--gpus", 1 << 16)))
    with progress_bar(quiet=quiet) as progress:
        job = Validation(launch, fleet, bins, Path(folder), spec, progress)
        try:
            job.run()
        finally:
            if job.reports:
                _write(job, plan, targets, force=force, as_json=as_json, quiet=quiet)


def _numbers(text: str, option: str, below: int) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [-1]
    if any(not 0 <= number < below for number in found):
        raise click.UsageError(
            f"{option}: expected numbers from 0 to {below - 1} with commas, got {text[:60]!r}."
        )
    return found


def _replayed(plan: Plan, path: str) -> Any:
    from packer.io.workloads import read_workload

    fleet = read_workload(path)
    if fleet.arrivals.trace is None or fleet.names != plan.workload.names:
        raise click.UsageError(
            f"--trace: {path} must be a trace of the plan's {len(plan.workload)} adapters."
        )
    return plan.workload.with_arrivals(fleet.arrivals)


def _write(
    job: Validation,
    plan: Plan,
    targets: list[Path | None],
    *,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    import json

    from packer.cli.output import jsonable, print_json, show
    from packer.io.files import write_text
    from packer.report.figures import write_figure
    from packer.report.validation import validation_figure

    data = {
        "workload": plan.workload.name,
        "launch": job.launch.name,
        "calibrated": calibrated(job.bins),
        "duration": job.spec.duration_s,
        "repeats": job.spec.repeats,
        "seed": job.spec.seed,
        "complete": len(job.reports) == len(job.bins) and not any(r.interrupted for r in job.reports),
        "gpus": [report.to_dict() for report in job.reports],
    }
    if targets[0] is not None:
        write_text(targets[0], json.dumps(jsonable(data), indent=2), force=force)
    if targets[1] is not None:
        title = f"Validation of {plan.workload.name}, predicted for {servers(job.bins)}"
        write_figure(validation_figure(job.reports, title), targets[1])
    if as_json:
        print_json(data)
        return
    if quiet:
        return
    show(*(_table(report) for report in job.reports), f"Predicted for {servers(job.bins)}")
    for report in job.reports:
        for message, count in report.failed_requests.items():
            show(f"GPU {report.index}: {count} requests failed: {message}")
        if report.failure is not None:
            tail = next((r.outcome.failure.tail for r in report.runs if r.outcome.failure), "")
            show(f"GPU {report.index}: {report.failure}", *([tail] if tail else []))


def _table(report: BinReport) -> Any:
    from packer.cli.output import number, table
    from packer.twin.live.validate import COMPARED

    rows = [
        (
            name,
            number(report.mean("predicted", name), 2),
            number(report.mean("measured", name), 2),
            number(report.errors.get(name)),
            number(report.repeatability.get(name)),
        )
        for name in COMPARED
    ]
    words = {True: "yes", False: "no", None: "–"}
    for name, pair in (("starved", report.starved), ("memory error", report.memory_error)):
        rows.append((name, words[pair[0]], words[pair[1]], "", ""))
    rows.append(("failed requests", "", str(sum(report.failed_requests.values())), "", ""))
    partial = ", partial" if report.interrupted else ""
    title = (
        f"GPU {report.index}: {len(report.bin.adapters)} adapters, max_loras {report.bin.max_loras}{partial}"
    )
    return table(title, ("", "predicted", "measured", "SMAPE %", "repeatability %"), rows)
