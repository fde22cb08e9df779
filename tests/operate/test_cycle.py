"""Periods take servers of other periods where that makes the changes of the day cheapest."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.operate.cycle import merged_where_cheaper, with_few_changes
from packer.operate.day import Period
from packer.plan import Plan, Status
from packer.testing.analytic import small_profile
from packer.workload import Workload

PROFILE = small_profile()
FLEET = Workload([Adapter(f"a{i}", 8, 0.1) for i in range(6)])


def period(k: int, homes: list[int]) -> Period:
    """A period of an hour with these servers of the adapters."""
    numbers = sorted(set(homes))
    bins = [Bin(tuple(i for i in range(6) if homes[i] == s), PROFILE.settings(2, 8), PROFILE) for s in numbers]
    plan = Plan(FLEET, tuple(bins), Evaluations.of([]), Status.FEASIBLE, "gpus", "test", "twin")
    return Period((str(k),), 3600.0 * k, 3600.0 * (k + 1), plan, tuple(numbers))


def moves(one: Period, other: Period) -> float:
    """Adapters on a server that did not hold them."""
    return float(sum(not other.home()[name] <= one.home()[name] for name in FLEET.names))


def total(periods: tuple[Period, ...]) -> float:
    """Moves of a day that repeats."""
    return sum(moves(periods[t - 1], each) for t, each in enumerate(periods))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_servers_that_hold_costs_less(seed: int) -> None:
    """Of all ways to give each period servers of a period with as many GPUs that hold in it, the cheapest is found."""
    rng = np.random.default_rng(seed)
    given = [period(k, rng.integers(0, 3, 6).tolist()) for k in range(5)]
    refused = {(each.names, other.plan.bins) for each in given for other in given if rng.random() < 0.4}
    refused -= {(each.names, each.plan.bins) for each in given}

    def holds(each: Period) -> bool:
        return (each.names, each.plan.bins) not in refused

    found = with_few_changes(given, [], holds, moves)
    assert all(map(holds, found))
    assert [(each.names, each.gpus) for each in found] == [(each.names, each.gpus) for each in given]
    pools = [[o for o in given if o.gpus == each.gpus and (each.names, o.plan.bins) not in refused] for each in given]
    assert total(tuple(found)) == min(map(total, product(*pools)))


def sized(gpus: int, start_h: int, end_h: int) -> Period:
    """A period with so many servers."""
    each = period(start_h, [i % gpus for i in range(6)])
    return replace(each, names=tuple(map(str, range(start_h, end_h))), end_s=3600.0 * end_h)


def merged(gpus: list[int], startup_h: float, hours: list[tuple[int, int]] | None = None) -> list[tuple[int, int]]:
    """GPUs and hours of each period of a day whose periods need so many."""

    def together(one: Period, other: Period) -> Period:
        start_h = int(one.start_s / 3600.0)
        return sized(max(one.gpus, other.gpus), start_h, start_h + len(one.names) + len(other.names))

    def change_s(one: Period, other: Period) -> float:
        return 3600.0 * startup_h * abs(one.gpus - other.gpus) / 2.0

    periods = [sized(n, *own) for n, own in zip(gpus, hours or [(t, t + 1) for t in range(24)], strict=False)]
    found = merged_where_cheaper(periods, together, change_s, 3600.0 * startup_h)
    return [(each.gpus, len(each.names)) for each in found]


def test_a_long_night_keeps_its_servers_although_starts_take_longer_than_a_period() -> None:
    """Two hours beside each other share servers only where that is cheaper with the changes before and after them: a
    start of 1.5 h is paid once for 12 quiet hours, not beside the first of them. A quiet hour in a busy day is not
    worth a start."""
    assert merged([1] * 6 + [3] * 12 + [1] * 6, 1.5) == [(3, 12), (1, 12)]
    assert merged([1] * 6 + [3] * 5 + [2] + [3] * 6 + [1] * 6, 1.5) == [(3, 12), (1, 12)]
    assert merged([3] * 20 + [1] * 4, 5.0) == [(3, 24)]
    assert merged([3] * 20 + [1] * 4, 3.9) == [(3, 20), (1, 4)]


def test_periods_about_midnight_are_merged_only_where_that_saves_gpus() -> None:
    """Two GPUs from 7 to 8 and one from 0 to 1 (the next day) remain two periods. One GPU before and after midnight may
    be one period."""
    assert merged([2, 1], 0.0, [(7, 8), (0, 1)]) == [(2, 1), (1, 1)]
    assert merged([1, 2, 1], 0.0, [(0, 1), (7, 8), (8, 9)]) == [(2, 1), (1, 2)]
