"""`packer simulate`: what one server does with a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from packer.cli.declare import bundle, command, flag, option
from packer.cli.options import (
    LENGTH,
    FleetFile,
    NumberList,
    OneProfile,
    Writing,
    max_lora_rank_option,
    output_option,
    plot_option,
    predictor_option,
    rate_factor_option,
    seed_option,
)
from packer.cli.output import number, table, write_frame, write_json
from packer.cli.traffic import refuse_unused

if TYPE_CHECKING:
    from rich.table import Table

    from packer.operate.predict import Prediction
    from packer.twin.result import Simulation
    from packer.workload import Workload

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


@bundle
class Server:
    """The server's slots and what evaluates it."""

    max_loras: int = option(
        type=click.IntRange(min=1, max=100_000),
        required=True,
        metavar="N",
        help="Adapter slots of the server (vLLM's --max-loras).",
    )
    max_lora_rank: int | None = max_lora_rank_option()
    predictor: str = predictor_option()
    explain: bool = flag(help="Say which rules fired, or which features mattered (learned predictors).")


@bundle
class Run:
    """How the twin runs."""

    rate_factor: float = rate_factor_option()
    duration_s: float | None = option(
        "--duration",
        type=LENGTH,
        metavar="SECONDS",
        help="Simulated time.  [default: 3600; whole cycles of piecewise rates; a replayed trace's own time]",
    )
    seed: int = seed_option()
    seeds: int = option(
        type=click.IntRange(min=1, max=10_000),
        default=1,
        metavar="N",
        help="Simulate with N seeds and report the mean of each metric and its 95 % interval.",
    )
    max_outstanding: int | None = option(
        type=click.IntRange(min=1),
        metavar="N",
        help="Requests that the client keeps open at most; it refuses those beyond.  [default: no limit]",
    )


@bundle
class ArrivalOptions:
    """The arrival process, if not the workload's own."""

    arrivals: str | None = option(
        type=click.Choice(("poisson", "lognormal", "unpredictable", "piecewise")),
        help="Arrival process of every adapter.  [default: the workload's own]",
    )
    arrivals_cv: float | None = option(
        type=click.FloatRange(min=0.0, max=100.0),
        metavar="CV",
        help="Coefficient of variation of log-normal gaps (lognormal, unpredictable).  [default: 1]",
    )
    period_s: float | None = option(
        "--period",
        type=click.FloatRange(min=0.0, min_open=True),
        metavar="SECONDS",
        help="How long a rate holds (unpredictable, piecewise).  [default: 300]",
    )
    factors: tuple[float, ...] | None = option(
        type=NumberList(float),
        metavar="LIST",
        help="What the rates are multiplied by, period after period (piecewise), e.g. 0.5,1,2.",
    )

    def apply(self, workload: Workload) -> Workload:
        """The workload with the arrival process of the command line, if it names one."""
        from packer.arrival import Arrivals
        from packer.errors import IncompatibleError

        for name, value, kinds in (
            ("--factors", self.factors, ("piecewise",)),
            ("--period", self.period_s, ("unpredictable", "piecewise")),
            ("--arrivals-cv", self.arrivals_cv, ("lognormal", "unpredictable")),
        ):
            if value is not None and self.arrivals not in kinds:
                raise IncompatibleError(f"{name} goes with --arrivals {' or '.join(kinds)} only.")
        if self.arrivals is None:
            return workload
        if self.arrivals == "piecewise" and self.factors is None:
            raise IncompatibleError(
                "--arrivals piecewise needs --factors: what rates are multiplied by, e.g. 0.5,1,2."
            )
        pairs = (("cv", self.arrivals_cv), ("period_s", self.period_s))
        given: dict[str, Any] = {name: value for name, value in pairs if value is not None}
        return workload.with_arrivals(Arrivals(self.arrivals, factors=self.factors or (), **given))  # type: ignore[arg-type]


@bundle
class Files:
    """What is written."""

    timeline: str | None = option(metavar="FILE", help="Write the state over time: .csv or .parquet.")
    per_adapter: str | None = option(metavar="FILE", help="Write one row per adapter: .csv or .parquet.")
    plot: str | None = plot_option("Draw the state over time")
    output: str | None = output_option("Write the metrics as JSON, with the keys of `vllm bench serve`.")


