"""`packer watch`: has the traffic drifted so far from the plan that it should be made anew?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from packer.cli import options
from packer.cli.observed import DEFAULT_RANK
from packer.cli.output import check_output, note, number, print_json, show, table
from packer.cli.workload_from_metrics import metrics_options
from packer.errors import LiveError

if TYPE_CHECKING:
    from packer.plan import Plan
    from packer.workload import Workload

_SHOWN = 10


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
    span_s: float,
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

    from packer.io.plans import read_plan
    from packer.io.workloads import write_workload
    from packer.traces.measure import rounded

    check_output(output, force=force)
    plan = read_plan(plan_path)
    names = (requests_metric, input_tokens_metric, output_tokens_metric, label)
    while True:
        try:
            seen = (
                _from_log(log_path, window_s)
                if log_path is not None
                else _from_metrics(
                    url, export_path, gateway, names, span_s=span_s, end_s=end_s, window_s=window_s
                )
            )
        except LiveError as error:
            if every_s is None:
                raise
            note(str(error))  # a server that is away now may be back at the next look
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


def _from_log(path: str, window_s: float) -> Workload:
    """The last whole window of an access log."""
    from dataclasses import replace

    from packer.traces.access_log import read_access_log
    from packer.traces.measure import measure_workload
    from packer.traces.pattern import rates_of

    log = read_access_log(path)
    trace = replace(log.trace, ranks=(DEFAULT_RANK,) * len(log.trace.names))
    table_ = rates_of(trace, window_s, start_s=log.start_s)
    fleet = measure_workload(trace)
    rates = table_.rates[-1].tolist()
    adapters = [replace(a, rate=rate) for a, rate in zip(fleet.adapters, rates, strict=True) if rate > 0]
    return replace(fleet, adapters=tuple(adapters))


def _from_metrics(
    url: str | None,
    export_path: str | None,
    gateway: str,
    names: tuple[str | None, str | None, str | None, str | None],
    *,
    span_s: float,
    end_s: float | None,
    window_s: float,
) -> Workload:
    """The latest window of a Prometheus server or of a saved file."""
    from packer.cli.observed import metrics_workload
    from packer.cli.workload_from_metrics import read_metrics

    metrics = read_metrics(
        url, export_path, gateway, names, span_s=min(span_s, window_s), end_s=end_s, window_s=window_s
    )
    return metrics_workload(metrics, metrics.table.rates[-1].tolist(), {}, DEFAULT_RANK)


def with_plan_ranks(plan: Plan, seen: Workload) -> Workload:
    """The measured fleet with the ranks that the plan knows."""
    from dataclasses import replace

    ranks = {adapter.name: adapter.rank for adapter in plan.workload.adapters}
    adapters = (replace(adapter, rank=ranks.get(adapter.name, adapter.rank)) for adapter in seen.adapters)
    return replace(seen, adapters=tuple(adapters))


def judged(plan: Plan, seen: Workload, predictor: str | None, tolerance: float) -> dict[str, Any]:
    """What changed, and whether the running servers stand it; new adapters have no server."""
    from dataclasses import replace

    from packer.solvers.judges import load_judge

    measured = {adapter.name: adapter for adapter in seen.adapters}
    known = set(plan.workload.names)
    now = [
        replace(
            old,
            rate=measured[old.name].rate,
            input_tokens=measured[old.name].input_tokens,
            output_tokens=measured[old.name].output_tokens,
        )
        if old.name in measured
        else replace(old, rate=1e-6)
        for old in plan.workload.adapters
    ]
    fleet = replace(plan.workload, adapters=tuple(now))
    judge = load_judge(
        predictor or plan.predictor, list(dict.fromkeys(b.profile for b in plan.bins)), plan.seed
    )
    evaluations = judge.evaluate(fleet, plan.bins)
    drifted = [
        {"adapter": old.name, "planned": old.rate, "measured": new.rate if new.name in measured else 0.0}
        for old, new in zip(plan.workload.adapters, now, strict=True)
        if abs(new.rate - old.rate) > tolerance * old.rate
    ]
    drifted.sort(key=lambda row: -abs(float(row["measured"]) - float(row["planned"])))  # type: ignore[arg-type]
    broken = [gpu for gpu, ok in enumerate(evaluations.feasible.tolist()) if not ok]
    new = [adapter.name for adapter in seen.adapters if adapter.name not in known]
    return {
        "advice": "replan" if broken else "watch" if drifted or new else "keep",
        "offered_tok_s": {"planned": plan.workload.offered_tok_s, "measured": seen.offered_tok_s},
        "broken_gpus": broken,
        "new_adapters": new,
        "silent_adapters": sorted(known - set(measured)),
        "drifted": drifted,
    }


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
    hint = {
        "keep": "Keep the plan.",
        "watch": "The plan holds; plan again when it suits.",
        "replan": f"Plan again: packer replan PLAN {output or 'WORKLOAD'}.",
    }
    lines.append(hint[found["advice"]])
    return lines
