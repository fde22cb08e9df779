"""The figures of simulations for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from packer.cli.cluster import title_of
from packer.cli.output import Judged, Part, Table
from packer.cli.plan_table import assumed_lengths
from packer.io.shipped import table
from packer.words import number

if TYPE_CHECKING:
    from packer.twin.run import Run

METRICS = table("packer.cli", "metrics.toml")
"""Rows of the table of a server, and further rows where a result has them: metric → its name, digits."""


def lines_of(simulations: Sequence[Run], result: dict[str, Any]) -> list[Part]:
    """The metrics for people."""
    from packer.twin.arrivals import cut_words
    from packer.twin.memory.starts import what_starts

    first, n = simulations[0], len(simulations)
    if first.status != "ok":
        reason = f"memory error: the server does not start: {first.status_reason}."
        return [title_of(first), reason, f"What would start: {what_starts(first.profile, first.settings)}."]
    several = n > 1
    rows = []
    cluster = "hit_rate" in result
    for metric, (name, digits) in (METRICS["server"] | METRICS["others"]).items():
        if metric not in result:
            continue
        cells = [name, number(result[metric], digits)]
        if several:
            row = result["intervals_95"][metric]
            cells += [number(row["low"], digits), number(row["high"], digits)]
        rows.append(cells)
    columns = ["", f"mean of {n} seeds", "95 % from", "to"] if several else ["", "value"]
    found = f"{first.kv_cache_tokens:,} KV tokens."
    if first.closed_loop:
        found += f" Closed loop: {first.concurrency} requests are always outstanding."
    if advice := (result["verdict"]["cause"] or {}).get("advice"):
        found += f" What would help: {advice}."
    return [
        title_of(first),
        Table(None, columns, rows),
        found,
        *_risk_lines(result),
        *([_trained(result["tuning"])] if "tuning" in result else []),
        *([f"Lengths {assumed_lengths()}."] if first.workload.assumed_lengths else []),
        *([] if cluster else [f"{words}." for words in cut_words(first.workload, [first.profile])]),
        *([] if cluster else _thrashing(first)),
        Judged(result["verdict"]["text"], result["verdict"]["holds"]),
    ]


def _trained(tuning: dict[str, Any]) -> str:
    return (
        f"Training ({tuning['policy']}): {tuning['samples_s']:.2f} samples/s, {tuning['tok_s']:,.0f} tok/s; "
        f"beside {tuning['beside_share']:.0%} of the engine's steps."
    )


def _risk_lines(result: dict[str, Any]) -> list[str]:
    """What `_risk` found, for people."""
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


def _thrashing(sim: Run) -> list[str]:
    from packer.twin.limits import relief, thrashes

    if not thrashes(sim):
        return []
    found = relief(sim)
    remedy = "more slots do not fit or do not help"
    if found is not None:
        remedy = f"max_loras {found.max_loras} would need {found.loads_per_request:.1f}"
    return [f"Slots thrash: {sim.loads_per_request:.1f} loads per request; {remedy}."]
