"""`packer workload from-trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.declare import argument, bundle, command, flag, option
from packer.cli.options import Writing, common
from packer.cli.traffic import RankOptions

if TYPE_CHECKING:
    from packer.traces.ranks import Ranks
    from packer.traces.trace import Trace

UNRECORDED = ("notes", "output", "force", "as_json", "quiet")
"""Options that don't change what the file says."""
DEFAULT_ADAPTERS = 200


@bundle
class TraceArgument:
    """The trace."""

    trace_path: str = argument("TRACE")
    adapters: int | None = option(
        type=click.IntRange(1, 1_000_000),
        help=f"Give the requests to this many adapters.  [default: the trace's own, else {DEFAULT_ADAPTERS}]",
    )


@bundle
class TraceOptions:
    """What is made of the trace.

    exponent: Of the power law: the k-th adapter gets a share proportional to k^-EXPONENT.
    replay: Keep every request as it was (needs .json or .yaml).
    poisson: Poisson arrivals, however bursty the trace is. [default: as measured]
    notes: A line for the top of a .csv or .yaml file, such as the trace's source; repeatable.
    output: Where to write the workload: .csv, .json, .yaml or .parquet.
    """

    exponent: float = option(type=click.FloatRange(0.0, 20.0), default=1.2)
    rate_factor: float = common("rate-factor")
    replay: bool = flag()
    poisson: bool = flag()
    notes: tuple[str, ...] = option("--note", multiple=True, metavar="TEXT")
    seed: int = common("seed")
    output: str = common("output", required=True)


@command
def from_trace(source: TraceArgument, ranks: RankOptions, given: TraceOptions, out: Writing) -> None:
    """Measure a workload from a trace of requests: rates, bursts, lengths, their spread and correlation.

    TRACE is CSV, JSONL or Parquet (also .gz) with the columns timestamp, input_tokens, output_tokens and
    perhaps adapter and rank, or those of the Azure, Mooncake or BurstGPT traces. Where it names no adapters,
    requests are given to them at random by a power law of popularity. Where it has no ranks, --ranks or
    --rank gives them.

    \b
    Example:
      packer workload from-trace trace.csv.gz --adapters 200 --ranks 8,16,32 -o fleet.csv
    """
    from packer.arrival import Arrivals
    from packer.cli.workload.describe import headline
    from packer.io.workloads import write_workload
    from packer.operate.observe import stepped
    from packer.operate.summary import summary_of
    from packer.traces.measure import measure_workload, rounded
    from packer.traces.read import read_trace

    out.check(given.output)
    trace = _with_adapters(read_trace(source.trace_path), source.adapters, ranks.read(), given, out)
    fleet = measure_workload(trace, replay=given.replay)
    if given.poisson and not given.replay:
        fleet = fleet.with_arrivals(Arrivals())
    if given.rate_factor != 1.0:
        fleet = fleet.scaled(given.rate_factor)
    if not given.replay:
        fleet = rounded(fleet)
    comments = [*given.notes, _command(source.trace_path, given.output)]
    write_workload(fleet, given.output, force=out.force, comments=comments)
    counts = {"output": given.output, "requests": len(trace), "dropped": trace.dropped}
    out.result(lambda: {**summary_of(fleet), **counts}, list)
    if trace.dropped:
        out.note(f"{trace.dropped} requests without tokens left out")
    if trace.step_s:
        out.note(stepped(trace.step_s))
    out.note(f"{given.output}: {headline(fleet)}; arrivals {fleet.arrivals.description}")


def _with_adapters(
    trace: Trace, adapters: int | None, known: Ranks, given: TraceOptions, out: Writing
) -> Trace:
    """The trace with adapters and ranks: its own, or those of the options."""
    from dataclasses import replace

    from packer.traces.assign import assign_adapters

    if trace.adapter is not None and adapters is None:
        own = trace.ranks is not None and not (known.table or known.others)
        return trace if own else replace(trace, ranks=known.of(trace.names, seed=given.seed))
    count = adapters or DEFAULT_ADAPTERS
    if adapters is None:
        out.note(
            f"the trace names no adapters: its requests go to {count}, by a power law of exponent "
            f"{given.exponent:g}; --adapters and --exponent change that"
        )
    drawn = known.others if known.others and not known.table else None
    trace = assign_adapters(trace, count, ranks=drawn, exponent=given.exponent, seed=given.seed)
    return trace if drawn else replace(trace, ranks=known.of(trace.names, seed=given.seed))


def _command(trace_path: str, output: str) -> str:
    """The command that makes the file, with every option that was given (here or in packer.toml)."""
    from pathlib import Path

    from click.core import ParameterSource

    words = ["packer workload from-trace", Path(trace_path).name]
    context = click.get_current_context()
    for each in context.command.params:
        name = each.name or ""
        default = context.get_parameter_source(name) is ParameterSource.DEFAULT
        if default or not isinstance(each, click.Option) or name in UNRECORDED:
            continue
        value = context.params[name]
        text = ",".join(f"{item:g}" for item in value) if isinstance(value, tuple) else str(value)
        words.append(each.opts[-1] if each.is_flag else f"{each.opts[-1]} {text}")
    return " ".join([*words, "-o", Path(output).name])
