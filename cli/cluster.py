"""Clusters on the command line: options of `simulate`, `compare` and `evaluate`, and what they print."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click

from packer.cli.declare import bundle, option, typed
from packer.cli.options import common, complete_registered, label_of
from packer.cli.output import Table
from packer.words import counted, number

if TYPE_CHECKING:
    from packer.cluster import Cluster
    from packer.goal import Goal
    from packer.operate.systems import SystemResult
    from packer.twin.run import Run
    from packer.workload import Workload


@bundle
class Behind:
    """A cluster behind a router, instead of one server.

    cluster: Many servers behind a router: a cluster.toml, or the servers of a plan (.json).
    router: Router, with parameters as in affinity:slack=8. [default: the system's]
    stats_age_s: How old the counts that routers read may be, s; 0: up to date. [default: the system's]
    """

    cluster: str | None = option(metavar="FILE")
    router: str | None = option(metavar="NAME", shell_complete=complete_registered("router"))
    stats_age_s: float | None = option("--stats-age", type=click.FloatRange(min=0.0), metavar="SECONDS")
    slo: tuple[str, ...] = common("slo")

    def goal(self, fleet: Workload) -> Goal | None:
        """The goal that was given; None: the cluster's, or the fleet's."""
        return fleet.held_to(self.slo).slo if self.slo else None

    def read(self) -> Cluster:
        """The cluster in the file."""
        from packer.io.clusters import read_cluster
        from packer.io.plans import load_plan

        path = self.cluster or ""
        return load_plan(path).cluster() if path.endswith(".json") else read_cluster(path)


def refuse_without_cluster(names: Collection[str]) -> None:
    """Raise if one of these options of a cluster is on the command line."""
    for given in typed(names):
        raise click.UsageError(f"{given} needs --cluster.")


def title_of(first: Run) -> str:
    """What was simulated."""
    fleet = f"{first.workload.name}: {counted(len(first.workload), 'adapter')} on"
    if first.cluster is not None:
        return (
            f"{fleet} {counted(len(first.cluster), 'server')}, system {first.system}, router {first.router}"
        )
    slots = f"max_loras {first.max_loras}, max_lora_rank {first.max_lora_rank}"
    return f"{fleet} one {label_of(first.profile)}, {slots}"


def compared_table(results: Sequence[SystemResult], title: str, *, sizes: bool) -> Table:
    """One row per system, within 80 columns; its number of servers too where `sizes`."""
    shown = (
        ("slo_attainment", "SLO", 3),
        ("total_token_throughput", "tok/s", 0),
        ("mean_ttft_ms", "TTFT ms", 0),
        ("p99_ttft_ms", "p99 ms", 0),
        ("mean_tpot_ms", "TPOT ms", 1),
        ("hit_rate", "hits", 2),
    )
    rows = []
    for result in results:
        cells = [number(result.figures[name].mean, digits) for name, _, digits in shown]
        routed = result.system if result.router == result.system else f"{result.system}: {result.router}"
        rows.append([routed, *([result.servers] if sizes else []), *cells])
    columns = ["system: router", *(["servers"] if sizes else []), *(name for _, name, _ in shown)]
    caption = (
        "Means over seeds, the same requests for every system. SLO: share of the requests that keep it; "
        "hits: admissions with the adapter on the GPU. --json has intervals and more figures."
    )
    return Table(title, columns, rows, left=(0,), caption=caption)
