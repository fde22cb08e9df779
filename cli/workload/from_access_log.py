"""`packer workload from-access-log`."""

from __future__ import annotations

from packer.cli.declare import argument, bundle, command, option
from packer.cli.options import Writing
from packer.cli.traffic import RankOptions, ViewOptions
from packer.cli.workload.observed import Files


@bundle
class Log:
    """The log and how it is read."""

    log_path: str = argument("LOG.jsonl")
    keys: tuple[str, ...] = option(
        "--key",
        multiple=True,
        metavar="FIELD=NAME",
        help="Where a field stands, if not under a usual name: time=…, model=…, input=…, output=…; dots go "
        "into nested objects; repeatable.",
    )
    skip: tuple[str, ...] = option(
        multiple=True, metavar="MODEL", help="A model that is no adapter, as the base model; repeatable."
    )
    strip_prefix: str = option(
        default="",
        show_default=False,
        metavar="TEXT",
        help="What stands before adapters' names, as hosted_vllm/.",
    )


@command
def from_access_log(log: Log, ranks: RankOptions, view: ViewOptions, files: Files, out: Writing) -> None:
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

    out.check(files.output, files.loads_path)
    known = ranks.read()
    read = read_access_log(
        log.log_path, keys=parse_keys(log.keys), skip=log.skip, strip_prefix=log.strip_prefix
    )
    found = observe_log(read, known, view.view(), window_s=view.window_s)
    files.write(found, out, source="packer workload from-access-log")


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