@command
def simulate(
    file: FleetFile,
    kind: OneProfile,
    server: Server,
    run: Run,
    process: ArrivalOptions,
    files: Files,
    out: Writing,
) -> None:
    """What one vLLM server does with a workload: throughput, TTFT, TPOT, ITL, and its state over time.

    A server that does not start (memory error) is a result, not a failure: the reason is printed and the exit
    code is 0. With --seeds, files of the state over time and of adapters are those of the first seed. With
    --predictor, a learned predictor gives its figures instead of the twin.

    \b
    Examples:
      packer simulate fleet.csv --max-loras 32 --plot server.html
      packer simulate fleet.csv --max-loras 32 --seeds 10 --arrivals unpredictable --arrivals-cv 4
      packer simulate fleet.csv --max-loras 32 --predictor tree --explain
    """
    from packer.twin.uncertainty import simulate_seeds

    out.check_tables(files.timeline, files.per_adapter)
    out.check_pictures(files.plot)
    out.check(files.output)
    workload = file.fleet() if run.rate_factor == 1.0 else file.fleet().scaled(run.rate_factor)
    workload = process.apply(workload)
    profile = kind.profile(out)
    slots: dict[str, Any] = {"max_loras": server.max_loras, "max_lora_rank": server.max_lora_rank}
    if server.predictor != "twin" or server.explain:
        from packer.operate.predict import predict

        unused = ("duration_s", "seeds", "max_outstanding", "timeline", "per_adapter", "plot")
        refuse_unused(f"--predictor {server.predictor}", unused)
        found = predict(workload, profile, server.predictor, seed=run.seed, explain=server.explain, **slots)
        write_json(found.to_dict(), files.output)
        out.result(found.to_dict, lambda: _predicted(found))
        return
    with out.progress() as progress:
        simulations = simulate_seeds(
            workload,
            profile,
            **slots,
            duration_s=run.duration_s,
            seed=run.seed,
            seeds=run.seeds,
            max_outstanding=run.max_outstanding,
            progress=progress,
        )
    first = simulations[0]
    write_frame(first.timeline if files.timeline else None, files.timeline)
    write_frame(first.per_adapter if files.per_adapter else None, files.per_adapter)
    if files.plot is not None:
        _draw(first, files.plot, out)
    result = result_of(simulations)
    write_json(result, files.output)
    out.result(result, lambda: _lines(simulations, result))


def result_of(simulations: list[Simulation]) -> dict[str, Any]:
    """The metrics of one run; of several their means, with intervals beside them."""
    from packer.twin.uncertainty import intervals

    result = simulations[0].to_dict()
    if len(simulations) == 1 or simulations[0].status != "ok":
        return result
    rows = {row.pop("metric"): row for row in intervals(simulations).to_dicts()}
    result |= {metric: row["mean"] for metric, row in rows.items()}
    result["starved_share"] = sum(sim.starved for sim in simulations) / len(simulations)
    result["starved"] = result["starved_share"] > 0.5
    result["seeds"] = len(simulations)
    result["intervals_95"] = rows
    return result


def _title(first: Simulation) -> str:
    slots = f"max_loras {first.max_loras}, max_lora_rank {first.max_lora_rank}"
    return f"{first.workload.name}: {len(first.workload)} adapters on one {first.profile.label}, {slots}"


def _lines(simulations: list[Simulation], result: dict[str, Any]) -> list[Table | str]:
    first, n = simulations[0], len(simulations)
    if first.status != "ok":
        return [_title(first), f"memory error: the server does not start: {first.status_reason}."]
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
    found = "starves" if result["starved"] else "keeps up"
    if several and 0 < result["starved_share"] < 1:
        found += f" (in {result['starved_share']:.0%} of the runs it starves)"
    tokens = f"{first.kv_cache_tokens:,} KV tokens"
    return [
        _title(first),
        table(None, columns, rows),
        f"{tokens}. The server {found}: {share:.1%} of the offered load is served.",
    ]


def _predicted(found: Prediction) -> list[Table | str]:
    figures = found.figures
    if figures.memory_error:
        result = "memory error: the server does not start"
    else:
        result = f"{'starves' if figures.starved else 'does not starve'} "
        result += f"(probability {figures.starvation_probability:.1%})"
    rows = [
        ["result", result, ""],
        ["offered load", number(figures.offered_tok_s), "tok/s"],
        ["throughput", number(figures.total_token_throughput), "tok/s"],
        ["served share", number(100 * figures.served_share), "%"],
        ["mean ITL", number(figures.mean_itl_ms), "ms"],
        ["mean TTFT", number(figures.mean_ttft_ms), "ms"],
        ["median TTFT", number(figures.median_ttft_ms), "ms"],
        ["p99 TTFT", number(figures.p99_ttft_ms), "ms"],
        ["KV cache", number(figures.kv_cache_tokens, 0), "tokens"],
    ]
    outside = (
        [f"Outside what {found.predictor!r} was trained on: {', '.join(found.outside)}"]
        if found.outside
        else []
    )
    title = f"One server by the predictor {found.predictor!r}"
    return [
        table(title, ["", "", "unit"], rows, left=(0, 2)),
        f"Server: {found.server.profile.label}",
        *found.lines,
        *outside,
        *found.notes,
    ]


def _draw(first: Simulation, path: str, out: Writing) -> None:
    from packer.report.figures import write_figure
    from packer.report.simulation import simulation_figure

    if first.status != "ok":
        out.note(f"nothing to draw: the server does not start; {Path(path)} was not written.")
        return
    figure = simulation_figure(
        first.timeline, duration_s=first.duration_s, offered_tok_s=first.offered_tok_s, title=_title(first)
    )
    write_figure(figure, path)
