"""`packer watch`: has the traffic drifted so far from the plan that it should be made anew?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from packer.cli import options
from packer.cli.observed import DEFAULT_RANK
from packer.cli.output import check_output, note, number, print_json, show, table
from packer.cli.servers import calibrated, note_estimates, servers
from packer.cli.workload_from_metrics import (
    UNUSED_WITH_INPUT,
    metrics_options,
    refuse_unused,
    source_of,
)
from packer.errors import InputError

if TYPE_CHECKING:
    from packer.adapter import Adapter
    from packer.plan import Plan
    from packer.traces.prometheus import Source
    from packer.workload import Workload

_SHOWN = 10
_OF_METRICS = ("gateway", "requests_metric", "input_tokens_metric", "output_tokens_metric", "label", "end_s")


@click.command()
@options.plan_argument
@metrics_options
@click.option(
    "--log", "log_path", default=None, metavar="LOG.jsonl", help="An access log, instead of Prometheus."
)
@click.option(
    "--window",
    "window_s",
    type=click.FloatRange(min=1.0, max=1e8),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="Rates are those of the latest window of this length.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0, max=100.0),
    default=0.25,
    show_default=True,
    metavar="X",
    help="A rate that differs by more than this share counts as drifted.",
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=1.0, max=1e7),
    default=None,
    metavar="SECONDS",
    help="Look again and again, until interrupted.  [default: once]",
)
@click.option(
    "--predictor", default=None, metavar="NAME|PATH", help="Who judges.  [default: the plan's predictor]"
)
@options.output_option("Write the measured workload here at each look, for packer replan.")
@options.force_option
@options.json_option
@options.quiet_option
def watch(
    plan_path: str,
    url: str | None,
    export_path: str | None,
    gateway: str,
    requests_metric: str | None,
    input_tokens_metric: str | None,
    output_tokens_metric: str | None,
    label: str | None,
    end_s: float | None,
    log_path: str | None,
    window_s: float,
    tolerance: float,
    every_s: float | None,
    predictor: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Compare the traffic with the plan, and advise when to plan again.

    Advice is "keep" (the plan holds at the measured rates), "watch" (it holds, but rates drifted or
    adapters are new) or "replan" (a server breaks). Exit code 3 means replan.

    \b
    Examples:
      packer watch plan.json --url http://prometheus:9090 --window 900
      packer watch plan.json --log access.jsonl -o seen.csv && echo keep
      packer watch plan.json --url http://prometheus:9090 --every 300 -o seen.csv --force --json
    """
    import time

    from packer.errors import IncompatibleError
    from packer.io.plans import read_plan
    from packer.io.workloads import write_workload
    from packer.traces.measure import rounded

    check_output(output, force=force)
    names = (requests_metric, input_tokens_metric, output_tokens_metric, label)
    look = (
        _log_reader(log_path, window_s)
        if log_path is not None
        else _metrics_reader(url, export_path, source_of(gateway, names), end_s=end_s, window_s=window_s)
    )
    plan = read_plan(plan_path)
    if not plan.bins:
        raise IncompatibleError("The plan has no GPUs, so there is nothing to watch.")
    note_estimates(plan.bins, quiet=quiet)
    while True:
        try:
            seen = look()
        except InputError as error:
            if every_s is None:
                raise
            note(str(error))  # a server that is away or a log without requests may be back at the next look
        else:
            found = judged(plan, seen, predictor, tolerance)
            if output is not None:
                write_workload(rounded(with_plan_ranks(plan, seen)), output, force=True)
            if as_json:
                print_json(found)
            elif not quiet:
                show(*_lines(plan, found, output))
            if every_s is None:
                return 3 if found["advice"] == "replan" else 0
        time.sleep(every_s)


def _log_reader(path: str, window_s: float) -> Callable[[], Workload]:
    """Reads the end of an access log at each call."""
    from dataclasses import replace

    from packer.traces.access_log import read_access_log
    from packer.traces.measure import measure_workload
    from packer.traces.pattern import latest_rates

    refuse_unused("--log", ("url", "export_path", *_OF_METRICS))

    def look() -> Workload:
        log = read_access_log(path, growing=True)
        trace = replace(log.trace, ranks=(DEFAULT_RANK,) * len(log.trace.names))
        fleet = measure_workload(trace)
        rates = latest_rates(trace, window_s).tolist()
        adapters = [replace(a, rate=rate) for a, rate in zip(fleet.adapters, rates, strict=True) if rate > 0]
        return replace(fleet, adapters=tuple(adapters))

    return look


def _metrics_reader(
    url: str | None, export_path: str | None, source: Source, *, end_s: float | None, window_s: float
) -> Callable[[], Workload]:
    """Asks a Prometheus server, or reads the last window of a saved file, at each call."""
    from packer.cli.observed import metrics_workload
    from packer.cli.workload_from_metrics import read_metrics
    from packer.errors import FileFormatError, ValidationError
    from packer.traces.prometheus import check_url

    if export_path is not None:
        refuse_unused("--input", UNUSED_WITH_INPUT)
    if (url is None) == (export_path is None):
        raise ValidationError("Expected exactly one of --url, --input and --log.")
    if url is not None:
        check_url(url)

    def look() -> Workload:
        metrics = read_metrics(url, export_path, source, span_s=window_s, end_s=end_s, window_s=window_s)
        rates = metrics.table.rates[-1].tolist()
        if not any(rates):
            where = export_path or url or ""
            raise FileFormatError("no request was counted in the latest window.", path=where)
        return metrics_workload(metrics, rates, {}, DEFAULT_RANK)

    return look


