"""What an idle server gives requests that come one at a time. No number of servers keeps tighter limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from packer.arrival import Arrivals
from packer.bin import Bin
from packer.goal import level, time_words, words_of
from packer.times import HOUR_S
from packer.twin.engine_rules import caches_prefixes
from packer.twin.per_adapter import judged_ms, requests_used
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

ENOUGH = 1_000  # Requests from which the 99th percentile is not that of the first, which loads the adapter.
MOST_HOURS = 24.0


def lone_run(fleet: Workload, alone: Bin, seed: int) -> Run:
    """Simulate a server with one adapter (`alone`) and a client that sends a request once the previous is answered. The
    run lasts an hour, or up to `MOST_HOURS` hours until `ENOUGH` requests complete."""
    own = alone.workload(fleet)
    own = own.as_independent(cached=caches_prefixes(own, alone.profile))
    if own.arrivals.trace is None:
        own = replace(own, arrivals=Arrivals())

    def run(duration_s: float) -> Run:
        return simulate(own, alone.profile, **asdict(alone.settings), duration_s=duration_s, seed=seed, concurrency=1)

    found = run(HOUR_S)
    if found.status != "ok" or found.completed >= ENOUGH or own.arrivals.trace is not None:
        return found
    return run(HOUR_S * min(MOST_HOURS, ENOUGH / max(found.completed, 1)))


def needs(run: Run, part: float) -> Iterator[tuple[str, str]]:
    """Yield each adapter or server limit of which a `lone_run` uses more than `part`, and what it needs, in words."""
    goal = run.workload.slo
    limits = goal.limits_of(run.workload.adapters[0].slo_class).to_dict()
    for key, limit in (goal.limits.at("server") | limits).items():
        where = level(key)
        if where == "request":
            continue
        needed = float(judged_ms(run, key)[0] if where == "adapter" else run.figure(key.removeprefix("server.")))
        if needed > part * limit:
            took = time_words(key, round(needed, 1 if needed < 99.95 else 0))
            yield f"{words_of(key)} {time_words(key, limit)}", f"an idle server needs {took}"


def unreachable(run: Run) -> Iterator[str]:
    """Yield the limits that a `lone_run` breaks, with what an idle server needs, in words."""
    for limit, needed in needs(run, 1.0):
        yield f"{limit} cannot be met: {needed}"
    goal = run.workload.slo
    limits = goal.limits_of(run.workload.adapters[0].slo_class).at("request")
    if requests_used(run) > 1.0:
        named = " and ".join(f"{words_of(key)} {time_words(key, value)}" for key, value in limits.items())
        yield (
            f"{named} cannot be met for {100 * goal.request_share:g} % of the requests: an idle server keeps it for "
            f"{run.slo_attainment:.1%}"
        )
