"""`packer compare`: solvers, objectives and predictors side by side; systems on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import packer
from packer.cli.cluster import Behind, compared_table, refuse_without
from packer.cli.declare import Readers, bundle, command, flag, option, pairs, values
from packer.cli.options import FleetFile, Writing, common, numbers
from packer.cli.output import Table, figures, heads, write_json
from packer.cli.settings import OneProfile
from packer.cli.traffic import refuse_unused
from packer.errors import shown
from packer.io.files import write_text
from packer.io.tables import csv_text
from packer.words import counted, listed, number

if TYPE_CHECKING:
    from packer.planning.compare import Comparison, Result


def split_names(text: str) -> list[str]:
    """Split different comma-separated names, each with its parameters, as in "gpus,slo:mean_ttft_ms=5,p99_itl_ms=6"."""
    found: list[str] = []
    for part in filter(None, text.split(",")):
        if "=" in part and ":" not in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found or len(set(found)) < len(found):
        raise click.UsageError(f"Expected different names with commas between them, got {shown(text)}.")
    return found


def adapters_of_sweep(text: str) -> tuple[float, ...]:
    """Type of an option: adapters=LIST."""
    axis, _, listed = text.partition("=")
    if axis != "adapters":
        raise click.BadParameter(f"Expected adapters=LIST, got {text[:80]!r}.")
    return numbers(int, distinct=True)(listed)


REAL: Readers = {"launch": str, "launch-duration": click.FloatRange(min=1.0), "folder": str}


@bundle
class Compared:
    """What is compared, and where that is written.

    solvers: How plans are searched: names with commas between them.
    objectives: What good plans are, with parameters as in slo:mean_ttft_ms=500.
    predictors: What evaluates servers in the search.
    sizes: Compare at several numbers of adapters, as 32,64,128 or START:STOP:STEP.
    real: Measure the plans on real vLLM servers: launch (the file that says how they start), launch-duration (of each
        run, 120 s), folder (of the results, compare-results). --launch FILE.toml is the same; repeatable.
    """

    solvers: str = option(default="greedy,greedy-paper,maxbase,random", metavar="NAMES")
    objectives: str = option(default="gpus", metavar="NAMES")
    predictors: str = option(default="twin", metavar="NAMES")
    sizes: tuple[int, ...] | None = option("--sweep", type=adapters_of_sweep, metavar="adapters=LIST")
    gpus: int | None = common("gpus")
    max_replicas: int = common(
        "max-replicas", default=1, help="Split an adapter that is too hot for one GPU over up to so many."
    )
    margin: float | None = common("margin")
    time_limit_s: float | None = common("time-limit")
    seed: int = common("seed")
    real: dict[str, Any] = pairs("--real", names=REAL)
    output: str | None = common("output", help="Write the rows to this file (.csv or .json; with --cluster .json).")
    plot: str | None = common("plot", help="Draw the comparison (.html, .png or .svg).")


@bundle
class Systems(Behind):
    """Systems on a cluster, instead of solvers.

    systems: Systems on --cluster (packer systems).
    seeds: Runs of each system.
    duration_s: Simulated time of each run. [default: 3600; whole cycles of piecewise rates; a replayed trace's own
        time]
    size: Find how many equal servers each system needs until --share of requests keep the SLO.
    share: Share of requests that must keep the SLO (--size). [default: the
        goal's: 0.99 for limits of requests, 0.95 for p95]
    """

    systems: str = option(default="vllm,packer", metavar="NAMES")
    seeds: int = option(type=click.IntRange(min=1, max=10_000), default=5, metavar="N")
    duration_s: float | None = common("duration")
    size: bool = flag()
    share: float | None = option(type=click.FloatRange(min=0.0, max=1.0, min_open=True), metavar="X")


@command
def compare(file: FleetFile, kind: OneProfile, compared: Compared, systems: Systems, out: Writing) -> None:
    """Which solver or predictor to use: every combination planned, and measured by the twin or real vLLM.

    Outcomes that fail are shown with what is wrong: starved, memory error, unplaced adapters, refused.
    Solvers that spread over given GPUs get as many as greedy needs, unless --gpus says otherwise. With --cluster,
    systems serve the same requests, each on the whole cluster.

    \b
    Examples:
      packer compare fleet.csv --solvers greedy,auto,maxbase,dlora --plot compare.html
      packer compare fleet.csv --sweep adapters=32:384:32 --predictors twin,forest -o rows.csv
      packer compare fleet.csv --cluster cluster.toml --systems vllm,packer --slo ttft_ms=2000,tpot_ms=100
    """
    from packer.live.launch import read_launch
    from packer.planning.compare import Comparison

    if systems.cluster is not None:
        _compare_systems(file.fleet(), compared, kind.engine, systems, out)
        return
    of_clusters = ("router", "stats_age_s", "slo", "systems", "seeds", "duration_s", "size", "share")
    refuse_without("--cluster", of_clusters)
    refuse_without("--launch", () if "launch" in compared.real else ("launch_duration", "folder"))
    out.check(compared.output, what="table", endings=(".csv", ".json"))
    out.check(compared.plot, what="picture")
    start = read_launch(compared.real["launch"]) if "launch" in compared.real else None
    profile = kind.profile(out)
    named = (compared.solvers, compared.objectives, compared.predictors)
    solvers, objectives, predictors = map(split_names, named)
    options = {name: getattr(compared, name) for name in ("time_limit_s", "max_replicas", "margin")}
    sizes, gpus, seed = compared.sizes or (), compared.gpus, compared.seed
    job = Comparison(file.fleet(), profile, solvers, objectives, predictors, sizes, gpus, seed, options)
    results, whole = _run(job, out)
    if start is not None:
        from packer.live.validate import ValidationSpec
        from packer.operate.real import measured

        spec = ValidationSpec(compared.real.get("launch_duration", 120.0), seed=seed)
        folder = Path(compared.real.get("folder", "compare-results"))
        with out.progress() as progress:
            results = measured(results, list(job.fleets()), start, folder, spec, progress)
    rows = [result.to_dict() for result in results]
    title = f"{job.workload.name} on {profile.label}"
    _write(rows, compared, title, out)
    data = {"workload": job.workload.name, "profile": profile.name, "complete": whole, "rows": rows}
    out.result(data, lambda: [_table(results, title)])
    if not whole:
        raise click.Abort


def _compare_systems(
    workload: packer.Workload, compared: Compared, engine: dict[str, Any], systems: Systems, out: Writing
) -> None:
    from packer.operate.systems import Trials, servers_needed, serves_plans
    from packer.operate.verdict import not_started, verdict
    from packer.twin.cluster.system import judged, load_system

    of_plans = ("solvers", "objectives", "predictors", "sizes", "gpus", "max_replicas", "margin")
    refuse_unused("--cluster", (*of_plans, "time_limit_s", "real", "plot", "profile_name"))
    if not systems.size:
        refuse_without("--size", ("share",))
    out.check(compared.output, what="table", endings=(".json",))
    cluster = systems.read(engine)
    out.note_profiles(*(each.profile for each in cluster.kinds))
    names = split_names(systems.systems)
    systems.check_used(names, cluster, engine, out)
    if cluster.placement is not None:
        bound = [name for name in names if serves_plans(load_system(name), systems.router)]
        text = f"the placement in {systems.cluster} binds {listed(bound) or 'no system'}; any other system serves every"
        out.note(f"{text} adapter on every server, with the slots that the server has there")
    given = values(systems, "cluster", "systems", "size", "share")
    given |= {"slo": systems.goal(workload, cluster), "seed": compared.seed}
    title = f"{workload.name}: {counted(len(workload), 'adapter')} on {counted(len(cluster), 'server')}"
    with out.progress() as progress:
        if systems.size:
            share = systems.share or judged(workload, cluster, given["slo"]).slo.share
            title = f"{workload.name}: fewest servers with which {100 * share:g}% of requests keep the SLO"
            trials, how = Trials(**given), dict[str, Any](share=share, progress=progress)
            sized = {name: servers_needed(workload, cluster, name, trials, **how) for name in names}
            results = [found for found in sized.values() if found is not None]
            for name in (name for name, found in sized.items() if found is None):
                out.note(f"system {name}: the SLO is not kept, whatever the number of servers")
        else:
            results = packer.compare_systems(workload, cluster, names, **given, progress=progress)
    said = not_started(results) if systems.size else verdict(workload, cluster, results)
    limits = judged(workload, cluster, given["slo"]).slo.limits.to_dict()
    data = {"workload": workload.name, "slo": limits, "systems": [each.to_dict() for each in results]}
    data["verdict"] = said
    write_json(data, compared.output)
    out.result(data, lambda: [compared_table(results, title, sizes=systems.size), *([said] if said else [])])


def _run(job: Comparison, out: Writing) -> tuple[list[Result], bool]:
    """Run the combinations. Return the results, and whether they are complete: Ctrl-C keeps the finished ones."""
    results: list[Result] = []
    try:
        with out.progress() as progress:
            results.extend(job.run(progress))
    except KeyboardInterrupt:
        out.note(f"interrupted: {len(results)} of {len(job)} combinations are done")
        return results, False
    return results, True


def _write(rows: list[dict[str, Any]], files: Compared, title: str, out: Writing) -> None:
    from packer.io.documents import jsonable
    from packer.report.figures import write_figure
    from packer.report.pictures import comparison_figure

    if not rows:
        return
    if files.output is not None and Path(files.output).suffix.lower() == ".csv":
        write_text(files.output, csv_text(rows[0], (jsonable(row).values() for row in rows)), force=out.force)
    else:
        write_json(rows, files.output)
    if files.plot is not None:
        write_figure(comparison_figure(rows, title=title), files.plot)


def _table(results: list[Result], title: str) -> Table:
    names = ("adapters", "objective", "predictor")
    several = [name for name in names if len({getattr(r, name) for r in results}) > 1]
    measured = ("total_token_throughput", "mean_ttft_ms", "mean_itl_ms")
    columns = ["solver", *several, "GPUs", "bound", "gap", *heads(measured), "time s", "outcome"]
    rows = []
    for result in results:
        plan, own = result.plan, [result.solver, *(getattr(result, name) for name in several)]
        own.append(plan.n_gpus if plan else "–")
        own.append(f"{plan.lower_bound:g}" if plan and plan.lower_bound is not None else "–")
        own.append(f"{plan.gap:.0%}" if plan and plan.gap is not None else "–")
        own += [*figures(result.reference, measured), number(plan.runtime_s if plan else None, 2)]
        rows.append([*own, result.outcome])
    sources = ", ".join(sorted({r.reference.source for r in results if r.reference}))
    caption = f"tok/s, TTFT, ITL and outcome as simulated or measured by {sources}" if sources else None
    return Table(title, columns, rows, left=(0, len(columns) - 1), caption=caption)