def with_plan_ranks(plan: Plan, seen: Workload) -> Workload:
    """The measured fleet with the ranks that the plan knows."""
    from dataclasses import replace

    ranks = {adapter.name: adapter.rank for adapter in plan.workload.adapters}
    adapters = (replace(adapter, rank=ranks.get(adapter.name, adapter.rank)) for adapter in seen.adapters)
    return replace(seen, adapters=tuple(adapters))


def judged(plan: Plan, seen: Workload, predictor: str | None, tolerance: float) -> dict[str, Any]:
    """What changed, and whether the running servers stand it; new adapters have no server."""
    from packer.solvers.evaluator import Evaluator

    measured = {adapter.name: adapter for adapter in seen.adapters}
    known = set(plan.workload.names)
    fleet = planned_fleet_now(plan.workload, measured)
    judge = Evaluator.load(
        predictor or plan.predictor, list(dict.fromkeys(b.profile for b in plan.bins)), seed=plan.seed
    )
    evaluations = judge.evaluate(fleet, plan.bins)
    drifted = [
        {"adapter": old.name, "planned": old.rate, "measured": new.rate if new.name in measured else 0.0}
        for old, new in zip(plan.workload.adapters, fleet.adapters, strict=True)
        if abs(new.rate - old.rate) > tolerance * old.rate
    ]
    drifted.sort(key=lambda row: -abs(float(row["measured"]) - float(row["planned"])))  # type: ignore[arg-type]
    broken = [gpu for gpu, ok in enumerate(evaluations.feasible.tolist()) if not ok]
    new = [adapter.name for adapter in seen.adapters if adapter.name not in known]
    return {
        "advice": "replan" if broken else "watch" if drifted or new else "keep",
        "calibrated": calibrated(plan.bins),
        "arrivals": fleet.arrivals.kind,
        "offered_tok_s": {"planned": plan.workload.offered_tok_s, "measured": seen.offered_tok_s},
        "broken_gpus": broken,
        "new_adapters": new,
        "silent_adapters": sorted(known - set(measured)),
        "drifted": drifted,
    }


def planned_fleet_now(planned: Workload, measured: Mapping[str, Adapter]) -> Workload:
    """The plan's adapters at the measured rates and lengths; a silent one keeps a rate of 1e-6 req/s.

    Requests of a replayed trace would come at the trace's rates whatever was measured: Poisson arrivals take
    their place.
    """
    from dataclasses import replace

    from packer.arrival import Arrivals

    now = [
        replace(
            old,
            rate=measured[old.name].rate,
            input_tokens=measured[old.name].input_tokens,
            output_tokens=measured[old.name].output_tokens,
        )
        if old.name in measured
        else replace(old, rate=1e-6)
        for old in planned.adapters
    ]
    fleet = planned if planned.arrivals.trace is None else planned.with_arrivals(Arrivals())
    return replace(fleet, adapters=tuple(now))


def _lines(plan: Plan, found: dict[str, Any], output: str | None) -> Sequence[Any]:
    rows = [
        (
            row["adapter"],
            f"{row['planned']:.4g}",
            f"{row['measured']:.4g}",
            f"{row['measured'] / row['planned'] - 1:+.0%}",
        )
        for row in found["drifted"][:_SHOWN]
    ]
    load = found["offered_tok_s"]
    lines: list[Any] = []
    if rows:
        lines.append(
            table("Rates that drifted most, requests/s", ("adapter", "planned", "measured", "change"), rows)
        )
    lines.append(
        f"Offered load {number(load['measured'], 0)} tok/s, planned for {number(load['planned'], 0)}; "
        f"{len(found['drifted'])} of {len(plan.workload)} rates drifted, "
        f"{len(found['new_adapters'])} new adapters, {len(found['silent_adapters'])} silent."
    )
    if found["new_adapters"]:
        lines.append(f"Without a server: {', '.join(found['new_adapters'][:_SHOWN])}.")
    if found["broken_gpus"]:
        lines.append(f"At these rates GPU {', '.join(map(str, found['broken_gpus'][:_SHOWN]))} breaks.")
    if plan.workload.arrivals.trace is not None:
        lines.append("The plan replays a trace: it is judged with Poisson arrivals at the measured rates.")
    lines.append(f"Judged for {servers(plan.bins)}.")
    hint = {
        "keep": "Keep the plan.",
        "watch": "The plan holds; plan again when it suits.",
        "replan": f"Plan again: packer replan PLAN {output or 'WORKLOAD'}.",
    }
    lines.append(hint[found["advice"]])
    return lines
