"""`packer workload from-trace`."""

from __future__ import annotations

import click

from packer.cli.options import (
    NumberList,
    force_option,
    json_option,
    output_option,
    quiet_option,
    rate_factor_option,
    seed_option,
)

UNRECORDED = ("notes", "output", "force", "as_json", "quiet")
"""Options that don't change what the file says."""


@click.command(name="from-trace")
@click.argument("trace_path", metavar="TRACE")
@click.option(
    "--adapters",
    "n_adapters",
    type=click.IntRange(1, 1_000_000),
    default=None,
    help="Give the requests to this many adapters.  [default: the trace's own, else 200]",
)
@click.option(
    "--ranks",
    type=NumberList(int),
    default=None,
    metavar="R,R,…",
    help="LoRA ranks, drawn uniformly.  [default: the trace's own, else 8,16,32]",
)
@click.option(
    "--exponent",
    type=click.FloatRange(0.0, 20.0),
    default=1.2,
    show_default=True,
    help="Of the power law: the k-th adapter gets a share proportional to k^-EXPONENT.",
)
@rate_factor_option
@click.option(
    "--poisson", is_flag=True, help="Poisson arrivals, however bursty the trace is.  [default: as measured]"
)
@click.option("--replay", is_flag=True, help="Keep every request as it was (needs .json or .yaml).")
@click.option(
    "--note",
    "notes",
    multiple=True,
    metavar="TEXT",
    help="A line for the top of a .csv or .yaml file, such as the trace's source; repeatable.",
)
@seed_option
@output_option("Where to write the workload: .csv, .json, .yaml or .parquet.", required=True)
@force_option
@json_option
@quiet_option
def from_trace(
    trace_path: str,
    n_adapters: int | None,
    ranks: tuple[int, ...] | None,
    exponent: float,
    rate_factor: float,
    poisson: bool,
    replay: bool,
    notes: tuple[str, ...],
    seed: int,
    output: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure a workload from a trace of requests: rates, bursts, lengths, their spread and correlation.

    TRACE is CSV, JSONL or Parquet (also .gz) with the columns timestamp, input_tokens, output_tokens and
    perhaps adapter and rank, or those of the Azure, Mooncake or BurstGPT traces. Where it names no adapters,
    requests are given to them at random by a power law of popularity.

    \b
    Example:
      packer workload from-trace trace.csv.gz --adapters 200 --ranks 8,16,32 -o fleet.csv
    """
    from packer.arrival import Arrivals
    from packer.cli.output import check_output, note, print_json
    from packer.cli.workload_describe import headline, summarise
    from packer.io.workloads import write_workload
    from packer.traces.assign import assign_adapters, assign_ranks
    from packer.traces.measure import measure_workload, rounded
    from packer.traces.read import read_trace

    check_output(output, force=force)
    trace = read_trace(trace_path)
    if trace.adapter is None or n_adapters is not None:
        chosen = ranks or (8, 16, 32)
        trace = assign_adapters(trace, n_adapters or 200, ranks=chosen, exponent=exponent, seed=seed)
    elif trace.ranks is None or ranks is not None:
        trace = assign_ranks(trace, ranks=ranks or (8, 16, 32), seed=seed)
    fleet = measure_workload(trace, replay=replay)
    if rate_factor != 1.0:
        fleet = fleet.scaled(rate_factor)
    if poisson and not replay:
        fleet = fleet.with_arrivals(Arrivals())
    if not replay:
        fleet = rounded(fleet)
    write_workload(fleet, output, force=force, comments=[*notes, _command(trace_path, output)])
    if trace.dropped and not as_json:
        note(f"{trace.dropped} requests without tokens left out", quiet=quiet)
    if as_json:
        print_json({**summarise(fleet), "output": output, "requests": len(trace), "dropped": trace.dropped})
    else:
        note(f"{output}: {headline(fleet)}; arrivals {fleet.arrivals.description}", quiet=quiet)


def _command(trace_path: str, output: str) -> str:
    """The command that makes the file, with every option that was given (here or in packer.toml)."""
    from pathlib import Path

    from click.core import ParameterSource

    words = ["packer workload from-trace", Path(trace_path).name]
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        unasked = context.get_parameter_source(name) is ParameterSource.DEFAULT
        if unasked or not isinstance(option, click.Option) or name in UNRECORDED:
            continue
        value = context.params[name]
        text = ",".join(f"{item:g}" for item in value) if isinstance(value, tuple) else str(value)
        words.append(option.opts[-1] if option.is_flag else f"{option.opts[-1]} {text}")
    return " ".join([*words, "-o", Path(output).name])
