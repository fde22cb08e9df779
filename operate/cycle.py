"""Of the servers that hold in the periods of a day, choose those between which changes cost least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from packer.operate.day import Period


def with_few_changes(
    periods: Sequence[Period], others: Sequence[Period], holds: Callable[[Period], bool],
    change_s: Callable[[Period, Period], float],
) -> list[Period]:  # fmt: skip
    """The periods of a day that repeats, each with its own servers or with those of another one of `others` that has as
    many of each kind and whose servers hold in it, too: where those of the morning hold in the evening, adapters go
    back to where they were. `change_s`: the cost of a change from one period to the next one."""
    options: list[list[Period]] = []
    for each in periods:
        own = {(each.plan.bins, each.servers): each}
        for other in (*periods, *others):
            if _kinds(other) == _kinds(each) and (key := (other.plan.bins, other.servers)) not in own:
                own[key] = replace(each, plan=replace(each.plan, bins=other.plan.bins), servers=other.servers)
        options.append(list(own.values()))
    cost, known = cache(change_s), {id(each) for each in periods}
    while True:
        found = _cheapest(options, cost)
        doubtful = [(k, each) for k, each in enumerate(found) if id(each) not in known]
        for k, each in doubtful:
            if holds(each):
                known.add(id(each))
            else:
                options[k] = [other for other in options[k] if other is not each]
        if all(each in own for each, own in zip(found, options, strict=True)):
            return found


def _kinds(each: Period) -> Counter[str]:
    return Counter(item.profile.name for item in each.plan.bins)


def _cheapest(options: Sequence[Sequence[Period]], cost: Callable[[Period, Period], float]) -> list[Period]:
    """One option of each period, so that the changes of a day that repeats cost least in total; among equals, the
    first."""
    best: tuple[float, list[Period]] | None = None
    for first in options[0]:
        paths = [(0.0, [first])]
        for own in options[1:]:
            paths = [
                min(((s + cost(path[-1], each), [*path, each]) for s, path in paths), key=lambda p: p[0])
                for each in own
            ]
        closed = min(((s + cost(path[-1], first), path) for s, path in paths), key=lambda p: p[0])
        best = closed if best is None or closed[0] < best[0] else best
    assert best is not None
    return best[1]
