"""Whether a plan breaks its limits by chance alone: rarely, and by little."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from packer.twin.hours import FRESH_HOURS, ServerHour

ONE_IN = 5_000
"""Of so many adapter-hours one may be beyond its limits by chance."""
HOURS = 12
"""So many hours are looked at for that at most. Of few adapters, one may be beyond its limits in all of these."""
MOST = 2.0
"""A server that uses more than this of its limits does not break them by chance alone."""


def beyond(hours: Sequence[ServerHour]) -> float:
    """How many adapters of servers are beyond their limits in an hour, one at least where a server breaks them;
    infinite where one uses more than `MOST`."""
    most = max((hour.used for hour in hours), default=0.0)
    count = sum(int((hour.adapters.slo_used > 1.0).sum()) for hour in hours)
    return float(max(count, most > 1.0)) if most <= MOST else math.inf


def looked_at(
    found: Sequence[float], adapters: int, further: Callable[[int, int], Sequence[float]]
) -> list[float]:
    """Adapters beyond their limits in as many hours as it takes to tell whether that is chance.

    `found`: those of the first hours, infinite where it is not chance. `adapters`: of all servers.
    `further(first, number)`: those of so many further hours.
    """
    hours = list(found)
    while (
        any(hours) and sum(hours) <= at_most(adapters, len(hours)) and (more := _more(adapters, len(hours)))
    ):
        hours += further(len(hours), more)
    return hours


def _more(adapters: int, hours: int) -> int:
    """Return how many hours to look at after the first ones; 0: these are enough."""
    return 0 if adapters * hours >= ONE_IN else max(0, min(FRESH_HOURS, HOURS - hours))


def at_most(adapters: int, hours: int) -> float:
    """Return how many adapter-hours may be beyond their limits in all hours that are looked at, after `hours` of them;
    more are not chance."""
    while more := _more(adapters, hours):
        hours += more
    return _allowed(adapters, hours)


def by_chance(found: Sequence[float], adapters: int) -> bool:
    """Whether so few adapters are beyond their limits in these hours that it is chance alone."""
    return sum(found) <= _allowed(adapters, len(found))


def more_than_chance(found: Sequence[float], adapters: int) -> bool:
    """Whether more adapters are beyond their limits in these hours than chance explains, by a standard error: reason
    enough to make another plan."""
    allowed = _allowed(adapters, len(found))
    return sum(found) > allowed + math.sqrt(allowed)


def _allowed(adapters: int, hours: int) -> float:
    """How many adapter-hours of so many hours may be beyond the limits."""
    return max(float(hours >= HOURS), adapters * hours / ONE_IN)


def chance_words(found: Sequence[float], adapters: int) -> str:
    """In how many hours the limits break by chance, in a sentence."""
    broken = sum(1 for each in found if each)
    return (
        f"Chance breaks the limits in {broken} of {len(found)} hours: {sum(found):,.0f} of "
        f"{adapters * len(found):,} adapter-hours."
    )
