"""Which periods of a day share servers, and of the servers that hold in them those with the cheapest changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from packer.arrays import IntArray
from packer.operate.day import Period


def merged_where_cheaper(
    periods: Sequence[Period], plan_for: Callable[[Period, Period], Period],
    change_s: Callable[[Period, Period], float], startup_s: float,
) -> list[Period]:  # fmt: skip
    """The periods of a day that repeats, with neighbours merged while one set of servers takes no more GPU time, moves
    and starts included, also those before and after the two; the first is one in which the number of GPUs changes, so
    that midnight alone does not end a period."""
    cut = next((t for t, each in enumerate(periods) if each.gpus != periods[t - 1].gpus), 0)
    found, k, left = [*periods[cut:], *periods[:cut]], 0, len(periods)
    while left > 0 and len(found) > 1:
        k %= len(found) - 1
        one, other = found[k : k + 2]
        beside = [found[k - 1], found[(k + 2) % len(found)]] if len(found) > 2 else []
        apart_s = _cost_s([one, other], beside, change_s)
        # Servers for both periods are at least those of the larger one: search only if these could pay.
        most = max(one.gpus, other.gpus)
        least_s = most * (one.end_s - one.start_s + other.end_s - other.start_s)
        least_s += startup_s * sum(max(most - each.gpus, 0) for each in beside) / 2.0
        together = plan_for(one, other) if least_s <= apart_s else None
        if together is not None and _cost_s([together], beside, change_s) <= apart_s:
            found[k : k + 2], left = [together], len(found)
        else:
            k, left = k + 1, left - 1
    return found


def _cost_s(periods: Sequence[Period], beside: Sequence[Period], change_s: Callable[[Period, Period], float]) -> float:
    """GPU-seconds of successive periods and of the changes between them and to those `beside` them; without these, of
    a day that repeats."""
    row = [beside[0], *periods, beside[1]] if beside else [*periods, periods[0]]
    gpu_s = sum(each.gpus * (each.end_s - each.start_s) for each in periods)
    return gpu_s + sum(change_s(before, after) for before, after in pairwise(row))


def with_few_changes(
    periods: Sequence[Period], others: Sequence[Period], holds: Callable[[Period], bool],
    change_s: Callable[[Period, Period], float],
) -> list[Period]:  # fmt: skip
    """The periods of a day that repeats, each with its own servers or with those of another one of `others` that has as
    many of each kind and whose servers hold in it, too: where those of the morning hold in the evening, adapters go
    back to where they were. `change_s`: the cost of a change from the servers of one period to those of the next."""
    known: dict[Any, int] = {}  # Number of each set of servers in their places.
    sets: list[Period] = []  # A period with each of them.

    def number(each: Period) -> int:
        if (k := known.setdefault((each.plan.bins, each.servers), len(sets))) == len(sets):
            sets.append(each)
        return k

    own = list(map(number, periods))
    rest = dict.fromkeys(map(number, (*periods, *others)))
    kinds = [_kinds(each) for each in sets]
    options = [[k, *(j for j in rest if j != k and kinds[j] == kinds[k])] for k in own]
    held = {(t, k) for t, k in enumerate(own)}
    cost = cache(lambda one, other: change_s(sets[one], sets[other]))
    while True:
        chosen = list(enumerate(_cheapest(options, cost)))
        found = [each if k == own[t] else _on(each, sets[k]) for (t, k), each in zip(chosen, periods, strict=True)]
        refused = [(t, k) for t, k in chosen if (t, k) not in held and not holds(found[t])]
        if not refused:
            return found
        held |= {*chosen} - {*refused}
        for t, k in refused:
            options[t].remove(k)


def _on(each: Period, other: Period) -> Period:
    """A period on the servers of another one."""
    return replace(each, plan=replace(each.plan, bins=other.plan.bins), servers=other.servers)


def _kinds(each: Period) -> Counter[str]:
    return Counter(item.profile.name for item in each.plan.bins)


def _cheapest(options: Sequence[Sequence[int]], cost: Callable[[int, int], float]) -> list[int]:
    """One option of each period, so that the changes of a day that repeats cost least in total; among equals, the
    first."""
    around = pairwise([*options, options[0]])
    steps = [np.array([[cost(one, other) for one in before] for other in after]) for before, after in around]
    best, first, choices = math.inf, 0, list[IntArray]()
    for k in range(len(options[0])):
        # By the option of a period: the least cost of a way from option `k` of the first period, and the option before.
        least = np.where(np.arange(len(options[0])) == k, 0.0, np.inf)
        before = list[IntArray]()
        for step in steps:
            sums = step + least
            before.append(sums.argmin(axis=1))
            least = sums.min(axis=1)
        if least[k] < best:
            best, first, choices = float(least[k]), k, before
    found = [first]
    for each in reversed(choices):
        found.append(int(each[found[-1]]))
    return [own[k] for own, k in zip(options, found[:0:-1], strict=True)]
