"""How far the rates of each server may grow (its room), and more slots for servers with little room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from packer.bin import Bin
from packer.plan import Plan
from packer.room import Room, levels_of
from packer.solvers.candidates import AWAY, neighbours
from packer.solvers.evaluator import Evaluator
from packer.solvers.headroom import MOST_GPUS, headroom
from packer.solvers.slots import Climb, Score, search
from packer.twin.hours import TOGETHER, Hours, of_hours, with_adapters
from packer.twin.threads import in_threads
from packer.workload import Workload


def with_slots(
    hours: Hours,
    fleet: Workload,
    bins: Sequence[Bin],
    given: Sequence[Room],
    holds: Callable[[Bin], bool],
    least: float,
) -> tuple[tuple[Bin, ...], tuple[Room, ...]]:
    """The servers and their rooms. A server that its slots limit and that has little room gets more slots if that
    helps.

    Servers without any room keep their slots: they need fewer requests.

    `hours`, `fleet`: simulated hours, and the fleet at the rates as given.
    `given`: the rooms of `bins`; empty for a replayed trace, for which nothing changes.
    `holds`: whether a server may be part of the plan. `least`: a server whose rates may grow by a smaller factor has
    little room.
    """
    rooms = dict(zip(bins, given, strict=False))
    reached = {item: room.headroom or 1.0 for item, room in rooms.items()}

    def little(item: Bin) -> bool:
        room = rooms.get(item, Room(None))
        return 1.0 <= (room.headroom or 0.0) < least and room.limit in ("slots", "loading")

    def grown(item: Bin, known: float) -> float | None:
        """The headroom of the server; None if it is no more than `known`, or if the server may not be in the plan."""
        # More than `known` means at least the next level.
        level = min(hours.levels.index(known) + 1, len(hours.levels) - 1)
        growth = hours.growth(item, fleet)
        return growth.reach(hours.levels[level - 1]) if growth.holds(level) and holds(item) else None

    def rated(tried: list[Bin]) -> list[Score]:
        new = [item for item in dict.fromkeys(tried) if item not in reached and not hours.stop()]
        known = [max(reached[other] for other in [*reached] if other.adapters == item.adapters) for item in new]
        found = in_threads(lambda job: grown(*job), list(zip(new, known, strict=True)), TOGETHER)
        reached.update((item, factor) for item, factor in zip(new, found, strict=True) if factor is not None)
        return [(1.0, reached[item]) if item in reached else (0.0,) for item in tried]

    climbs = [Climb(item, 0, [(item.max_loras, *neighbours(item, AWAY))] * little(item)) for item in bins]
    made = tuple(best or item for best, item in zip(search(climbs, rated), bins, strict=True))
    new = {item: rooms[like] for item, like in zip(made, bins, strict=True) if item in reached and item not in rooms}
    alike = [(hours.growth(item, fleet), replace(room, headroom=reached[item])) for item, room in new.items()]
    found = in_threads(lambda job: job[0].room(job[1]), alike, TOGETHER)
    rooms.update(zip(new, found, strict=True))
    return made, tuple(rooms[item] for item in made) if given else ()


def with_room(
    plan: Plan, evaluator: Evaluator, stop: Callable[[], bool] = lambda: False, hours: Hours | None = None
) -> Plan:
    """The plan with the factor by which each server's rates may grow; unchanged with more than `MOST_GPUS` servers.

    If the twin confirms plans, `Plan.rooms` has the factor from simulated hours up to which the objective's limits, or
    else the fleet's, are kept, no queue grows and the server does not starve, and what limits each server.
    `Plan.adapters` has each adapter's figures, and the plan's figures come from these hours. Otherwise the predictor
    gives the factor up to which a server does not starve. `hours`: hours simulated so far with the plan's seed and
    limits.
    """
    if stop() or not 0 < len(plan.bins) <= MOST_GPUS:
        return plan
    hours = hours or Hours(plan.seed, stop, plan.limits, levels_of(plan.margin))
    if any(evaluator.twin_of(item.profile) is None for item in plan.bins):
        return replace(plan, headroom=headroom(plan.workload, plan.bins, evaluator, stop, hours.levels))
    rooms = plan.rooms or hours.checked(hours.rooms(plan.bins, plan.workload), plan.bins, plan.workload)
    found = of_hours(plan.evaluations, hours.all(plan.bins, plan.workload))
    return with_adapters(replace(plan, rooms=rooms, headroom=(None,) * len(plan.bins), evaluations=found), hours)
