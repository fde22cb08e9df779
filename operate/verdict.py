"""Which system is best on a cluster, within noise, by how much and why, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from packer.arrays import FloatArray
from packer.cluster import Cluster
from packer.twin.uncertainty import interval
from packer.words import counted, listed
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.operate.systems import SystemResult

SAME = 0.001  # Shares of requests that differ by no more than this are equal to a user.
CLEAR = 0.01  # Shares of requests are not called equal if the interval of their difference reaches beyond this.
SERVED = 0.9  # A system that serves less than this share of the tokens due is overloaded, as a server starves.
MORE = 1.02  # A system serves more than another if it serves more than this many times its tokens.


def verdict(workload: Workload, cluster: Cluster, results: Sequence[SystemResult]) -> str:
    """The sentences; empty for a single system.

    The best system keeps the SLO for the most requests. A system is as good if the 95 % interval of its difference from
    the best, seed by seed, holds 0, or the difference is at most 0.001, unless the interval is so wide that it may be
    worse. Of systems that are as good, the one with the lowest TPOT is named. Without an SLO, the TPOT alone counts.
    Systems without token times, as those that serve whole jobs, are left out and named, as are those whose servers do
    not start.
    """
    known = [each for each in results if each.figures["mean_tpot_ms"].mean is not None]
    others = [each.system for each in results if each not in known and not each.failed]
    said = _judged(workload, cluster, known) if len(known) > 1 else ""
    apart = f"Without token times, and so not compared: {listed(others)}." if others and known else ""
    return " ".join(filter(None, [said, apart, not_started(results)]))


def not_started(results: Sequence[SystemResult]) -> str:
    """The systems whose servers do not start, with the reasons, in sentences; empty if there are none."""
    reasons = dict.fromkeys(each.failed for each in results if each.failed)
    names = {why: listed([each.system for each in results if each.failed == why]) for why in reasons}
    return " ".join(f"The servers of {names[why]} do not start: {why}." for why in reasons)


def _judged(workload: Workload, cluster: Cluster, known: Sequence[SystemResult]) -> str:
    """The sentences on at least two systems with token times."""
    judged = all(each.figures["slo_attainment"].mean is not None for each in known)
    name = "slo_attainment" if judged else "mean_tpot_ms"
    order = sorted(known, key=lambda each: (each.figures[name].mean or 0.0) * (-1.0 if judged else 1.0))
    least = SAME if judged else 0.0
    alike = [order[0], *(each for each in order[1:] if not _differs(order[0], each, name, least))]
    wide = [each for each in alike[1:] if judged and _wide(order[0], each)]
    unsure = [each for each in wide if _behind(order[0], each).min() <= SAME]
    alike = [each for each in alike if each not in wide]
    rest = [each for each in order if each not in alike and each not in unsure]
    if not judged:
        text = f"Lowest TPOT: {listed([each.system for each in alike])} ({_tpot(order[0])})"
        after = ", within noise" if len(alike) > 1 else f"; next {rest[0].system} ({_tpot(rest[0])})"
        return f"{text}{after}."
    kept = f"{order[0].figures[name].mean:.1%} of the requests keep the SLO"
    runs = counted(order[0].figures[name].runs, "seed")
    points, where = _gap(order[0], rest[0]) if rest else ("", "")
    if len(alike) == 1:
        best = "best in the mean" if unsure else "best"
        text = f"{order[0].system} is {best}: {kept}"
        text += f", {points} points more than with {rest[0].system}{where}." if rest else "."
    else:
        fastest = min(alike, key=lambda each: each.figures["mean_tpot_ms"].mean or math.inf)
        shares = [f"{each.system} ({each.figures[name].mean:.1%})" for each in alike]
        text = f"{listed(shares)} keep the SLO for as many requests, within the noise of {runs}."
        others = [each for each in alike if each is not fastest]
        if all(_differs(fastest, each, "mean_tpot_ms", 0.0) for each in others):
            text += f" Of these {fastest.system} has the lowest TPOT ({_tpot(fastest)})."
        if rest:
            text += f" {rest[0].system} follows, {points} points below{where}."
    if unsure:
        shares = [f"{each.system} ({each.figures[name].mean:.1%})" for each in unsure]
        text += f" {runs} do not tell whether {listed(shares)} would keep it for as many: give more --seeds."
    return f"{text} {_why(workload, cluster, order)}".rstrip()


def _differs(one: SystemResult, other: SystemResult, name: str, least: float) -> bool:
    """Whether a figure differs beyond chance and by more than `least`, in pairs of the same requests."""
    found = interval(np.array(one.seeds[name]) - np.array(other.seeds[name]))
    if found.mean is None or abs(found.mean) <= least:
        return False
    return found.low is None or found.high is None or not found.low <= 0.0 <= found.high


def _behind(one: SystemResult, other: SystemResult) -> FloatArray:
    """By seed, the difference of the share of requests for which `one` and `other` keep the SLO."""
    return np.subtract(one.seeds["slo_attainment"], other.seeds["slo_attainment"], dtype=np.float64)


def _wide(one: SystemResult, other: SystemResult) -> bool:
    """Whether a system that does not differ beyond chance may still be worse by more than `CLEAR`."""
    found = interval(_behind(one, other))
    assert found.mean is not None
    return found.mean > SAME and (found.high is None or found.high > CLEAR)


def _gap(one: SystemResult, other: SystemResult) -> tuple[str, str]:
    """The lead in percentage points ± half its interval; if that holds 0, the lead alone and that each seed has it."""
    found = interval(100.0 * _behind(one, other))
    if found.low is None or found.mean is None:
        return f"{found.mean:.1f}", ""
    if found.low <= 0.0:
        return f"{found.mean:.1f}", f", on each of {found.runs} seeds"
    return f"{found.mean:.1f} ± {found.mean - found.low:.1f}", ""


def _tpot(result: SystemResult) -> str:
    return f"{result.figures['mean_tpot_ms'].mean:.0f} ms"


def _why(workload: Workload, cluster: Cluster, order: Sequence[SystemResult]) -> str:
    """What decides the order, from the fleet and the cluster. `order`: best first."""
    loads, servers = workload.offered_tok_s_by_adapter, len(cluster)
    hottest = int(np.argmax(loads))
    slots = min(kind.max_loras for kind in cluster.kinds if kind.name in cluster.servers)
    tok_s = [each.figures["total_token_throughput"].mean or 0.0 for each in order]
    reasons = []
    if servers > 1 and loads[hottest] >= 0.999 * loads.sum() / servers:
        said = f"adapter {workload.names[hottest]!r} has {loads[hottest] / loads.sum():.0%} of the load,"
        reasons.append(f"{said} what one of {servers} equal servers gets or more: replicas spread it")
    if np.mean(order[0].seeds["served"]) < SERVED:
        most, how = max(tok_s[1:]), ""
        if tok_s[0] > MORE * most:
            how = ": adapters on few servers each leave fewer in a batch, which serves more tokens"
        elif tok_s[0] >= most / MORE:
            how = ": what keeps its queues equal loses least"
        reasons.append(f"the servers are overloaded{how}")
    elif len(workload) <= slots:
        reasons.append("every adapter has a slot on each server: replicas everywhere cost no loads")
    else:
        said = f"{len(workload):,} adapters share {counted(slots, 'slot')} of a server:"
        reasons.append(f"{said} keeping each on few servers saves loads and distinct adapters in a batch")
    return f"Why: {'; '.join(reasons)}."
