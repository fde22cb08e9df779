"""Whether a plan that breaks its limits in some hours does so rarely enough to hold: in one of twenty, or by chance."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from packer.bin import Bin
from packer.plan import Plan
from packer.planning.chance import more_than_chance
from packer.planning.kept import Hour, KeptHours
from packer.room import LEVELS
from packer.twin.hours import FRESH_HOURS

if TYPE_CHECKING:
    from packer.planning.recommend import Deployment

MORE_HOURS = 13  # Hours that show whether breaks are rare, if one of the first breaks a plan's limits.
RARE = 2  # Number of these hours that may break the limits.
MOST_HOURS, MOST_BROKEN = 40, 3
"""Hours that are simulated where `MORE_HOURS` leave open whether more than `SELDOM` break the limits, and the number of
these that may: two, and one standard error."""
SELDOM, CLEAR = 0.05, 0.01
"""The share of hours that may break a plan's limits; more do if chance breaks so many with a smaller probability."""
OFTEN = 3
"""Number of busy hours (`KeptHours.busy`) from which on a server breaks its limits too often, if most of them do. Of 75
servers of 24 fleets whose rates vary, one did, and broke 5 of 40 hours; the others broke at most 3."""


def is_rare(found: Sequence[float], adapters: int) -> bool:
    """Whether the limits break in so few of these hours, or by chance alone, that this is no reason for another plan.
    Plans that are made for a goal keep it in about 19 of 20 hours (`benchmarks/solvers`)."""
    broken, most = sum(map(bool, found)), RARE if len(found) < MOST_HOURS else MOST_BROKEN
    return broken <= most or not more_than_chance(found, adapters)


def looked_for_rare(first: Sequence[float], adapters: int, further: Callable[[int], float]) -> list[float]:
    """Numbers of adapters beyond their limits in the `first` hours and in `FRESH_HOURS` more; if one of these breaks
    the limits, in `MORE_HOURS` in all, or where these leave it open, in `MOST_HOURS`, unless fewer show that this is
    neither rare nor chance. `further(place)`: the number in the hour that comes after so many."""
    found, begun = list(first), len(first)
    for place in range(begun, MOST_HOURS):
        rare = is_rare(found, adapters)
        if (not any(found) and place >= begun + FRESH_HOURS) or (rare and place >= MORE_HOURS):
            break
        if not rare and _often(found) < CLEAR:
            break
        found.append(further(place))
    return found


def _often(found: Sequence[float]) -> float:
    """The probability with which as many of these hours break the limits by chance, if `SELDOM` of all hours do."""
    n, broken = len(found), sum(map(bool, found))
    return sum(math.comb(n, k) * SELDOM**k * (1.0 - SELDOM) ** (n - k) for k in range(broken, n + 1))


def holds_mostly(kept: KeptHours, bins: Sequence[Bin], number: int, broken: Sequence[Hour]) -> bool:
    """Whether a plan breaks its limits as rarely as one may that is evaluated; its hours are then noted as `unlucky`.
    `broken`: the hours of the `number`-th fresh set, and of a log, that break them. Those of a log are not rare."""
    looked, late = kept.tried(bins, number), dict[Hour, float]()
    if kept.simulated.stop() or any(hour in kept.others for hour in broken):
        return False

    def beyond_in(hour: Hour) -> float:
        if hour not in broken and kept.holds_in(bins, hour):
            return 0.0
        late[hour] = float(max(1, int((kept.adapters(bins, hour).slo_used > 1.0).sum())))
        return math.inf  # more than chance

    first = [*looked, *(hour for hour in broken if hour not in looked)]
    found = looked_for_rare(
        [beyond_in(hour) for hour in first],
        len(kept.workload),
        lambda place: beyond_in(kept.further_hour(place, number)),
    )
    if rare := is_rare(found, len(kept.workload)):
        kept.unlucky[tuple(bins)] = [*late.values(), *[0.0] * (len(found) - len(late))], list(late)
        kept.refused.discard(tuple(bins))
    return rare


def broken_last(task: Deployment, plan: Plan) -> Plan:
    """The plan that the last set of fresh hours broke, or the one on the next GPUs that keep the goal in all hours so
    far, `verified` if the limits break so rarely that an evaluation says that it holds."""
    job, first = task.job, task.first
    assert first is not None
    if holds_mostly(job.kept, plan.bins, job.number, job.broken):
        return replace(plan, verified=True)
    more = None if job.hopeless or job.over() else job.first(first + 1, job.most(task.max_gpus))
    if more is not None and not job.over():
        job.sets += 1
        other = job.at(more).plan
        broken = job.kept.broken_later(other.bins, job.number)
        if not broken or holds_mostly(job.kept, other.bins, job.number, broken):
            task.first = more
            return replace(other, verified=True)
    return replace(plan, verified=False)


def by_chance(task: Deployment, low: int, found: int | None) -> Plan | None:
    """A plan on fewer servers than `found` that breaks kept hours, but fresh ones by chance alone; else None."""
    job, kept = task.job, task.job.kept
    fewer = [each for each in job.points if low <= each.n_gpus < (found or math.inf)]
    tried = [each.plan.bins for each in fewer if each.broken_later and each.plan.bins not in kept.refused]

    def holds(k: int) -> bool:
        # Hours that broke the last plan come first; without each adapter, no hour may break by chance.
        hours = [] if kept.all_count else sorted(kept.tried(tried[k], job.sets), key=lambda h: h not in job.broken)
        held = all(kept.holds_in(tried[k], hour) for hour in (kept.given, *hours))
        return held and not kept.broken_later(tried[k], job.sets)

    # More GPUs hardly break the goal if fewer keep it: bisection finds the fewest in few simulations.
    first = bisect_left(range(len(tried)), True, key=lambda k: not job.over() and holds(k))
    if first == len(tried) or job.over():
        return None
    # An hour that is kept has the draws of the worst server of another plan for all servers.
    kept.drop([hour for hour in kept.added if not kept.holds_in(tried[first], hour)])
    job.sets += 1
    return replace(task.put(tried[first]), verified=True)


def busy_hours(kept: KeptHours, plan: Plan) -> tuple[list[Bin], list[Hour]]:
    """Servers of a plan whose rates may grow by no more than a step of `LEVELS`, and their busy hours, simulated whole,
    if the plan's arrivals vary. Servers with more room seldom break their limits."""
    hours = [] if kept.simulated.stop() else kept.busy(plan.bins)
    rooms = plan.rooms if kept.all_count else ()
    wide = {item for item, room in zip(plan.bins, rooms, strict=bool(rooms)) if (room.headroom or 0.0) > LEVELS[1]}
    near = [item for item in plan.bins if item not in wide] if hours else []
    kept.simulated.each([kept.job(item, hour) for hour in hours for item in near])  # all at once
    return near, hours


def often_broken(kept: KeptHours, plan: Plan) -> list[Hour]:
    """The busy hours that break a server of the plan, if these are `OFTEN` or more, and most of them; else none."""
    near, hours = busy_hours(kept, plan) if kept.all_count and not kept.by_luck(plan.bins)[1] else ([], [])
    for item in near:
        broken = kept.broken_in([item], hours)
        if len(broken) >= OFTEN and 2 * len(broken) > len(hours):
            return broken
    return []
