"""Whether a plan breaks its limits by chance alone: rarely, and by little."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from packer.bin import Bin
from packer.twin.hours import FRESH_HOURS, ServerHour
from packer.twin.per_adapter import FEW_CHANCE
from packer.workload import Workload

ONE_IN = 5_000  # One adapter-hour in this number may exceed its limits by chance.
HOURS = 12  # Maximum number of hours to examine. In all of them together one adapter-hour may always exceed its limits.
MOST = 2.0  # A server that uses more than this multiple of its limits does not break them by chance alone.


def beyond(bins: Sequence[Bin], hours: Sequence[ServerHour], fleet: Workload) -> float:
    """The number of adapters of a fleet that exceed their limits in an hour of these servers, on whichever of theirs;
    infinite if a server uses more than `MOST` of them. A server that exceeds limits without an adapter that does counts
    as `FEW_CHANCE` if only adapters have limits: those with few requests may exceed them (`few_used`). Else the number
    is at least 1."""
    if max((hour.used for hour in hours), default=0.0) > MOST:
        return math.inf
    late = [hour.adapters.slo_used > 1.0 for hour in hours]
    over = {i for item, own in zip(bins, late, strict=True) for i in np.asarray(item.adapters)[own].tolist()}
    others = sum(hour.used > 1.0 and not own.any() for hour, own in zip(hours, late, strict=True))
    return len(over) + FEW_CHANCE * others if fleet.slo.of_adapters else float(max(len(over), others > 0))


def looked_at(found: Sequence[float], adapters: int, further: Callable[[int, int], Sequence[float]]) -> list[float]:
    """Numbers of adapters beyond their limits, in as many hours as are needed to tell whether that is chance.

    `found`: the numbers of the first hours, infinite if it is not chance. `adapters`: adapters on all servers.
    `further(first, number)`: the numbers of `number` further hours; `first`: how many hours were examined before.
    """
    hours = list(found)
    while any(hours) and len(hours) < HOURS and sum(hours) <= at_most(adapters, len(hours)):
        if adapters * len(hours) >= ONE_IN and by_chance(hours, adapters):
            break
        hours += further(len(hours), min(FRESH_HOURS, HOURS - len(hours)))
    return hours


def at_most(adapters: int, hours: int) -> float:
    """Return how many adapter-hours of these hours may be beyond their limits until it is clear that this is not
    chance: a standard error more than `by_chance` allows, or what it allows in `HOURS`."""
    usual = max(1.0, adapters * hours / ONE_IN)
    return min(usual + math.sqrt(usual), _allowed(adapters, max(hours, HOURS)))


def by_chance(found: Sequence[float], adapters: int) -> bool:
    """Whether chance alone explains the adapters beyond their limits in these hours."""
    return sum(found) <= _allowed(adapters, len(found))


def more_than_chance(found: Sequence[float], adapters: int) -> bool:
    """Whether the adapters beyond their limits in these hours exceed the allowed number by more than a standard error,
    so that another plan is needed."""
    allowed = _allowed(adapters, len(found))
    return sum(found) > allowed + math.sqrt(allowed)


def _allowed(adapters: int, hours: int) -> float:
    """The number of adapter-hours that may exceed the limits in `hours` hours."""
    return max(float(hours >= HOURS), adapters * hours / ONE_IN)


def hours_broken(found: Sequence[float]) -> int:
    """In how many hours at least one adapter is beyond its limits; at least 1 if in any hour one may be expected."""
    return max(sum(each >= 1.0 for each in found), int(any(found)))


def chance_words(found: Sequence[float], adapters: int) -> str:
    """A sentence that says in how many hours the limits break by chance."""
    said = f"Chance breaks the limits in {hours_broken(found)} of {len(found)} hours:"
    return f"{said} {math.ceil(sum(found)):,} of {adapters * len(found):,} adapter-hours."
