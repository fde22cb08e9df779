"""Servers for several periods hold in each of them."""

from __future__ import annotations

import numpy as np

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.lengths import Lengths
from packer.planning.frontier import Conditions
from packer.planning.periods import Periods
from packer.testing.analytic import small_profile
from packer.workload import Workload


def test_a_steady_period_counts_beside_one_with_a_higher_peak() -> None:
    """A period just below the height of another one's few busiest minutes is harder to serve than that one."""
    fleet = Workload(
        [Adapter(f"a{i}", 8 << i % 3, 0.3) for i in range(40)], Lengths.constant(500), Lengths.constant(460)
    )
    rates = {"rising": np.full(40, 0.42), "steady": np.full(40, 0.75)}
    rise = Arrivals().following((300.0, *np.linspace(0.2, 1.8, 12)))
    periods = Periods(fleet, small_profile(), rates, Conditions(margin=0.0), {"rising": rise})
    assert periods.busiest(rates).arrivals == rise
    found = [periods.plan(names) for names in (["rising"], list(rates))]
    assert [plan and plan.n_gpus for plan in found] == [2, 3]


def test_servers_that_break_in_one_of_the_periods_do_not_keep_their_limits() -> None:
    """Each server is judged alone, in all periods, those of lower load, too, in which its own adapter is hotter."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 1.0)], Lengths.constant(500), Lengths.constant(460))
    rates = {"calm": np.array([0.5, 0.1]), "busy": np.array([90.0, 0.1]), "other": np.array([0.1, 80.0])}
    profile = small_profile()
    bins = [Bin((a,), profile.settings(1, 8), profile) for a in range(2)]
    periods = Periods(fleet, profile, rates, Conditions(margin=0.0))
    found = [periods.keeping(names, bins) for names in (["calm"], ["calm", "busy"], list(rates))]
    assert found == [[True, True], [False, True], [False, False]]
