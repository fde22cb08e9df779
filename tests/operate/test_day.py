"""Servers in use over a day, starts included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.operate import schedule as schedules
from packer.operate.day import Period, Schedule
from packer.planning.solve import solve
from packer.testing.analytic import small_profile
from packer.workload import Workload

PLAN = solve(Workload([Adapter("a", 8, 0.1)]), small_profile(), objective="gpus", verify=False)


def schedule_of(servers: list[tuple[int, ...]], startup_s: float, period_s: float = 600.0) -> Schedule:
    """A day in which these servers, of one GPU each, run in each period."""
    plans = {own: replace(PLAN, bins=PLAN.bins * len(own)) for own in servers}
    periods = [Period((str(t),), t * period_s, (t + 1) * period_s, plans[own], own) for t, own in enumerate(servers)]
    every = replace(PLAN, bins=PLAN.bins * (1 + max(k for own in servers for k in own)))
    return Schedule(every, every, tuple(periods), startup_s)


def test_servers_that_start_for_several_periods_at_once_are_all_counted() -> None:
    """Where a start takes longer than a period, the servers of three periods are in use at once; one that is off for a
    shorter time than it takes to start goes on. GPUs at hand are compared with all of them."""
    found = schedule_of([(0,), (0,), (0,), (0, 1), (0, 2), (0, 3), (0, 2), (0,), (0,), (0,), (0,), (0,)], 900.0)
    assert found.most_gpus == 4
    assert found.starts() == [(3, 1), (4, 2), (5, 3)]
    assert found.gpu_hours == pytest.approx((12 * 600.0 + 1500.0 + 2700.0 + 1500.0) / 3600.0)
    name = PLAN.bins[0].profile.gpu.name
    assert schedules._over(found.periods, {name: 4}, found.startup_s) is None
    assert schedules._over(found.periods, {name: 3}, found.startup_s) == 5
    assert schedules._over(found.periods, {name: 2}, 0.0) == 4


@pytest.mark.parametrize("startup_s", [0.0, 120.0, 600.0, 1000.0, 2500.0, 10_000.0])
@pytest.mark.parametrize("seed", range(4))
def test_servers_in_use_are_those_of_every_minute(startup_s: float, seed: int) -> None:
    """GPU-hours, starts and GPUs at once are those that a walk through the minutes of two days counts."""
    rng = np.random.default_rng(seed)
    servers = [(0, *(np.flatnonzero(rng.random(4) < 0.4) + 1).tolist()) for _ in range(12)]
    found, step_s = schedule_of(servers, startup_s), 10
    serving = np.zeros((5, 7200 // step_s), bool)
    for t, own in enumerate(servers):
        serving[list(own), t * 60 : (t + 1) * 60] = True
    late = int(startup_s) // step_s
    # In use in a step: it serves in this one or in one of those that follow within a start.
    used = np.array([np.any([np.roll(row, -k) for k in range(min(late, 719) + 1)], axis=0) for row in serving])
    assert found.gpu_hours == pytest.approx(used.sum() * step_s / 3600.0)
    begins = used & ~np.roll(used, 1, axis=1)
    assert len(found.starts()) == begins.sum()
    ends = np.roll(used, 1, axis=1) & ~used
    assert found.most_gpus == max((used | (ends & begins.any(axis=0))).sum(axis=0))
