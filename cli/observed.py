"""`packer workload from-log` and `from-metrics`: fleets measured from traffic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from packer.cli.declare import Pairs, argument, bundle, command, flag, option, pairs, values
from packer.cli.options import Writing, common
from packer.cli.output import Table
from packer.cli.traffic import LogOptions, PrometheusOptions, RankOptions, ViewOptions, refuse_unused
from packer.cli.workload import headline
from packer.io.files import write_text

if TYPE_CHECKING:
    from packer.operate.view import Observed


@bundle
class ObservedFiles:
    """What is written.

    tables: Also write rates, .csv: loads (for --objective headroom:rates=FILE.csv), day (of the mean day, UTC, for
        packer schedule --rates FILE.csv). --day FILE.csv is the same; repeatable.
    output: Where to write the workload: .csv, .json, .yaml or .parquet.
    """

    tables: dict[str, str] = pairs("--table", names={"loads": str, "day": str}, metavar="NAME=FILE")
    output: str = common("output", required=True)

    def write(self, found: Observed, out: Writing, *, source: str, facts: Mapping[str, Any] | None = None) -> None:
        """Write the workload and the loads, and print a summary. `facts`: further entries of the JSON output."""
        from packer.io.workloads import write_workload
        from packer.traces.measure import rounded
        from packer.traces.pattern import loads_text

        fleet = found.fleet if found.fleet.arrivals.trace is not None else rounded(found.fleet)
        rates = found.table
        written = {"loads": found.loads, "day": rates.day() if "day" in self.tables else {}}
        write_workload(fleet, self.output, force=out.force, comments=[source])
        for each in (f"traffic of {found.span}; rates: {found.planned_for}", *found.notes):
            out.note(each)
        for name, path in self.tables.items():
            write_text(path, loads_text(rates.names, written[name]), force=out.force)
            out.note(f"wrote {path}")
        totals = {
            name: {"requests_s": float(vector.sum()), "offered_tok_s": float(vector @ rates.tokens)}
            for name, vector in found.loads.items()
        }
        counts = {"adapters": len(found.fleet), **(facts or {}), "windows": len(rates.rates)}
        cells = ((name, row["requests_s"], row["offered_tok_s"]) for name, row in totals.items())
        rows = [(name, f"{requests_s:,.3f}", f"{tok_s:,.0f}") for name, requests_s, tok_s in cells]
        title = f"Loads over {len(rates.rates):,} windows of {rates.window_s:g} s"
        out.result(
            {"output": self.output, **counts, "loads": totals},
            lambda: [Table(title, ("load", "requests/s", "tok/s"), rows)] if len(rates.rates) > 1 else [],
        )
        fleet = found.fleet
        out.note(f"{self.output}: {headline(fleet)}; arrivals {fleet.arrivals.description}")


UNRECORDED = ("output", "tables", "force", "as_json", "quiet")  # Options without effect on the workload file's content.


@bundle
class Log:
    """The log, and how it becomes a workload.

    replay: Keep every request as it was (needs .json or .yaml).
    """

    log_path: str = argument("LOG")
    replay: bool = flag()
    rate_factor: float = common("rate-factor")
    seed: int = common("seed")


@command
def from_log(
    reading: LogOptions, ranks: RankOptions, log: Log, view: ViewOptions, files: ObservedFiles, out: Writing
) -> None:
    """Measure a workload from a log of requests: rates of its busiest hour, bursts, lengths.

    LOG is an access log of a gateway (such as LiteLLM, Envoy AI Gateway or nginx; --key names other fields) or a trace
    (packer's columns, or those of Azure, Mooncake, BurstGPT), as JSON lines, CSV or Parquet, also .gz. Lines without a
    model or tokens are left out and counted. Where the log names no adapters, requests are given to them at random by a
    power law.

    \b
    Examples:
      packer workload from-log access.jsonl --ranks ranks.csv -o fleet.csv
      packer workload from-log access.jsonl.gz --rank 16 --window 900 --at p95 --loads day.csv -o fleet.csv
      packer workload from-log trace.csv.gz --adapters 200 --ranks 8,16,32 -o fleet.csv
    """
    from packer.operate.observe import observe_log
    from packer.operate.summary import summary_of
    from packer.traces.read import read_trace

    out.check(files.output, *files.tables.values())
    if log.replay:
        refuse_unused("--replay", ("at",))
    known = ranks.read()
    with out.progress(f"reading {log.log_path}"):
        read = read_trace(log.log_path, reading.fields())
    how = {**values(log, "log_path", "seed"), "window_s": view.window_s}
    seen = replace(view.view(), at="mean") if log.replay else view.view()
    found = observe_log(read, known, seen, named=reading.named(log.seed), **how)
    facts = {**summary_of(found.fleet), "requests": len(read), "dropped": read.dropped, "other": read.other}
    files.write(found, out, source=_command(log.log_path, files.output), facts=facts)


def _command(log_path: str, output: str) -> str:
    """The command that makes the file, with every option that was given (here or in packer.toml)."""
    words = ["packer workload from-log", Path(log_path).name]
    context = click.get_current_context()
    for each in context.command.params:
        name = each.name or ""
        default = context.get_parameter_source(name) is ParameterSource.DEFAULT
        if default or not isinstance(each, click.Option) or name in UNRECORDED:
            continue
        value = context.params[name]
        if isinstance(each, Pairs):
            words += [f"--{key.replace('_', '-')} {given}" for key, given in value.items()]
            continue
        for item in value if each.multiple else (value,):
            text = ",".join(f"{number:g}" for number in item) if isinstance(item, tuple) else str(item)
            words.append(each.opts[-1] if each.is_flag else f"{each.opts[-1]} {text}")
    return " ".join([*words, "-o", Path(output).name])


SPAN = click.FloatRange(min=1.0, max=1e9)


@bundle
class Span:
    """Which metrics are read.

    span_s: How far to look back.
    save_path: Also write the server's answers, for --input.
    skip: A model that is no adapter, as the base model; repeatable.
    """

    span_s: float = option("--span", type=SPAN, default=86_400.0, metavar="SECONDS")
    save_path: str | None = option("--save", metavar="FILE.json")
    skip: tuple[str, ...] = option(multiple=True, metavar="MODEL")


@command
def from_metrics(
    metrics: PrometheusOptions, span: Span, ranks: RankOptions, view: ViewOptions, files: ObservedFiles, out: Writing
) -> None:
    """Measure a workload from Prometheus: requests and tokens per adapter, as a gateway counts them.

    vLLM's own metrics have no adapter label. With --gateway vllm the adapters' shares are estimated from how often each
    is seen in flight (vllm:lora_requests_info) or, where that is gone, in a slot (vllm:lora_adapter_loaded, which has
    the ranks).

    \b
    Examples:
      packer workload from-metrics --url http://prometheus:9090 --ranks ranks.csv -o fleet.csv
      packer workload from-metrics --url http://prometheus:9090 --rank 16 --at p95 --save week.json -o fleet.csv
      packer workload from-metrics --input week.json --rank 16 --by-time-of-day --loads loads.csv -o fleet.csv
      packer workload from-metrics --url http://prometheus:9090 --span 604800 --rank 16 --day day.csv -o fleet.csv
    """
    from packer.operate.observe import observe_metrics

    out.check(files.output, *files.tables.values(), span.save_path)
    metrics.check()
    known = ranks.read()
    by_clock = "day" in files.tables or view.by_time_of_day
    read = metrics.read(**values(span), window_s=view.window_s, by_clock=by_clock)
    found = observe_metrics(read, known, view.view())
    files.write(found, out, source=f"packer workload from-metrics --gateway {metrics.gateway}")
