"""Whether a plan breaks its limits by chance alone: rarely, and by little."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from packer.twin.hours import FRESH_HOURS, ServerHour

ONE_IN = 5_000
"""One adapter-hour in this number may exceed its limits by chance."""
HOURS = 12
"""Maximum number of hours to examine. In all of them together one adapter-hour may always exceed its limits."""
MOST = 2.0
"""A server that uses more than this multiple of its limits does not break them by chance alone."""


def beyond(hours: Sequence[ServerHour]) -> float:
    """The number of adapters that exceed their limits in an hour of all servers: at least 1 if a server exceeds its
    limits, infinite if one uses more than `MOST` of them."""
    most = max((hour.used for hour in hours), default=0.0)
    count = sum(int((hour.adapters.slo_used > 1.0).sum()) for hour in hours)
    return float(max(count, most > 1.0)) if most <= MOST else math.inf


def looked_at(
    found: Sequence[float], adapters: int, further: Callable[[int, int], Sequence[float]]
) -> list[float]:
    """The number of adapters beyond their limits in each hour, for enough hours to tell whether that is chance.

    `found`: the numbers of the first hours, infinite if not by chance. `adapters`: number of adapters of all servers.
    `further(first, number)`: the numbers of `number` further hours; `first`: how many hours were examined before.
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


def chance_words(found: Sequence[float], adapters: int) -> str:
    """A sentence that says in how many hours the limits break by chance."""
    broken = sum(1 for each in found if each)
    return (
        f"Chance breaks the limits in {broken} of {len(found)} hours: {sum(found):,.0f} of "
        f"{adapters * len(found):,} adapter-hours."
    )
