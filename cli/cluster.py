"""Simulations and clusters on the command line: options of `simulate`, `compare` and `evaluate`, their tables, and
`packer systems`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

import packer
from packer.cli.declare import argument, bundle, command, option, typed
from packer.cli.options import Output, common
from packer.cli.output import Judged, Part, Table
from packer.cli.plan_table import assumed_lengths
from packer.cli.settings import label_of
from packer.engines import engine_of
from packer.errors import IncompatibleError
from packer.io.shipped import table
from packer.words import counted, listed, number

if TYPE_CHECKING:
    from packer.operate.systems import SystemResult


METRICS = table("packer.cli", "metrics.toml")
"""Metric → name, digits, in tables: "server" rows, "others" (beside them), "paced" (names in place of theirs), all
only if a result has them; "systems" columns."""


@bundle
class Behind:
    """A cluster behind a router, instead of one server.

    cluster: Many servers behind a router: a cluster.toml, or the servers of a plan.
    router: Router, with parameters as in affinity:slack=8. [default: the system's]
    stats_age_s: How old the counts that routers read may be, s; 0: up to date. [default: the system's]
    """

    cluster: str | None = option(metavar="FILE")
    router: str | None = common("router")
    stats_age_s: float | None = option("--stats-age", type=click.FloatRange(min=0.0), metavar="SECONDS")
    slo: tuple[str, ...] = common("slo")

    def goal(self, fleet: packer.Workload, cluster: packer.Cluster | None = None) -> packer.Goal | None:
        """The goal of --slo, else of the fleet or the plan; None means the goal of the cluster."""
        from packer.operate.changes import with_goal

        if cluster is not None and cluster.slo and not self.slo:
            return None
        plan = self._plan()
        return (fleet if plan is None else with_goal(fleet, plan)).held_to(self.slo).slo

    def _plan(self) -> packer.Plan | None:
        """The plan whose servers are the cluster; None for a cluster.toml, or without a cluster."""
        from packer.io.recognise import kind_of

        path = self.cluster or ""
        planned = path.endswith(".json") or (path and kind_of(path) == "plan")
        return packer.load_plan(path) if planned else None

    def read(self, engine: Mapping[str, Any]) -> packer.Cluster:
        """Read the cluster from the file. `engine`: settings that override the profiles of all servers."""
        from packer.twin.override import with_engine

        plan = self._plan()
        cluster = packer.read_cluster(self.cluster or "") if plan is None else plan.cluster()
        kinds = tuple(replace(kind, profile=with_engine(kind.profile, **engine)) for kind in cluster.kinds)
        return replace(cluster, kinds=kinds)

    def check_used(self, names: Sequence[str], cluster: packer.Cluster, engine: Mapping[str, Any], out: Output) -> None:
        """Raise if --stats-age, or a setting in `engine`, has no effect on any of these systems; note if only on some.
        Routers with a compiled score read old counts; engines name what they do not read."""
        from packer import registry
        from packer.twin.cluster.routers.base import ScoringRouter
        from packer.twin.cluster.system import load_system

        given, idle = {**engine, "stats_age_s": self.stats_age_s}, dict[str, list[str]]()
        for system in map(load_system, names):
            own = None if system.engine is None else engine_of(system.engine)
            engines = [own or kind.engine for kind in cluster.kinds]
            router = registry.make("router", self.router or system.router)
            unread = set() if isinstance(router, ScoringRouter) else {"stats_age_s"}
            unread |= frozenset.intersection(*(each.unread for each in engines))
            for each in typed([name for name in unread if given.get(name)]):
                idle.setdefault(each, []).append(system.name)
        for each, where in sorted(idle.items()):
            text = f"{each} has no effect on the {'system' if len(where) == 1 else 'systems'} {listed(where)}"
            if len(where) == len(names):
                raise IncompatibleError(f"{text}{f' with router {self.router}' if self.router else ''}.")
            out.note(text)


def refuse_without(other: str, names: Collection[str]) -> None:
    """Raise if one of these options, which need the option `other`, is on the command line."""
    for given in typed(names):
        raise click.UsageError(f"{given} needs {other}.")


def title_of(first: packer.Run) -> str:
    """Title that names the fleet and the servers of a simulation."""
    fleet = f"{first.workload.name}: {counted(len(first.workload), 'adapter')} on"
    if first.cluster is not None:
        servers = counted(len(first.cluster), "server")
        return f"{fleet} {servers}, system {first.system}, router {first.router}"
    return f"{fleet} one {label_of(first.profile)}, max_loras {first.max_loras}, max_lora_rank {first.max_lora_rank}"


def compared_table(results: Sequence[SystemResult], title: str, *, sizes: bool) -> Table:
    """Table with one row per system, at most 80 columns wide. `sizes`: with the number of servers."""
    rows, shown = [], METRICS["systems"]
    for result in results:
        cells = [number(result.figures[name].mean, digits) for name, (_, digits) in shown.items()]
        routed = result.system if result.router == result.system else f"{result.system}: {result.router}"
        rows.append([routed, *(["–" if result.failed else result.servers] * sizes), *cells])
    columns = ["system: router", *(["servers"] * sizes), *(name for name, _ in shown.values())]
    said = "Means over seeds, the same requests for every system. SLO: share of the requests that keep it; hits:"
    caption = f"{said} admissions with the adapter on the GPU. --json has intervals and more figures."
    return Table(title, columns, rows, left=(0,), caption=caption)


def lines_of(simulations: Sequence[packer.Run], result: dict[str, Any]) -> list[Part]:
    """Metrics and verdict of the simulations as text."""
    from packer.solvers.candidates import ignored_words
    from packer.twin.engine_rules import outage
    from packer.twin.memory.starts import what_starts

    first, n = simulations[0], len(simulations)
    if first.status != "ok":
        ways = what_starts(first.profile, first.settings, first.workload)
        reason = f"memory error: the server does not start: {first.status_reason}."
        return [title_of(first), reason, *([f"What would start: {ways}."] if ways else [])]
    rows, cluster = [], "hit_rate" in result
    shown = METRICS["server"] | METRICS["others"] | (METRICS["paced"] if first.paced else {})
    for metric, (name, digits) in shown.items():
        if metric not in result:
            continue
        cells = [name, number(result[metric], digits)]
        if n > 1:
            row = result["intervals_95"][metric]
            cells += [number(row["low"], digits), number(row["high"], digits)]
        rows.append(cells)
    columns = ["", f"mean of {n} seeds", "95 % from", "to"] if n > 1 else ["", "value"]
    trained = []
    if (tuning := result.get("tuning")) is not None:
        said = f"Training ({tuning['policy']}): {tuning['samples_s']:.2f} samples/s, {tuning['tok_s']:,.0f} tok/s;"
        trained.append(f"{said} beside {tuning['beside_share']:.0%} of the engine's steps.")
    found = f"{first.kv_cache_tokens:,} KV tokens."
    if first.closed_loop:
        found += f" Closed loop: always {counted(first.concurrency or 0, 'request')} outstanding."
    if advice := (result["verdict"]["cause"] or {}).get("advice"):
        found += f" What would help: {advice}."
    ends = {outage(each.profile.engine, each.max_loras, each.workload.n_loras) for each in first.servers}
    return [
        title_of(first),
        Table(None, columns, rows),
        found,
        *_risk_lines(result),
        *trained,
        *([f"Lengths {assumed_lengths(first.workload)}."] if first.workload.assumed_lengths else []),
        *(f"{words}." for words in ignored_words(first.workload, [each.profile for each in first.servers])),
        *([] if cluster else _thrashing(first)),
        *(f"Outage: {each}." for each in sorted(ends) if each),
        Judged(result["verdict"]["text"], result["verdict"]["holds"]),
    ]


def _risk_lines(result: dict[str, Any]) -> list[str]:
    """Text of the result of `packer.cli.simulate._risk`."""
    if "failure" not in result:
        return []
    failure, cliff = result["failure"], result["cliff"]
    lines = [
        f"Starves or queues without end with a probability of {failure['probability']:.0%} "
        f"(95 % from {failure['low']:.0%} to {failure['high']:.0%}, {failure['runs']} runs)."
    ]
    if cliff is None:
        return lines
    if cliff["at_least"]:
        return [*lines, f"No run failed up to {cliff['load_factor']:g} times the load."]
    return [
        *lines,
        f"That probability reaches {cliff['probability']:.0%} at {cliff['load_factor']:.2f} times the load "
        f"(95 % from {cliff['low']:.2f} to {cliff['high']:.2f}).",
    ]


def _thrashing(sim: packer.Run) -> list[str]:
    from packer.twin.limits import relief, thrashes

    if not thrashes(sim):
        return []
    found = relief(sim)
    remedy = "more slots do not fit or do not help"
    if found is not None:
        remedy = f"max_loras {found.max_loras} would need {found.loads_per_request:.1f}"
    return [f"Slots thrash: {sim.loads_per_request:.1f} loads per request; {remedy}."]


@bundle
class Chosen:
    """The system to show."""

    name: str | None = argument("[NAME]", required=False, default=None)


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
