"""Whether a simulated server or cluster keeps the latency goal, and if not what limits it, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from packer.goal import Limits, time_words, words_of
from packer.twin.limits import Limit, client_limit, limit_of, setting_helps
from packer.twin.per_adapter import judged_ms, requests_used
from packer.twin.run import Run
from packer.words import counted

OF_PACED = " Times count from when the client sends a request, without its wait there for a place."
"""What the figures of a client that holds requests back leave out."""


@dataclass(frozen=True, slots=True)
class MeasuredLimit:
    """A limit of the goal with the figure that is nearest to it, or furthest beyond.

    `value_ms`: of an adapter or of a server; NaN for limits of requests, where `words` has the share of requests that
    keep them. `kept`: of several limits of requests that are only broken together, none is kept. `beyond`: number of
    adapters over their limit.
    """

    key: str
    limit_ms: float
    value_ms: float
    kept: bool
    words: str
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict of a run on the goal (`Workload.slo`). `holds`: the goal is kept, no queue grows and the server does
    not starve. `cause`: what limits the server; None if the goal holds or the server does not start."""

    holds: bool
    text: str
    limits: tuple[MeasuredLimit, ...] = ()
    cause: Limit | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        cause = None if self.cause is None else self.cause._asdict()
        limits = [{k: v for k, v in asdict(each).items() if k != "words"} for each in self.limits]
        return {"holds": self.holds, "text": self.text, "limits": limits, "cause": cause}


def verdict_of(sim: Run, tried: bool = False) -> RunVerdict:
    """Return the verdict on a run; for a cluster with what limits the server that is furthest beyond the goal. A closed
    loop has no offered load that could be served or not: only limits count. `tried`: settings that are advised for a
    single server are simulated (`limit_of`)."""
    if sim.status != "ok":
        return RunVerdict(False, f"Does not start: {sim.status_reason}.")
    limits = tuple(_measured(sim))
    open_loop = not sim.closed_loop
    parts = []
    if open_loop:
        parts.append(f"{'starves: ' if sim.starved else ''}serves {_share(sim.served_share)}")
        parts += ["its queue grows"] if not sim.stable and not sim.starved else []
    steady = not open_loop or (sim.stable and not sim.starved)
    if open_loop and steady and sim.served_share < 1.0 and not sim.refused + sim.held_back:
        parts[0] += " (the rest is unfinished at the end)"
    broken = [each.words for each in limits if not each.kept]
    holds = steady and not broken
    if holds and sim.slo_used > 1.0 and open_loop:
        holds, broken = False, [f"{words_of('p95_ttft_ms')} of adapters with few requests"]
    if broken:
        parts.append(f"breaks {' and '.join(filter(None, broken))}")
    elif limits and steady:  # figures of a server that starves do not count
        parts.append(f"keeps {' and '.join(each.words for each in limits if each.words)}")
    cause, why = (None, "") if holds else _cause(sim, tried)
    since = OF_PACED if holds and limits and sim.paced else ""
    text = f"{', '.join(parts)}{why}.{since}{_drafts(sim)}"
    return RunVerdict(holds, text[:1].upper() + text[1:], limits, cause)


def verdict_of_all(runs: Sequence[Run]) -> RunVerdict:
    """Return the verdict on runs with several seeds: that of the run furthest beyond the goal, with advice that was
    tried, and how many keep it."""
    if len(runs) == 1:
        return verdict_of(runs[0], tried=True)
    holds = [verdict_of(run).holds for run in runs]
    worst = max(range(len(runs)), key=lambda k: (not holds[k], runs[k].slo_used, -runs[k].served_share))
    found = verdict_of(runs[worst], tried=True)
    return replace(found, text=f"{sum(holds)} of {len(runs)} seeds keep the goal; the worst: {found.text}")


def _drafts(sim: Run) -> str:
    """Return a sentence if speculative decoding slows down the run, or adapters of it; else ""."""
    needed = sim.draft_acceptance_needed
    if math.isnan(needed):
        return ""
    spec = sim.profile.engine.speculation
    given = [adapter.acceptance for adapter in sim.workload.adapters]
    below = sum((spec.acceptance if spec and own is None else own or 0.0) < needed for own in given)
    if sim.draft_acceptance < needed:
        kept = f"{sim.draft_acceptance:.0%} of the drafts are kept, below {needed:.0%}"
        return f" Speculative decoding slows it down: {kept}."
    who = f"{counted(below, 'adapter')} of {len(given):,}"
    return f" Speculative decoding slows down {who}: fewer than {needed:.0%} of their drafts are kept." if below else ""


