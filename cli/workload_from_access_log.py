"""`packer workload from-access-log`."""

from __future__ import annotations

import click

from packer.cli.observed import observed_options


@click.command(name="from-access-log")
@click.argument("log_path", metavar="LOG.jsonl")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="FIELD=NAME",
    help="Where a field stands, if not under a usual name: time=…, model=…, input=…, output=…; dots go into "
    "nested objects; repeatable.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="MODEL",
    help="A model that is no adapter, as the base model; repeatable.",
)
@click.option(
    "--strip-prefix", default="", metavar="TEXT", help="What stands before adapters' names, as hosted_vllm/."
)
@observed_options
def from_access_log(
    log_path: str,
    keys: tuple[str, ...],
    skip: tuple[str, ...],
    strip_prefix: str,
    ranks_path: str | None,
    rank: int,
    window_s: float,
    at: str,
    percentiles: tuple[float, ...],
    by_time_of_day: bool,
    loads_path: str | None,
    output: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure a workload from a gateway's access log: JSON lines with time, model and token counts.

    The usual names of LiteLLM, Envoy AI Gateway, nginx and OpenAI-like logs are known; --key names others.
    Lines without a model or tokens (health checks, failures) are left out and counted.

    \b
    Examples:
      packer workload from-access-log access.jsonl --ranks ranks.csv -o fleet.csv
      packer workload from-access-log access.jsonl.gz --window 900 --at p95 --loads day.csv -o fleet.csv
      packer solve fleet.csv --objective headroom:rates=day.csv,factor=1.1
    """
    from dataclasses import replace

    from packer.cli.observed import chosen_rates, finish, read_ranks
    from packer.cli.output import check_output, note
    from packer.traces.access_log import read_access_log
    from packer.traces.measure import measure_workload
    from packer.traces.pattern import rates_of

    for path in (output, loads_path):
        check_output(path, force=force)
    ranks = read_ranks(ranks_path)
    log = read_access_log(log_path, keys=parse_keys(keys), skip=skip, strip_prefix=strip_prefix)
    trace = replace(log.trace, ranks=tuple(ranks.get(name, rank) for name in log.trace.names))
    fleet = measure_workload(trace)
    table = rates_of(trace, window_s, start_s=log.start_s)
    if by_time_of_day:
        table = table.by_time_of_day()
    loads = chosen_rates(table, at, percentiles)
    if at != "mean":
        rates = next(iter(loads.values()))
        adapters = [replace(a, rate=new) for a, new in zip(fleet.adapters, rates, strict=True) if new > 0]
        fleet = replace(fleet, adapters=tuple(adapters))
    if trace.dropped or log.other:
        note(f"left out {trace.dropped} requests without tokens and {log.other} other lines", quiet=quiet)
    note_ranks(len(set(trace.names) - set(ranks)), rank, quiet=quiet)
    source = "packer workload from-access-log"
    finish(fleet, table, loads, output, loads_path, source=source, force=force, as_json=as_json, quiet=quiet)


def note_ranks(missing: int, rank: int, *, quiet: bool) -> None:
    """Say how many ranks were assumed."""
    from packer.cli.output import note

    if missing:
        note(
            f"assumed rank {rank} for {missing} adapters; --ranks FILE.csv gives the right ones", quiet=quiet
        )


def parse_keys(pairs: tuple[str, ...]) -> dict[str, str]:
    """FIELD=NAME pairs as a mapping."""
    from packer.errors import ValidationError
    from packer.traces.access_log import KEYS

    found = {}
    for pair in pairs:
        name, separator, key = pair.partition("=")
        if not separator or name not in KEYS or not key:
            raise ValidationError(f"Expected --key {'|'.join(KEYS)}=NAME, got {pair[:80]!r}.")
        found[name] = key
    return found
