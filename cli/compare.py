"""`packer compare`: solvers, objectives and predictors side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from packer.cli import options
from packer.cli.output import (
    check_output,
    note,
    note_estimated,
    number,
    print_json,
    progress_bar,
    show,
    table,
)
from packer.cli.sweep import numbers

if TYPE_CHECKING:
    from packer.profile import Profile
    from packer.solvers.compare import Comparison, Result
    from packer.workload import Workload

SUFFIXES = (".csv", ".json")


def split_names(text: str) -> list[str]:
    """Names with commas between them; parameters stay with theirs: "gpus,slo:mean_ttft_ms=5,p99_itl_ms=6"."""
    found: list[str] = []
    for part in filter(None, text.split(",")):
        if "=" in part and ":" not in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _sweep_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Option callback for adapters=LIST."""
    if value is None:
        return ()
    axis, equals, text = value.partition("=")
    if axis != "adapters" or not equals:
        raise click.BadParameter(f"Expected adapters=LIST, got {value[:80]!r}.", ctx, param)
    found = numbers(whole=True)(ctx, param, text) or ()
    if any(n < 1 for n in found):
        raise click.BadParameter("Expected numbers of adapters >= 1.", ctx, param)
    return tuple(int(n) for n in found)


@click.command()
@options.workload_argument
@options.profile_option
@click.option("--solvers", default="greedy,greedy-paper,maxbase,random", show_default=True, metavar="NAMES")
@click.option("--objectives", default="gpus", show_default=True, metavar="NAMES")
@click.option("--predictors", default="twin", show_default=True, metavar="NAMES")
@click.option(
    "--sweep",
    "sizes",
    callback=_sweep_sizes,
    metavar="adapters=LIST",
    help="Compare at several numbers of adapters, as 32,64,128 or START:STOP:STEP; beyond the workload's "
    "own, its mix is drawn again.",
)
@options.gpus_option
@click.option("--max-replicas", type=click.IntRange(min=1, max=10_000), default=1, metavar="N")
@click.option("--margin", type=click.FloatRange(min=0.0, max=10.0), default=None, metavar="X")
@click.option(
    "--judge",
    type=click.Choice(("twin", "vllm")),
    default="twin",
    show_default=True,
    help="Who measures the finished plans: the twin with a fresh seed, or real vLLM servers.",
)
@click.option("--launch", metavar="FILE.toml", help="How to start the servers of --judge vllm.")
@click.option(
    "--judge-duration",
    type=click.FloatRange(min=1.0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Time of each real run.",
)
@click.option(
    "--folder", default="compare-results", show_default=True, help="Keeps the results of --judge vllm."
)
@options.time_limit_option
@options.seed_option
@options.output_option("Write the rows to this file (.csv or .json).")
@click.option("--plot", metavar="FILE", help="Draw the comparison (.html, .png or .svg).")
@options.force_option
@options.json_option
@options.quiet_option
def compare(
    workload_path: str,
    profile_name: str,
    solvers: str,
    objectives: str,
    predictors: str,
    sizes: tuple[int, ...],
    gpus: int | None,
    max_replicas: int,
    margin: float | None,
    judge: str,
    launch: str | None,
    judge_duration: float,
    folder: str,
    time_limit_s: float | None,
    seed: int,
    output: str | None,
    plot: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Which solver or predictor to trust: every combination planned, and judged by the twin or real vLLM.

    Outcomes that fail are shown with what is wrong: starved, memory error, unplaced adapters, refused.
    Solvers that spread over given GPUs get as many as greedy needs, unless --gpus says otherwise.

    \b
    Examples:
      packer compare fleet.csv --solvers greedy,auto,maxbase,dlora --plot compare.html
      packer compare fleet.csv --sweep adapters=32:384:32 --predictors twin,forest -o rows.csv
    """
    from packer.errors import ValidationError, shown
    from packer.io.profiles import load_profile
    from packer.io.workloads import read_workload
    from packer.report.figures import check_suffix
    from packer.solvers.compare import Comparison

    if output is not None and Path(output).suffix.lower() not in SUFFIXES:
        raise ValidationError(f"Expected --output to end in {', '.join(SUFFIXES)}, got {shown(output)}.")
    if plot is not None:
        check_suffix(plot)
    if (judge == "vllm") != (launch is not None):
        raise click.UsageError("--judge vllm needs --launch, and --launch needs --judge vllm.")
    for path in (output, plot):
        check_output(path, force=force)
    profile = load_profile(profile_name)
    note_estimated(profile, quiet=quiet)
    job = Comparison(
        read_workload(workload_path),
        profile,
        split_names(solvers),
        split_names(objectives),
        split_names(predictors),
        sizes,
        gpus,
        seed,
        {"time_limit_s": time_limit_s, "max_replicas": max_replicas, "margin": margin},
    )
    results, whole = _run(job, quiet=quiet)
    if launch is not None:
        results = _real(job, results, launch, Path(folder), judge_duration, quiet=quiet)
    rows = [result.to_dict() for result in results]
    _write(rows, output, plot, title=_title(job.workload, profile), force=force)
    if as_json:
        print_json({"workload": job.workload.name, "profile": profile.name, "complete": whole, "rows": rows})
    elif not quiet:
        _print(results, _title(job.workload, profile))
    if not whole:
        raise click.Abort


def _title(workload: Workload, profile: Profile) -> str:
    return f"{workload.name} on {profile.label}"


def _run(job: Comparison, *, quiet: bool) -> tuple[list[Result], bool]:
    """Results, and whether all are there: Ctrl-C keeps those that are done."""
    results: list[Result] = []
    try:
        with progress_bar(quiet=quiet) as progress:
            results.extend(job.run(progress))
    except KeyboardInterrupt:
        note(f"interrupted: {len(results)} of {len(job)} combinations are done", quiet=quiet)
        return results, False
    return results, True


def _real(
    job: Comparison, results: list[Result], launch: str, folder: Path, duration_s: float, *, quiet: bool
) -> list[Result]:
    """The results judged by real servers; equal bins are measured once."""
    from dataclasses import replace

    from packer.solvers.compare import PlanFigures
    from packer.twin.live.judge import judge
    from packer.twin.live.launch import read_launch
    from packer.twin.live.validate import ValidationSpec

    spec = ValidationSpec(duration_s, seed=job.seed)
    start = read_launch(launch)
    measured: dict[int, Any] = {}
    with progress_bar(quiet=quiet) as progress:
        for fleet in job.fleets():
            plans = {
                str(k): result.plan
                for k, result in enumerate(results)
                if result.adapters == len(fleet) and result.plan is not None and result.plan.bins
            }
            measured |= {
                int(k): verdict
                for k, verdict in judge(plans, fleet, start, folder / str(len(fleet)), spec, progress).items()
            }
    nan = float("nan")
    return [
        replace(
            result,
            reference=PlanFigures(
                "vllm",
                measured[k].total_token_throughput,
                nan if measured[k].mean_ttft_ms is None else measured[k].mean_ttft_ms,
                nan if measured[k].mean_itl_ms is None else measured[k].mean_itl_ms,
                len(measured[k].starved),
                len(measured[k].memory_errors),
            ),
            failures=measured[k].failures,
        )
        if k in measured
        else result
        for k, result in enumerate(results)
    ]


def _write(
    rows: list[dict[str, Any]], output: str | None, plot: str | None, *, title: str, force: bool
) -> None:
    import csv
    import io
    import json

    from packer.cli.output import jsonable
    from packer.io.files import write_text

    if output is not None and rows:
        text = io.StringIO()
        if Path(output).suffix.lower() == ".csv":
            writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(jsonable(rows))
        else:
            text.write(json.dumps(jsonable(rows), indent=1, ensure_ascii=False) + "\n")
        write_text(output, text.getvalue(), force=force)
    if plot is not None and rows:
        from packer.report.comparison import comparison_figure
        from packer.report.figures import write_figure

        write_figure(comparison_figure(rows, title=title), plot)


def _print(results: list[Result], title: str) -> None:
    several = [
        name
        for name in ("adapters", "objective", "predictor")
        if len({getattr(r, name) for r in results}) > 1
    ]
    columns = ["solver", *several, "GPUs", "bound", "gap", "tok/s", "TTFT ms", "ITL ms", "time s", "outcome"]
    rows = []
    for result in results:
        plan, reference = result.plan, result.reference
        rows.append(
            [
                result.solver,
                *(getattr(result, name) for name in several),
                plan.n_gpus if plan else "–",
                f"{plan.lower_bound:g}" if plan and plan.lower_bound is not None else "–",
                f"{plan.gap:.0%}" if plan and plan.gap is not None else "–",
                number(reference.total_token_throughput if reference else None, 0),
                number(reference.mean_ttft_ms if reference else None, 0),
                number(reference.mean_itl_ms if reference else None, 1),
                number(plan.runtime_s if plan else None, 2),
                result.outcome,
            ]
        )
    sources = sorted({r.reference.source for r in results if r.reference})
    caption = (
        f"tok/s, TTFT, ITL and outcome as simulated or measured by {', '.join(sources)}" if sources else None
    )
    show(table(title, columns, rows, left=(0, len(columns) - 1), caption=caption))
