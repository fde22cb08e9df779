"""How much the load of each server of a plan may grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.plan import Plan
from packer.room import LEVELS, Room
from packer.solvers.candidates import AWAY, neighbours
from packer.solvers.evaluator import Evaluator
from packer.twin.hours import Hours, of_hours, with_adapters
from packer.workload import Workload

MOST_GPUS = 32
"""Plans of more GPUs come without headroom: it would take longer than the plan."""


LITTLE = 1.25
"""A server with few slots whose rates may grow by less than this factor is tried with more."""


def with_slots(
    hours: Hours, fleet: Workload, bins: Sequence[Bin], given: Sequence[Room], holds: Callable[[Bin], bool]
) -> tuple[tuple[Bin, ...], tuple[Room, ...]]:
    """The servers and their room; those that few slots limit and that have little room get more of them.

    Servers that have no room as they are stay: what they need is fewer requests.

    `hours`, `fleet`: simulated hours, and the fleet at the rates as given.
    `given`: the rooms of the servers as they are; empty for a replayed trace, where nothing changes.
    `holds`: whether a server may be part of the plan.
    """
    made, rooms = list(bins), list(given)
    for k, (item, room) in enumerate(zip(bins, given, strict=False)):
        if not 1.0 <= (room.headroom or 0.0) < LITTLE or room.limit not in ("slots", "loading"):
            continue
        for most in reversed(neighbours(item, AWAY)):
            other = item.with_slots(most)
            if hours.stop() or not holds(other):
                continue
            (found,) = hours.rooms([other], fleet)
            if (found.headroom or 0.0) > (rooms[k].headroom or 0.0):
                made[k], rooms[k] = other, found
    return tuple(made), tuple(rooms)


def with_room(
    plan: Plan, evaluator: Evaluator, stop: Callable[[], bool] = lambda: False, hours: Hours | None = None
) -> Plan:
    """The plan with the factor by which the rates of each server may grow, where it has up to `MOST_GPUS`.

    Where the twin confirms plans, `Plan.rooms` has the three marks of simulated hours (limits of the objective, or
    else those of the fleet; a queue that grows; starvation) and what limits each server, `Plan.adapters` what each
    adapter gets, and the figures are those of these hours; elsewhere the factor is that up to which the predictor
    says that the server does not starve. `hours`: those simulated so far, of the plan's seed and limits.
    """
    if stop() or not 0 < len(plan.bins) <= MOST_GPUS:
        return plan
    if any(evaluator.twin_of(item.profile) is None for item in plan.bins):
        return replace(plan, headroom=headroom(plan.workload, plan.bins, evaluator, stop))
    hours = hours or Hours(plan.seed, stop, plan.limits)
    rooms = plan.rooms or hours.rooms(plan.bins, plan.workload)
    known = tuple(room.headroom for room in rooms) or (None,) * len(plan.bins)
    found = of_hours(plan.evaluations, hours.all(plan.bins, plan.workload))
    return with_adapters(replace(plan, rooms=rooms, headroom=known, evaluations=found), hours)


def headroom(
    workload: Workload,
    bins: Sequence[Bin],
    evaluator: Evaluator,
    stop: Callable[[], bool] = lambda: False,
    factors: Sequence[float] = LEVELS,
) -> tuple[float | None, ...]:
    """Largest of the `factors` (rising) of its rates at which the predictor says that a bin does not starve.

    All bins are bisected together, one batch a step; stopped early, the largest factors known to hold are returned.
    None for a bin that starves already, and for a replayed trace.
    """
    if workload.arrivals.trace is not None or not bins:
        return (None,) * len(bins)
    levels = np.array(factors)
    low = np.full(len(bins), -1)
    high = np.full(len(bins), len(levels))
    while True:
        open_ = np.flatnonzero(high - low > 1)
        if not open_.size or stop():
            break
        middle = (low[open_] + high[open_]) // 2
        found = evaluator.scaled(workload, [bins[k] for k in open_.tolist()], levels[middle])
        low[open_] = np.where(found.feasible, middle, low[open_])
        high[open_] = np.where(found.feasible, high[open_], middle)
    return tuple(float(levels[level]) if level >= 0 else None for level in low.tolist())
