"""`packer workload from-metrics`."""

from __future__ import annotations

import click

from packer.cli.declare import bundle, command, option
from packer.cli.options import Writing
from packer.cli.traffic import PrometheusOptions, RankOptions, ViewOptions
from packer.cli.workload.observed import ObservedFiles


@bundle
class Span:
    """What is read of the metrics.

    span_s: How far to look back.
    save_path: Also write the server's answers, for --input.
    skip: A model that is no adapter, as the base model; repeatable.
    """

    span_s: float = option(
        "--span", type=click.FloatRange(min=1.0, max=1e9), default=86_400.0, metavar="SECONDS"
    )
    save_path: str | None = option("--save", metavar="FILE.json")
    skip: tuple[str, ...] = option(multiple=True, metavar="MODEL")


@command
def from_metrics(
    metrics: PrometheusOptions,
    span: Span,
    ranks: RankOptions,
    view: ViewOptions,
    files: ObservedFiles,
    out: Writing,
) -> None:
    """Measure a workload from Prometheus: requests and tokens per adapter, as a gateway counts them.

    vLLM's own metrics have no adapter label. With --gateway vllm the total rate and the mean lengths are
    measured and the adapters' shares are estimated from how often each is seen in flight
    (vllm:lora_requests_info) or, where that is gone, in a slot (vllm:lora_adapter_loaded, which has the ranks).

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
    read = metrics.read(
        span_s=span.span_s,
        window_s=view.window_s,
        save_path=span.save_path,
        skip=span.skip,
        by_clock="day" in files.tables or view.by_time_of_day,
    )
    found = observe_metrics(read, known, view.view())
    files.write(found, out, source=f"packer workload from-metrics --gateway {metrics.gateway}")
