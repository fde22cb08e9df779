"""Even splits hold every adapter once, with even loads, and are what wide fleets are planned with."""

from __future__ import annotations

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.planning.explore import WIDE, Frontier
from packer.planning.recommend import Deployment
from packer.planning.splits import SLOTS, even_splits
from packer.profile import Profile
from packer.solvers.candidates import most_slots_of
from packer.workload import Workload


def wide_fleet(n: int, rate: float) -> Workload:
    """Log-normal rates, two ranks."""
    rng = np.random.default_rng(n)
    rates = rng.lognormal(np.log(rate), 1.0, n)
    return Workload([Adapter(f"a{i}", int(rng.choice((8, 32))), float(x)) for i, x in enumerate(rates)])


@pytest.mark.parametrize("n", [2, 3, 7])
def test_each_split_has_every_adapter_once_and_even_loads(server: Profile, n: int) -> None:
    """Both dealt orders and the levelled one, with slots that the servers have memory for."""
    fleet = wide_fleet(300, 0.05)
    splits = list(even_splits(fleet, server, n))
    assert len(splits) == 3
    for bins in splits:
        assert sorted(i for item in bins for i in item.adapters) == list(range(300))
        loads = [item.offered_tok_s(fleet) for item in bins]
        assert max(loads) < 1.5 * min(loads)
        assert all(
            item.max_loras == min(SLOTS, len(item.adapters), most_slots_of(server, 32)) for item in bins
        )
        assert {item.max_lora_rank for item in bins} == {32}


def test_no_more_servers_than_adapters(server: Profile) -> None:
    """An empty server is none."""
    assert list(even_splits(wide_fleet(3, 0.05), server, 4)) == []


def test_a_wide_fleet_takes_no_more_gpus_than_its_even_splits(server: Profile) -> None:
    """Where servers get hundreds of adapters, no even split on fewer GPUs keeps the goal in the hours of the plan."""
    fleet = wide_fleet(6 * WIDE, 0.03)
    job = Frontier(fleet, server)
    best = Deployment(job).explored()
    assert best is not None
    assert best.n_gpus > 1
    for bins in even_splits(fleet, server, best.n_gpus - 1) if best.n_gpus > 2 else ():
        assert not job.kept.holds(bins)
