"""`packer systems`: how a cluster can be run."""

from __future__ import annotations

from dataclasses import asdict

from packer.cli.declare import argument, bundle, command
from packer.cli.options import Output
from packer.cli.output import Table


@bundle
class Chosen:
    """Which one."""

    name: str | None = argument("NAME", required=False, default=None)


@command
def systems(chosen: Chosen, out: Output) -> None:
    """Systems that a cluster can be run as: router, and where the description comes from.

    \b
    Examples:
      packer systems
      packer simulate fleet.csv --cluster cluster.toml --system vllm --router affinity
    """

    from packer.twin.cluster.system import load_system, system_names

    found = [load_system(name) for name in ([chosen.name] if chosen.name else system_names())]
    rows = [[each.name, each.router, each.summary, each.source] for each in found]
    columns = ["system", "router", "what it is", "source"]
    out.result([asdict(each) for each in found], lambda: [Table(None, columns, rows, left=range(4))])
