"""`packer workload from-access-log`."""

from __future__ import annotations

from packer.cli.declare import argument, bundle, command, flag
from packer.cli.options import Writing
from packer.cli.traffic import LogOptions, RankOptions, ViewOptions
from packer.cli.workload.observed import ObservedFiles


@bundle
class Log:
    """The log.

    replay: Keep every request as it was (needs .json or .yaml).
    """

    log_path: str = argument("LOG.jsonl")
    replay: bool = flag()


@command
def from_access_log(
    log: Log, reading: LogOptions, ranks: RankOptions, view: ViewOptions, files: ObservedFiles, out: Writing
) -> None:
    """Measure a workload from a gateway's access log: JSON lines with time, model and token counts.

    The usual names of LiteLLM, Envoy AI Gateway, nginx and OpenAI-like logs are known; --key names others.
    Lines without a model or tokens (health checks, failures) are left out and counted.

    \b
    Examples:
      packer workload from-access-log access.jsonl --ranks ranks.csv -o fleet.csv
      packer workload from-access-log access.jsonl.gz --rank 16 --window 900 --at p95 --loads day.csv -o fleet.csv
      packer solve fleet.csv --objective headroom:rates=day.csv,factor=1.1
    """
    from packer.operate.observe import observe_log
    from packer.traces.access_log import read_access_log

    out.check(files.output, files.loads_path, files.day_path)
    known = ranks.read()
    read = read_access_log(log.log_path, **reading.options())
    found = observe_log(read, known, view.view(), window_s=view.window_s, replay=log.replay)
    files.write(found, out, source="packer workload from-access-log")
