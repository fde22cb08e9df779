"""`packer live validate`: a plan on real servers, predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

import packer
from packer.cli.declare import argument, bundle, command, option
from packer.cli.live.calibrate import duration
from packer.cli.options import DEFAULT_PROFILE, FleetFile, Writing, common, numbers
from packer.cli.output import Table, write_json
from packer.cli.plan_table import servers
from packer.cli.traffic import refuse_unused
from packer.words import counted, listed, number

if TYPE_CHECKING:
    from packer.live.validate import BinReport, Validation
    from packer.operate.bench import BenchRun


@bundle
class Runs:
    """What is compared, and how the servers run.

    bench: A result of `vllm bench serve --save-result` instead of runs of its own; without a PLAN its requests were for
        the base model.
    launch_path: How to start the servers.
    duration_s: Time of each run.
    repeats: Runs of each server, with other seeds.
    parallel: Servers at once.
    gpus: CUDA devices to share out among the servers.
    bins: Only these GPUs of the plan.
    trace: Replay this trace instead of Poisson arrivals.
    folder: Keeps results; resumes.
    output: Write the report as JSON.
    html: Write a page with overlays.
    """

    plan_path: str | None = argument("[PLAN]", required=False, default=None)
    bench: str | None = option(metavar="RESULT.json")
    launch_path: str | None = option("--launch", metavar="FILE.toml")
    duration_s: float = option("--duration", type=duration, default="120s", metavar="2m")
    repeats: int = option(type=click.IntRange(1, 100), default=1)
    parallel: int = option(type=click.IntRange(1, 64), default=1)
    gpus: tuple[int, ...] | None = option(type=numbers(int), metavar="0,1,…")
    profile_name: str | None = common("profile", default=None, help="Predict with this profile instead of the plan's.")
    bins: tuple[int, ...] | None = option(type=numbers(int), metavar="0,2,…")
    trace: str | None = option(metavar="FILE")
    folder: str = option(default="live-results", metavar="DIR")
    output: str | None = option("-o", "--output", metavar="FILE.json")
    html: str | None = option(metavar="FILE.html")
    seed: int = common("seed")

    def plan(self) -> packer.Plan:
        """The plan in the file."""
        if self.plan_path is None:
            raise click.UsageError("Missing argument 'PLAN', or --bench.")
        return packer.load_plan(self.plan_path)


@command
def validate(runs: Runs, out: Writing) -> int:
    """Run every server of a plan for real, send its traffic and compare with the twin.

    A server that doesn't start is a result. Servers are always stopped, also on Ctrl-C; what was measured
    until then is reported and marked as partial, and the same command goes on from there. Exit code 3 means that
    all requests to a server failed. With --bench nothing is started: the twin predicts a finished benchmark.

    \b
    Example:
      packer live validate plan.json --launch vllm-cpu/launch.toml --duration 2m --html validation.html
      packer live validate plan.json --bench result.json
    """
    from packer.live.launch import read_launch
    from packer.live.validate import Validation, ValidationSpec

    if runs.bench is not None:
        _beside_bench(runs.bench, runs, out)
        return 0
    out.check(runs.output)
    out.check(runs.html, what="page")
    plan = runs.plan()
    if runs.launch_path is None:
        raise click.UsageError("Missing option '--launch', or --bench.")
    launch = read_launch(runs.launch_path)
    gpus, at_once = runs.gpus or (), launch.engine.gpus * runs.parallel
    _check_numbers("--gpus", gpus, 1 << 16)
    if 0 < len(gpus) < at_once:
        servers_ = f"{counted(runs.parallel, 'server')} at once"
        raise click.UsageError(f"--gpus: expected at least {at_once} devices for {servers_}, got {len(gpus)}.")
    numbers, bins = _chosen(plan, runs)
    out.note_profiles(*(item.profile for item in bins))
    fleet = plan.workload if runs.trace is None else _replayed(plan, runs.trace)
    spec = ValidationSpec(runs.duration_s, runs.repeats, runs.parallel, runs.seed, gpus)
    with out.progress() as progress:
        job = Validation(launch, fleet, bins, Path(runs.folder), spec, progress, numbers=numbers)
        if job.differing:
            out.note(f"the servers have other settings than predicted: {listed(job.differing, 9)}")
        try:
            job.run()
        finally:
            if job.reports:
                _write(job, plan, runs, out)
    return 3 if any(report.refused for report in job.reports) else 0


def _check_numbers(name: str, given: Sequence[int], below: int) -> None:
    if any(not 0 <= each < below for each in given):
        raise click.UsageError(f"{name}: expected numbers from 0 to {below - 1}, got {given}.")


def _chosen(plan: packer.Plan, runs: Runs) -> tuple[Sequence[int], list[packer.Bin]]:
    """Numbers of the servers that are compared, and the servers, with the profile of --profile if there is one."""
    _check_numbers("--bins", runs.bins or (), len(plan.bins))
    numbers = runs.bins or range(len(plan.bins))
    profile = None if runs.profile_name is None else packer.load_profile(runs.profile_name)
    bins = [plan.bins[k] for k in numbers]
    return numbers, bins if profile is None else [replace(item, profile=profile) for item in bins]


def _beside_bench(bench: str, runs: Runs, out: Writing) -> None:
    """Compare each run of the benchmark with its prediction."""
    from packer.operate.bench import beside_bench

    of_runs = ("launch_path", "duration_s", "repeats", "parallel", "gpus", "trace", "folder", "html")
    refuse_unused("--bench", of_runs)
    out.check(runs.output)
    fleet = server = None
    if runs.plan_path is not None:
        plan = runs.plan()
        fleet, (_, chosen) = plan.workload, _chosen(plan, runs)
        if len(chosen) != 1:
            raise click.UsageError(f"--bench is of one server: choose one of the plan's {len(plan.bins)} with --bins.")
        server = chosen[0]
    profile = packer.load_profile(runs.profile_name or DEFAULT_PROFILE) if server is None else server.profile
    out.note_profiles(profile)
    found = beside_bench(bench, profile, fleet=fleet, server=server, seed=runs.seed)
    data = [each.to_dict() for each in found]
    write_json(data, runs.output)
    out.result(data, lambda: [line for k, each in enumerate(found) for line in _bench_lines(k, each)])


def _bench_lines(run: int, found: BenchRun) -> list[Table | str]:
    predicted, errors = found.predicted, found.errors
    cells = ((name, predicted[name], value, errors[name]) for name, value in found.measured.items())
    rows = [(name, number(one, 2), number(other, 2), number(error, 1)) for name, one, other, error in cells]
    table = Table(f"Run {run} of the benchmark", ("", "predicted", "measured", "SMAPE %"), rows)
    server = f"Predicted for {found.simulation.profile.label}, max_loras {found.simulation.max_loras}"
    return [table, server, *(f"Assumed: {each}" for each in found.assumed)]


def _replayed(plan: packer.Plan, path: str) -> packer.Workload:
    fleet = FleetFile(workload_path=path).fleet()
    if fleet.arrivals.trace is None or fleet.names != plan.workload.names:
        raise click.UsageError(f"--trace: {path} must be a trace of the plan's {len(plan.workload)} adapters.")
    return plan.workload.with_arrivals(fleet.arrivals)


def _write(job: Validation, plan: packer.Plan, runs: Runs, out: Writing) -> None:
    from packer.report.figures import write_figure
    from packer.report.validation import validation_figure

    spec, calibrated = job.spec, all(item.profile.calibrated for item in job.bins)
    data = {"workload": plan.workload.name, "launch": job.launch.name, "calibrated": calibrated}
    data |= {"duration": spec.duration_s, "repeats": spec.repeats, "seed": spec.seed}
    data |= {"complete": job.complete, "gpus": [report.to_dict() for report in job.reports]}
    write_json(data, runs.output)
    if runs.html is not None:
        title = f"Validation of {plan.workload.name}, predicted for {servers(job.bins)}"
        write_figure(validation_figure(job.reports, title), runs.html)
    out.result(data, lambda: _lines(job))


def _lines(job: Validation) -> list[Table | str]:
    lines: list[Table | str] = [_table(report) for report in job.reports]
    lines.append(f"Predicted for {servers(job.bins)}")
    if reused := sum(run.outcome.reused for report in job.reports for run in report.runs):
        lines.append(f"{counted(reused, 'run')} measured before, from {job.folder}")
    for report in job.reports:
        for message, count in report.failed_requests.items():
            lines.append(f"server {report.index}: {counted(count, 'request')} failed: {message}")
        if report.unmeasured is not None:
            lines.append(f"server {report.index}: {report.unmeasured}")
        if report.failure is not None:
            tail = next((r.outcome.failure.tail for r in report.runs if r.outcome.failure), "")
            lines += [f"server {report.index}: {report.failure}", *([tail] if tail else [])]
    return lines


def _table(report: BinReport) -> Table:
    from packer.live.validate import COMPARED

    rows = []
    for name in COMPARED:
        sides = (number(report.mean(side, name), 2) for side in ("predicted", "measured"))
        errors = (number(each.get(name), 1) for each in (report.errors, report.repeatability))
        rows.append((name, *sides, *errors))
    words = {True: "yes", False: "no", None: "–"}
    for name, pair in (("starved", report.starved), ("memory error", report.memory_error)):
        rows.append((name, words[pair[0]], words[pair[1]], "", ""))
    rows.append(("failed requests", "", str(sum(report.failed_requests.values())), "", ""))
    partial = ", partial" if report.interrupted else ""
    held = counted(len(report.bin.adapters), "adapter")
    title = f"server {report.index}: {held}, max_loras {report.bin.max_loras}{partial}"
    return Table(title, ("", "predicted", "measured", "SMAPE %", "repeatability %"), rows)