def _cause(sim: Run, tried: bool) -> tuple[Limit, str]:
    """Return what limits the server, for a cluster the server that is furthest beyond the goal; and that in words. If
    servers have room for what the client keeps from them, that is the client."""
    if (client := client_limit(sim)) is not None:
        return client, f": {client.name}, {client.usage}"
    servers = sim.servers
    if sim.sent and not any(server.sent for server in servers):
        found = Limit("router", 1.0, "it gives no request to a server", "another router")
        return found, f": {found.name}, {found.usage}"
    worst = max(range(len(servers)), key=lambda k: (servers[k].slo_used, servers[k].offered_tok_s))
    found = limit_of(servers[worst], partial(setting_helps, sim) if tried and len(servers) == 1 else None)
    if sim.closed_loop:
        open_now = f"{counted(sim.concurrency or 0, 'request')} outstanding, {sim.mean_running:,.0f} running"
        known = found.name != "bursts"  # which a client with a fixed number of open requests can't send
        found = (
            found._replace(usage=f"{found.usage}; {open_now}")
            if known
            else Limit("concurrency", 1.0, open_now, "fewer outstanding requests")
        )
    where = f"server {worst}, " if len(servers) > 1 else ""
    return found, f": {where}{found.name}, {found.usage}"


def _measured(sim: Run) -> Iterator[MeasuredLimit]:
    """Yield each limit of the goal with its figure."""
    goal, fleet = sim.workload.slo, sim.workload
    for key in goal.keys("adapter"):
        column, values = goal.column(fleet, key), judged_ms(sim, key)
        worst, beyond = int(np.argmax(values / column)), int((values > column).sum())
        # A product that rounding puts slightly above an integer must not ask for one more adapter.
        kept = beyond <= len(fleet) - math.ceil(goal.adapter_share * len(fleet) - 1e-9)
        who = f"; {beyond:,} of {counted(len(fleet), 'adapter')}" if beyond and len(fleet) > 1 else ""
        yield _beside(key, float(column[worst]), float(values[worst]), kept, who, beyond)
    for key in goal.keys("server"):
        limit_ms = goal.limits.to_dict()[key]
        figures = [server.figure(key.removeprefix("server.")) for server in sim.servers]
        value_ms = max((figure for figure in figures if not math.isnan(figure)), default=0.0)
        yield _beside(key, limit_ms, value_ms, value_ms <= limit_ms)
    keys, kept = goal.keys("request"), requests_used(sim) <= 1.0
    alone = {} if kept else {key: _judged_by(sim, key) for key in keys}
    broken = [key for key in keys if not kept and requests_used(alone[key]) > 1.0]
    together = f"{Limits.only(goal.limits.at('request'))} ({_share(sim.slo_attainment)} of the requests)"
    for k, key in enumerate(keys):
        words = "" if k or broken else together
        if key in broken:
            own = alone[key]
            words = f"{str(own.workload.slo.limits) or words_of(key)} ({_share(own.slo_attainment)} of the requests)"
        limit_ms = goal.limits.to_dict().get(key, math.nan)
        yield MeasuredLimit(key, limit_ms, math.nan, kept or (bool(broken) and key not in broken), words)


def _judged_by(sim: Run, key: str) -> Run:
    """Return the run under the limits `key` of its goal alone."""
    goal = sim.workload.slo

    def only(limits: Limits) -> Limits:
        return Limits.only({name: value for name, value in limits.to_dict().items() if name == key})

    classes = tuple((name, only(limits)) for name, limits in goal.classes)
    alone = replace(goal, limits=only(goal.limits), classes=classes)
    return replace(sim, workload=replace(sim.workload, slo=alone))


def _beside(key: str, limit_ms: float, value_ms: float, kept: bool, who: str = "", beyond: int = 0) -> MeasuredLimit:
    found = time_words(key, float(f"{value_ms:.3g}")) if value_ms else "none measured"
    words = f"{words_of(key)} {time_words(key, limit_ms)} ({found}{who})"
    return MeasuredLimit(key, limit_ms, value_ms, kept, words, beyond)


def _share(share: float) -> str:
    """Return a share in words, rounded down, so that only all of it reads 100 %."""
    return "no part" if math.isnan(share) else f"{math.floor(1000.0 * share) / 10.0:g} %"
