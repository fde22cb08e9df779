"""`packer workload from-metrics`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import click

from packer.cli.observed import observed_options

if TYPE_CHECKING:
    from packer.traces.prometheus import Metrics, Source

_GATEWAYS = ("litellm", "envoy-ai-gateway", "vllm", "custom")
UNUSED_WITH_INPUT = ("url", "window_s", "span_s", "end_s")
"""Parameters that say what to ask a server: a saved file has its own."""


def metrics_options(command: click.decorators.FC) -> click.decorators.FC:
    """Options that say which counters of which server."""
    for option in reversed(
        (
            click.option(
                "--url", default=None, metavar="URL", help="Prometheus server, as http://prometheus:9090."
            ),
            click.option(
                "--input",
                "export_path",
                default=None,
                metavar="FILE.json",
                help="A file that --save wrote, instead.",
            ),
            click.option(
                "--gateway",
                type=click.Choice(_GATEWAYS),
                default="litellm",
                show_default=True,
                help="Whose counters: vllm's own carry no adapter and give estimates only.",
            ),
            click.option(
                "--requests-metric", default=None, metavar="NAME", help="Counter of requests (custom)."
            ),
            click.option(
                "--input-tokens-metric",
                default=None,
                metavar="NAME",
                help="Counter of input tokens (custom).",
            ),
            click.option(
                "--output-tokens-metric",
                default=None,
                metavar="NAME",
                help="Counter of output tokens (custom).",
            ),
            click.option(
                "--label", default=None, metavar="NAME", help="Label that holds the adapter's name."
            ),
            click.option(
                "--end",
                "end_s",
                type=click.FloatRange(min=0.0, max=1e11),
                default=None,
                metavar="UNIX-TIME",
                help="End of the time to look at.  [default: now]",
            ),
        )
    ):
        command = option(command)
    return command


@click.command(name="from-metrics")
@metrics_options
@click.option(
    "--span",
    "span_s",
    type=click.FloatRange(min=1.0, max=1e9),
    default=86_400.0,
    show_default=True,
    metavar="SECONDS",
    help="How far to look back.",
)
@click.option(
    "--save",
    "save_path",
    default=None,
    metavar="FILE.json",
    help="Also write the server's answers, for --input.",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="MODEL",
    help="A model that is no adapter, as the base model; repeatable.",
)
@observed_options
def from_metrics(
    url: str | None,
    export_path: str | None,
    gateway: str,
    requests_metric: str | None,
    input_tokens_metric: str | None,
    output_tokens_metric: str | None,
    label: str | None,
    span_s: float,
    end_s: float | None,
    save_path: str | None,
    skip: tuple[str, ...],
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
    """Measure a workload from Prometheus: requests and tokens per adapter, as a gateway counts them.

    vLLM's own metrics have no adapter label. With --gateway vllm the total rate and the mean lengths are
    measured and the adapters' shares are estimated from how often each is seen running
    (vllm:lora_requests_info).

    \b
    Examples:
      packer workload from-metrics --url http://prometheus:9090 --ranks ranks.csv -o fleet.csv
      packer workload from-metrics --url http://prometheus:9090 --at p95 --save week.json -o fleet.csv
      packer workload from-metrics --input week.json --by-time-of-day --loads day.csv -o fleet.csv
    """
    from packer.cli.observed import chosen_rates, finish, metrics_workload, read_ranks
    from packer.cli.output import check_output, note
    from packer.cli.workload_from_access_log import note_ranks

    for path in (output, loads_path, save_path):
        check_output(path, force=force)
    if export_path is not None:
        refuse_unused("--input", UNUSED_WITH_INPUT)
    ranks = read_ranks(ranks_path)
    metrics = read_metrics(
        url,
        export_path,
        source_of(gateway, (requests_metric, input_tokens_metric, output_tokens_metric, label)),
        span_s=span_s,
        end_s=end_s,
        window_s=window_s,
        save_path=save_path,
        skip=skip,
    )
    if metrics.estimated:
        note("vLLM's metrics carry no adapter: the shares are estimated from which adapters run", quiet=quiet)
    table = metrics.table.by_time_of_day() if by_time_of_day else metrics.table
    loads = chosen_rates(table, at, percentiles)
    fleet = metrics_workload(metrics, next(iter(loads.values())), ranks, rank)
    note_ranks(len(set(table.names) - set(ranks)), rank, quiet=quiet)
    source = f"packer workload from-metrics --gateway {gateway}"
    finish(fleet, table, loads, output, loads_path, source=source, force=force, as_json=as_json, quiet=quiet)


def refuse_unused(given: str, unused: Collection[str]) -> None:
    """Refuse options that were typed though they do nothing beside another one.

    Parameters
    ----------
    given
        The option that makes them do nothing, as it is typed.
    unused
        Their parameters' names.

    Raises
    ------
    IncompatibleError
        One of them stands on the command line; a default from a file is passed over.
    """
    from click.core import ParameterSource

    from packer.errors import IncompatibleError

    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        if name in unused and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise IncompatibleError(
                f"{option.opts[-1]} does nothing with {given}: expected one of them, got both."
            )


def source_of(gateway: str, names: tuple[str | None, str | None, str | None, str | None]) -> Source:
    """The counters of a gateway, with the names of requests, input tokens, output tokens and label given."""
    from packer.errors import ValidationError
    from packer.traces.prometheus import SOURCES, Source

    requests, inputs, outputs, label = names
    known = SOURCES.get(gateway)
    if known is None:
        if not (requests and inputs and outputs and label):
            raise ValidationError(
                "Expected --requests-metric, --input-tokens-metric, --output-tokens-metric and --label."
            )
        known = Source(requests, inputs, outputs, label)
    return Source(
        requests or known.requests,
        inputs or known.input_tokens,
        outputs or known.output_tokens,
        label or known.label,
        known.running,
    )


def read_metrics(
    url: str | None,
    export_path: str | None,
    source: Source,
    *,
    span_s: float,
    end_s: float | None,
    window_s: float,
    save_path: str | None = None,
    skip: tuple[str, ...] = (),
) -> Metrics:
    """The metrics of a server or of a saved file."""
    import json
    import time

    from packer.errors import ValidationError
    from packer.io.files import write_text
    from packer.traces.prometheus import fetch, parse, read_export

    if (url is None) == (export_path is None):
        raise ValidationError("Expected either --url or --input.")
    if export_path is not None:
        answers = read_export(export_path)
    else:
        assert url is not None
        end = time.time() if end_s is None else end_s
        answers = fetch(url, source, end_s=end, span_s=max(span_s, window_s), window_s=window_s)
    if save_path is not None:
        write_text(save_path, json.dumps(answers))
    return parse(answers, source, path=export_path or url or "", skip=skip)
