"""`packer simulate`: what one server, or a cluster, does with a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

import packer
from packer.cli.cluster import METRICS, Behind, lines_of, refuse_without, title_of
from packer.cli.declare import Readers, bundle, command, flag, option, pairs, values
from packer.cli.options import FleetFile, Writing, common, numbers
from packer.cli.output import write_frame, write_json
from packer.cli.predicted import predicted
from packer.cli.settings import OneProfile
from packer.cli.traffic import refuse_unused
from packer.errors import IncompatibleError


@bundle
class ServerArguments:
    """The server's slots and what evaluates it.

    max_loras: Adapter slots of the server (vLLM's --max-loras); needed without --cluster.
    explain: Say which rules fired, or which features mattered (learned predictors).
    """

    max_loras: int | None = option(type=click.IntRange(min=0, max=100_000), metavar="N")
    max_lora_rank: int | None = common("max-lora-rank")
    predictor: str = common("predictor")
    explain: bool = flag()


@bundle
class RunOptions:
    """How the twin runs, and what servers do besides their requests.

    duration_s: Simulated time. [default: 3600; whole cycles of piecewise rates; a replayed trace's own time]
    seeds: Simulate with N seeds and report the mean of each metric and its 95 % interval.
    max_outstanding: Requests that the client keeps open at most; it refuses those beyond. [default: no limit]
    concurrency: Closed loop: so many requests are always outstanding in all, as with vllm bench serve
        --max-concurrency. The rates only say how often each adapter is chosen.
    paced: With --concurrency: requests come at the fleet's rates, and wait at the client for a place before their TTFT
        begins.
    scrape_interval_s: Time between scrapes of /metrics/, which stop the API server; those of /metrics, without the last
        slash, cost less. [default: the profile's, or none]
    tuning: Train beside the requests by this policy, as in llmstation:slo_decode_ms=45. [default: the job's]
    """

    rate_factor: float = common("rate-factor")
    duration_s: float | None = common("duration")
    seed: int = common("seed")
    seeds: int = option(type=click.IntRange(min=1, max=10_000), default=1, metavar="N")
    max_outstanding: int | None = option(type=click.IntRange(min=1), metavar="N")
    concurrency: int | None = option(type=click.IntRange(min=1, max=1_000_000), metavar="C")
    paced: bool = flag()
    scrape_interval_s: float | None = option("--scrape-interval", type=click.FloatRange(min=0.001), metavar="SECONDS")
    tuning: str | None = common("tuning")


PROCESS: Readers = {
    "arrivals": click.Choice(("poisson", "lognormal", "unpredictable", "piecewise")),
    "arrivals-cv": click.FloatRange(min=0.0, max=100.0),
    "period": click.FloatRange(min=0.0, min_open=True),
    "factors": numbers(float),
}


@bundle
class ArrivalOptions:
    """The arrival process, if not the workload's own.

    process: The arrival process of every adapter: arrivals (poisson, lognormal, unpredictable, piecewise), arrivals-cv
        (of log-normal gaps, 1), period (how long a rate holds, 300 s), factors (of the rates, period after period).
        --arrivals lognormal is the same; repeatable.
    """

    process: dict[str, Any] = pairs("--process", names=PROCESS)

    def arrivals(self) -> packer.Arrivals | None:
        """The arrival process of the command line; None if it names none."""
        given = dict(self.process)
        arrivals = given.pop("arrivals", None)
        for name, kinds in (
            ("factors", ("piecewise",)),
            ("period", ("unpredictable", "piecewise")),
            ("arrivals_cv", ("lognormal", "unpredictable")),
        ):
            if name in given and arrivals not in kinds:
                option = name.replace("_", "-")
                raise IncompatibleError(f"--{option} goes with --arrivals {' or '.join(kinds)} only.")
        if arrivals is None:
            return None
        if arrivals == "piecewise" and "factors" not in given:
            raise IncompatibleError("--arrivals piecewise needs --factors: what rates are multiplied by, e.g. 0.5,1,2.")
        named = {"arrivals_cv": "cv", "period": "period_s"}
        return packer.Arrivals(arrivals, **{named.get(k, k): value for k, value in given.items()})


@bundle
class SystemArgument(Behind):
    """A cluster, and how it is run.

    system: How the cluster is run (packer systems).
    """

    system: str = option(default="vllm", metavar="NAME|FILE.toml")


TABLES = ("per-adapter", "per-server", "requests", "timeline")


@bundle
class SimulationFiles:
    """What is written.

    tables: Write a table, .csv or .parquet: per-adapter, per-server, requests, or timeline, the state over time;
        --per-adapter FILE is the same; repeatable.
    output: Write the metrics as JSON, with the keys of `vllm bench serve`.
    """

    tables: dict[str, str] = pairs("--table", names=dict.fromkeys(TABLES, str), metavar="NAME=FILE")
    plot: str | None = common("plot", help="Draw the state over time (.html, .png or .svg).")
    output: str | None = common("output")


@command
def simulate(
    file: FleetFile,
    kind: OneProfile,
    server: ServerArguments,
    run: RunOptions,
    process: ArrivalOptions,
    system: SystemArgument,
    files: SimulationFiles,
    out: Writing,
) -> None:
    """What one vLLM server, or a cluster, does with a workload: throughput, latencies, state over time.

    A server that does not start (memory error) is a result: the reason is printed and the exit code is 0. --seeds gives
    the probability that the server starves or queues without end, and the load factor at which it reaches 5 %; tables
    and plots come from the first seed. With --cluster, many servers behind a router serve the workload.

    \b
    Examples:
      packer simulate fleet.csv --max-loras 32 --plot server.html
      packer simulate fleet.csv --max-loras 32 --seeds 10 --arrivals unpredictable --arrivals-cv 4
      packer simulate fleet.csv --max-loras 32 --predictor tree --explain
      packer simulate fleet.csv --max-loras 32 --concurrency 64
      packer simulate fleet.csv --max-loras 32 --tuning llmstation:slo_decode_ms=45
      packer simulate fleet.csv --cluster cluster.toml --router affinity --slo ttft_ms=2000,tpot_ms=100
    """
    from packer.operate.changes import changed_fleet

    out.check(*files.tables.values(), what="table")
    out.check(files.plot, what="picture")
    out.check(files.output)
    arrivals = process.arrivals()  # what is refused is refused before a long log is read
    if system.cluster is None:
        refuse_without("--cluster", ("router", "stats_age_s", "system"))
        if "per_server" in files.tables:
            raise click.UsageError("--per-server needs --cluster.")
    elif server.predictor != "twin" or server.explain:
        raise click.UsageError("--cluster is simulated by the twin: leave out --predictor and --explain.")
    else:
        refuse_unused("--cluster", ("max_loras", "max_lora_rank", "profile_name", "scrape_interval_s"))
    served = kind.profile(out) if system.cluster is None else system.read(kind.engine)
    workload = file.fleet()
    if run.concurrency is not None and not run.paced and workload.arrivals.trace is None:
        refuse_unused("--concurrency without --paced", ("rate_factor", "process"))
    workload = changed_fleet(workload, rate_factor=run.rate_factor)[0]
    workload = workload if arrivals is None else workload.with_arrivals(arrivals)
    if system.cluster is None and run.tuning is not None:
        workload = workload.tuned_by(run.tuning)
    if server.max_loras is None and system.cluster is None and workload.n_loras:
        raise click.UsageError("Missing option '--max-loras', or --cluster.")
    if isinstance(served, packer.Profile) and (server.predictor != "twin" or server.explain):
        predicted(workload, served, server, run.seed, files, out)
        return
    simulations = _simulated(workload, served, kind, server, run, system, out)
    first = simulations[0]
    for frame, path in files.tables.items():
        write_frame(getattr(first, frame), path)
    if files.plot is not None:
        _draw(first, files.plot, out)
    result = result_of(simulations)
    if run.seeds > 1 and system.cluster is None and run.concurrency is None and first.status == "ok":
        result |= _risk(simulations, run, out)
    write_json(result, files.output)
    out.result(result, lambda: lines_of(simulations, result))


def _simulated(
    workload: packer.Workload, served: packer.Profile | packer.Cluster, kind: OneProfile, server: ServerArguments,
    run: RunOptions, system: SystemArgument, out: Writing,
) -> Sequence[packer.Run]:  # fmt: skip
    """One run per seed, on one server or a cluster."""
    from packer.twin.cluster.system import judged, load_system, placed
    from packer.twin.uncertainty import repeated

    how = values(run, "rate_factor", "seed", "seeds", "scrape_interval_s", "tuning")
    with out.progress() as progress:
        given: dict[str, Any] = {"seed": run.seed, "seeds": run.seeds, "progress": progress}
        if isinstance(served, packer.Profile):
            how |= {"max_loras": server.max_loras or 0, "max_lora_rank": server.max_lora_rank}
            how |= {"scrape_interval_s": run.scrape_interval_s, "slo": system.goal(workload)}
            return repeated(lambda seed: packer.simulate(workload, served, **how, seed=seed), **given)
        cluster = served
        system.check_used([system.system], cluster, kind.engine, out)
        out.note_profiles(*(each.profile for each in cluster.kinds))
        named = load_system(system.system)
        if cluster.placement is not None:
            out.note(f"system {named.name} is bound to the placement in {system.cluster}")
        how["slo"] = goal = system.goal(workload, cluster)
        cluster = placed(judged(workload, cluster, goal), cluster, named, run.seed)
        how["system"] = replace(named, placement=None, tuning=run.tuning or named.tuning)
        how |= {"router": system.router, "stats_interval_s": system.stats_age_s}
        return repeated(lambda seed: packer.simulate_cluster(workload, cluster, **how, seed=seed), **given)


def _risk(simulations: Sequence[packer.Run], run: RunOptions, out: Writing) -> dict[str, Any]:
    """The probability that a run starves or queues without end, and the load at which it reaches 5 %."""
    from packer.twin.cliff import SEEDS, chance, cliff

    first = simulations[0]
    with out.progress() as progress:
        found = cliff(
            first.workload, first.profile, max_loras=first.max_loras, max_lora_rank=first.max_lora_rank,
            seeds=min(SEEDS, run.seeds), seed=run.seed, jobs=-1, progress=progress, duration_s=run.duration_s,
            max_outstanding=run.max_outstanding, scrape_interval_s=run.scrape_interval_s,
        )  # fmt: skip
    return {"failure": asdict(chance(simulations)), "cliff": None if found is None else asdict(found)}


def result_of(simulations: Sequence[packer.Run]) -> dict[str, Any]:
    """Metrics and verdict of one run; for several runs, the means of the metrics with 95 % intervals."""
    from packer.twin.timeline import SUMMARY
    from packer.twin.uncertainty import intervals
    from packer.twin.verdict import verdict_of_all

    result = {**simulations[0].to_dict(), "verdict": verdict_of_all(simulations).to_dict()}
    if len(simulations) == 1 or simulations[0].status != "ok":
        return result
    shown = METRICS["server"] | METRICS["others"]
    metrics = dict.fromkeys((*SUMMARY, *(name for name in shown if name in result)))
    rows = {row.pop("metric"): row for row in intervals(simulations, metrics=list(metrics)).to_dicts()}
    result |= {metric: row["mean"] for metric, row in rows.items()}
    result["starved_share"] = sum(sim.starved for sim in simulations) / len(simulations)
    result["starved"] = result["starved_share"] > 0.5
    result["seeds"] = len(simulations)
    trained = [sim.tuning for sim in simulations if sim.tuning is not None]
    for name in ("samples", "samples_s", "tok_s", "beside_share") if trained else ():
        result["tuning"][name] = sum(getattr(each, name) for each in trained) / len(trained)
    result["intervals_95"] = rows
    return result


def _draw(first: packer.Run, path: str, out: Writing) -> None:
    from packer.report.figures import write_figure
    from packer.report.pictures import cluster_figure, simulation_figure

    if first.status != "ok":
        out.note(f"nothing to draw: the server does not start; {Path(path)} was not written.")
        return
    draw = simulation_figure if first.cluster is None else cluster_figure
    write_figure(draw(first, title=title_of(first)), path)
