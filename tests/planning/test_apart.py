"""Groups of near ranks on servers of their own, where that takes fewer servers than all ranks on each."""

from __future__ import annotations

import numpy as np
import pytest

import packer
from packer import Adapter, Workload
from packer.planning.apart import Apart
from packer.planning.explore import Frontier
from packer.planning.splits import even_splits
from packer.profile import Profile

pytestmark = pytest.mark.usefixtures("quarter_hours")


@pytest.fixture(scope="module")
def job(server: Profile) -> Frontier:
    """Half of the adapters with rank 8, half with rank 128, whose slots leave little KV cache."""
    rates = np.random.default_rng(5).lognormal(np.log(0.25), 0.6, 120)
    return Frontier(Workload([Adapter(f"a{k}", (8, 128)[k % 2], float(rate)) for k, rate in enumerate(rates)]), server)


def test_large_slots_are_for_those_that_need_them(job: Frontier) -> None:
    """On as many servers each adapter has one place, servers hold one run of ranks, and all keep the limits in the
    hours of the search, where no even split of all adapters does."""
    n = next(n for n in range(2, 12) if next(Apart(job).on(n), None) is not None)
    (bins,) = Apart(job).on(n)
    assert sorted(i for item in bins for i in item.adapters) == list(range(len(job.workload)))
    assert len(bins) == n
    assert {item.max_lora_rank for item in bins} == {8, 128}
    assert all(len({int(job.workload.ranks[i]) for i in item.adapters}) == 1 for item in bins)
    assert job.kept.holds(bins)
    for split in even_splits(job.workload, job.profile, n):
        assert job.fullest(split)[1] > 1.0


def test_servers_left_over_go_where_servers_have_most_load(job: Frontier) -> None:
    """With one server more its group has the lower load for each server than before, and no adapter is lost."""
    apart = Apart(job)
    n = next(n for n in range(2, 12) if next(apart.on(n), None) is not None)
    (fewest,), (more,) = apart.on(n), apart.on(n + 1)
    loads = [
        {rank: [item.offered_tok_s(job.workload) for item in bins if item.max_lora_rank == rank] for rank in (8, 128)}
        for bins in (fewest, more)
    ]
    fullest = max((8, 128), key=lambda rank: np.mean(loads[0][rank]))
    assert len(loads[1][fullest]) == len(loads[0][fullest]) + 1
    assert sorted(i for item in more for i in item.adapters) == list(range(len(job.workload)))


def test_nothing_is_set_apart_of_near_ranks_or_for_less(
    job: Frontier, server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of one slot rank, nor of ranks whose slots leave about as much KV cache; not on one server, nor on more
    than there are adapters."""
    for ranks in ((9, 16), (8, 32)):
        near = Frontier(Workload([Adapter(f"a{k}", ranks[k % 2], 0.1) for k in range(8)]), server)
        assert list(Apart(near).on(3)) == []
    assert list(Apart(job).on(1)) == []
    monkeypatch.setattr("packer.planning.apart.FAR", 1.0)
    few = Frontier(Workload([Adapter(f"a{k}", (8, 64)[k], 0.1) for k in range(2)]), server)
    assert [len(bins) for bins in Apart(few).on(2)] == [2]
    assert list(Apart(few).on(3)) == []


def test_near_ranks_share_servers_where_there_are_fewer_than_ranks(server: Profile) -> None:
    """Four ranks on two servers: the largest has one of them. On three the others have two, of equal load although one
    adapter has a fifth of it."""
    share = 1.0 / np.arange(1, 81)
    low = [Adapter(f"a{k}", (8, 16, 32)[k % 3], float(rate)) for k, rate in enumerate(10.0 * share / share.sum())]
    job = Frontier(Workload([*low, *(Adapter(f"b{k}", 128, 0.1) for k in range(30))]), server)
    (two,), (three,) = Apart(job).on(2), Apart(job).on(3)
    assert [item.max_lora_rank for item in (*two, *three)] == [32, 128, 32, 32, 128]
    assert job.kept.holds(two)
    assert all(job.fullest(split)[1] > 1.0 for split in even_splits(job.workload, server, 2))
    loads = [item.offered_tok_s(job.workload) for item in three[:2]]
    assert max(loads) < 1.01 * min(loads)


def test_a_fleet_of_far_ranks_takes_no_more_than_its_ranks_alone(server: Profile) -> None:
    """A decision for ranks 8 and 128 together has no more GPUs than one for each of them."""
    rates = np.random.default_rng(7).lognormal(np.log(0.2), 0.8, 120)
    fleet = Workload([Adapter(f"a{k}", (8, 128)[k % 2], float(rate)) for k, rate in enumerate(rates)])
    alone = [packer.recommend(fleet.subset(range(k, len(fleet), 2)), server).n_gpus for k in (0, 1)]
    assert packer.recommend(fleet, server).n_gpus <= sum(alone)
