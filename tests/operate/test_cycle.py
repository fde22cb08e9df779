"""Periods take servers of other periods where that makes the changes of the day cheapest."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.operate.cycle import with_few_changes
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
