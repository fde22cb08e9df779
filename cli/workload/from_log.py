"""`packer workload from-log`."""

from __future__ import annotations

from typing import Any

import click

from packer.cli.declare import Pairs, argument, bundle, command, flag
from packer.cli.options import Writing, common
from packer.cli.traffic import LogOptions, RankOptions, ViewOptions
from packer.cli.workload.observed import ObservedFiles

UNRECORDED = ("output", "tables", "force", "as_json", "quiet")
"""Options that don't change what the file says."""


@bundle
class LogArgument:
    """The log."""

    log_path: str = argument("LOG")


@bundle
class FromLogOptions:
    """What is made of it.

    replay: Keep every request as it was (needs .json or .yaml).
    """

    replay: bool = flag()
    rate_factor: float = common("rate-factor")
    seed: int = common("seed")


@command
def from_log(
    log: LogArgument,
    reading: LogOptions,
    ranks: RankOptions,
    given: FromLogOptions,
    view: ViewOptions,
    files: ObservedFiles,
    out: Writing,
) -> None:
    """Measure a workload from a log of requests: rates of its busiest hour, bursts, lengths.

    LOG is an access log of a gateway (the names of LiteLLM, Envoy AI Gateway, nginx and OpenAI-like logs are known;
    --key names others) or a trace (packer's columns, or those of Azure, Mooncake, BurstGPT), as JSON lines, CSV or
    Parquet, also .gz. Lines without a model or tokens (health checks, failures) are left out and counted. Where the
    log names no adapters, requests are given to them at random by a power law of popularity.

    \b
    Examples:
      packer workload from-log access.jsonl --ranks ranks.csv -o fleet.csv
      packer workload from-log access.jsonl.gz --rank 16 --window 900 --at p95 --loads day.csv -o fleet.csv
      packer workload from-log trace.csv.gz --adapters 200 --ranks 8,16,32 -o fleet.csv
    """
    from packer.cli.traffic import refuse_unused
    from packer.operate.observe import observe_log
    from packer.operate.summary import summary_of
    from packer.traces.read import read_trace

    out.check(files.output, *files.tables.values())
    if given.replay:
        refuse_unused("--replay", ("at",))
    known = ranks.read()
    read = read_trace(log.log_path, reading.fields())
    how: dict[str, Any] = {
        "rate_factor": given.rate_factor,
        "replay": given.replay,
        "window_s": view.window_s,
    }
    found = observe_log(read, known, view.view(), named=reading.named(given.seed), **how)
    facts = {**summary_of(found.fleet), "requests": len(read), "dropped": read.dropped, "other": read.other}
    files.write(found, out, source=_command(log.log_path, files.output), facts=facts)


def _command(log_path: str, output: str) -> str:
    """The command that makes the file, with every option that was given (here or in packer.toml)."""
    from pathlib import Path

    from click.core import ParameterSource

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
