"""`packer simulate`: what one server would do with a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from packer.cli import options
from packer.cli.output import (
    check_output,
    jsonable,
    note,
    note_estimated,
    number,
    print_json,
    progress_bar,
    show,
    table,
)

if TYPE_CHECKING:
    import polars as pl

    from packer.twin.simulate import Simulation
    from packer.workload import Workload

ARRIVALS = ("poisson", "lognormal", "unpredictable", "piecewise")
METRICS = (
    ("offered_tok_s", "offered load, tok/s", 0),
    ("total_token_throughput", "throughput, tok/s", 0),
    ("request_throughput", "completed, req/s", 2),
    ("sent", "requests sent", 0),
    ("refused", "refused by the client", 0),
    ("completed", "completed", 0),
    ("mean_ttft_ms", "TTFT mean, ms", 1),
    ("median_ttft_ms", "TTFT median, ms", 1),
    ("p99_ttft_ms", "TTFT p99, ms", 1),
    ("mean_tpot_ms", "TPOT mean, ms", 2),
    ("p99_tpot_ms", "TPOT p99, ms", 2),
    ("mean_itl_ms", "ITL mean, ms", 2),
    ("p99_itl_ms", "ITL p99, ms", 2),
    ("mean_running", "running, mean", 1),
    ("max_running", "running, most", 0),
    ("mean_waiting", "waiting, mean", 1),
    ("mean_kv_usage", "KV cache in use, mean share", 3),
    ("preemptions", "preemptions", 0),
    ("adapter_loads", "adapter loads", 0),
    ("busy_share", "engine busy, share of the time", 3),
)
"""Rows of the table: metric, what it is called, digits."""
FRAMES = (".csv", ".parquet")


@click.command()
@options.workload_argument
@options.profile_option
@options.max_loras_option
@options.max_lora_rank_option
@options.rate_factor_option
@click.option(
    "--duration", "duration_s", type=click.FloatRange(min=1.0, max=1e7), metavar="SECONDS",
    help="Simulated time.  [default: 3600; whole cycles of piecewise rates; a replayed trace's own time]",
)  # fmt: skip
@options.seed_option
@click.option(
    "--seeds",
    type=click.IntRange(min=1, max=10_000),
    default=1,
    show_default=True,
    metavar="N",
    help="Simulate with N seeds and report the mean of each metric and its 95 % interval.",
)
@click.option(
    "--max-outstanding",
    type=click.IntRange(min=1),
    metavar="N",
    help="Requests that the client keeps open at most; it refuses those beyond.  [default: no limit]",
)
@click.option(
    "--arrivals",
    type=click.Choice(ARRIVALS),
    help="Arrival process of every adapter.  [default: the workload's own]",
)
@click.option(
    "--arrivals-cv", type=click.FloatRange(min=0.0, max=100.0), metavar="CV",
    help="Coefficient of variation of log-normal gaps (lognormal, unpredictable).  [default: 1]",
)  # fmt: skip
@click.option(
    "--period", "period_s", type=click.FloatRange(min=0.0, min_open=True), metavar="SECONDS",
    help="How long a rate holds (unpredictable, piecewise).  [default: 300]",
)  # fmt: skip
@click.option(
    "--factors", type=options.NumberList(float), default=None, metavar="LIST",
    help="What the rates are multiplied by, period after period (piecewise), e.g. 0.5,1,2.",
)  # fmt: skip
@click.option("--timeline", metavar="FILE", help="Write the state over time: .csv or .parquet.")
@click.option("--per-adapter", metavar="FILE", help="Write one row per adapter: .csv or .parquet.")
@click.option("--plot", metavar="FILE", help="Draw the state over time: .html, .png or .svg.")
@options.output_option("Write the metrics as JSON, with the keys of `vllm bench serve`.")
@options.json_option
@options.quiet_option
@options.force_option
def simulate(
    workload_path: str,
    profile_name: str,
    max_loras: int,
    max_lora_rank: int | None,
    rate_factor: float,
    duration_s: float | None,
    seed: int,
    seeds: int,
    max_outstanding: int | None,
    arrivals: str | None,
    arrivals_cv: float | None,
    period_s: float | None,
    factors: tuple[float, ...] | None,
    timeline: str | None,
    per_adapter: str | None,
    plot: str | None,
    output: str | None,
    as_json: bool,
    quiet: bool,
    force: bool,
) -> None:
    """What one vLLM server would do with a workload: throughput, TTFT, TPOT, ITL, and its state over time.

    A server that does not start (memory error) is a result, not a failure: the reason is printed and the exit
    code is 0. With --seeds, files of the state over time and of adapters are those of the first seed.

    \b
    Examples:
      packer simulate fleet.csv --max-loras 32 --plot server.html
      packer simulate fleet.csv --max-loras 32 --seeds 10 --arrivals unpredictable --arrivals-cv 4
    """
    from packer.io.profiles import load_profile
    from packer.io.workloads import read_workload
    from packer.twin.uncertainty import simulate_seeds

    _check_paths((timeline, per_adapter), plot, output, force=force)
    profile = load_profile(profile_name)
    note_estimated(profile, quiet=quiet)
    workload = read_workload(workload_path)
    workload = workload if rate_factor == 1.0 else workload.scaled(rate_factor)
    workload = _with_arrivals(workload, arrivals, cv=arrivals_cv, period_s=period_s, factors=factors)
    with progress_bar(quiet=quiet) as progress:
        simulations = simulate_seeds(
            workload,
            profile,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            duration_s=duration_s,
            seed=seed,
            seeds=seeds,
            max_outstanding=max_outstanding,
            progress=progress,
        )
    first = simulations[0]
    _write_frame(timeline, first.timeline if timeline else None)
    _write_frame(per_adapter, first.per_adapter if per_adapter else None)
    if plot is not None:
        _draw(first, plot, quiet=quiet)
    result = _result(simulations)
    if output is not None:
        _write_json(result, output)
    if as_json:
        print_json(result)
    elif not quiet:
        _print(simulations, result)


def _check_paths(
    frames: tuple[str | None, ...], plot: str | None, output: str | None, *, force: bool
) -> None:
    """Refuse before long work what could not be written after it."""
    from packer.errors import ValidationError, shown
    from packer.report.figures import check_suffix

    for path in frames:
        if path is not None and Path(path).suffix.lower() not in FRAMES:
            raise ValidationError(
                f"Expected a table's file to end in {', '.join(FRAMES)}, got {shown(path)}."
            )
        check_output(path, force=force)
    if plot is not None:
        check_suffix(plot)
    check_output(plot, force=force)
    check_output(output, force=force)


def _with_arrivals(
    workload: Workload,
    kind: str | None,
    *,
    cv: float | None,
    period_s: float | None,
    factors: tuple[float, ...] | None,
) -> Workload:
    """The workload with the arrival process of the command line, if it names one."""
    from packer.arrival import Arrivals
    from packer.errors import IncompatibleError

    for option, value, kinds in (
        ("--factors", factors, ("piecewise",)),
        ("--period", period_s, ("unpredictable", "piecewise")),
        ("--arrivals-cv", cv, ("lognormal", "unpredictable")),
    ):
        if value is not None and kind not in kinds:
            raise IncompatibleError(f"{option} goes with --arrivals {' or '.join(kinds)} only.")
    if kind is None:
        return workload
    if kind == "piecewise" and factors is None:
        raise IncompatibleError(
            "--arrivals piecewise needs --factors: what rates are multiplied by, e.g. 0.5,1,2."
        )
    given = {name: value for name, value in (("cv", cv), ("period_s", period_s)) if value is not None}
    process = Arrivals(kind, factors=factors or (), **given)  # type: ignore[arg-type]
    return workload.with_arrivals(process)


def _result(simulations: list[Simulation]) -> dict[str, Any]:
    """The metrics of one run; of several their means, with intervals beside them."""
    from packer.twin.uncertainty import intervals

    result = simulations[0].to_dict()
    if len(simulations) == 1 or simulations[0].status != "ok":
        return result
    rows = {row.pop("metric"): row for row in intervals(simulations).to_dicts()}
    result |= {metric: row["mean"] for metric, row in rows.items()}
    result["starved"] = sum(sim.starved for sim in simulations) > len(simulations) / 2
    result["starved_share"] = sum(sim.starved for sim in simulations) / len(simulations)
    result["seeds"] = len(simulations)
    result["intervals_95"] = rows
    return result


def _print(simulations: list[Simulation], result: dict[str, Any]) -> None:
    first, n = simulations[0], len(simulations)
    server = f"max_loras {first.max_loras}, max_lora_rank {first.max_lora_rank}"
    title = f"{first.workload.name}: {len(first.workload)} adapters on one {first.profile.label}, {server}"
    if first.status != "ok":
        show(title, f"memory error: the server does not start: {first.status_reason}.")
        return
    several = n > 1
    rows = []
    for metric, name, digits in METRICS:
        cells = [name, number(result[metric], digits)]
        if several:
            row = result["intervals_95"][metric]
            cells += [number(row["low"], digits), number(row["high"], digits)]
        rows.append(cells)
    columns = ["", f"mean of {n} seeds", "95 % from", "to"] if several else ["", "value"]
    share = result["total_token_throughput"] / result["offered_tok_s"] if result["offered_tok_s"] else 1.0
    verdict = "starves" if result["starved"] else "keeps up"
    if several and 0 < result["starved_share"] < 1:
        verdict += f" (in {result['starved_share']:.0%} of the runs it starves)"
    show(
        title,
        table(None, columns, rows),
        f"{first.kv_cache_tokens:,} KV tokens. The server {verdict}: {share:.1%} of the offered load is served.",
    )


def _write_frame(path: str | None, frame: pl.DataFrame | None) -> None:
    from packer.io.parquet import write_frame

    if path is not None and frame is not None:
        write_frame(frame, path)


def _write_json(result: dict[str, Any], path: str) -> None:
    import json

    from packer.io.files import write_text

    write_text(path, json.dumps(jsonable(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _draw(simulation: Simulation, path: str, *, quiet: bool) -> None:
    from packer.report.figures import write_figure
    from packer.report.simulation import simulation_figure

    if simulation.status != "ok":
        note(f"nothing to draw: the server does not start; {path} was not written.", quiet=quiet)
        return
    title = (
        f"{simulation.workload.name} on one {simulation.profile.label}, max_loras {simulation.max_loras}, "
        f"max_lora_rank {simulation.max_lora_rank}"
    )
    figure = simulation_figure(
        simulation.timeline,
        duration_s=simulation.duration_s,
        offered_tok_s=simulation.offered_tok_s,
        title=title,
    )
    write_figure(figure, path)
