"""Splits hold every adapter once, with even loads."""

from __future__ import annotations

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.failover import without_server
from packer.lengths import Lengths
from packer.planning.explore import WIDE, Frontier
from packer.planning.kept import Hour
from packer.planning.recommend import Deployment
from packer.planning.splits import SLOTS, even_in_time, even_splits
from packer.profile import Profile
from packer.solvers.backbone import engine_s
from packer.solvers.candidates import most_slots_of
from packer.solvers.order import exchanged
from packer.workload import Workload


def wide_fleet(n: int, rate: float) -> Workload:
    """Log-normal rates, two ranks."""
    rng = np.random.default_rng(n)
    rates = rng.lognormal(np.log(rate), 1.0, n)
    return Workload([Adapter(f"a{i}", int(rng.choice((8, 32))), float(x)) for i, x in enumerate(rates)])


def test_a_split_that_is_even_in_time(server: Profile) -> None:
    """Tokens of prompts take less time than those of answers: servers with equal loads would need different times."""
    prompts, answers = (Lengths.constant(2000), Lengths.constant(20)), (Lengths.constant(20), Lengths.constant(500))
    rates = (1.2, 1.2, 1.2, 2.0, 0.8, 1.6, 2.0)
    fleet = Workload([Adapter(f"a{k}", 8, rate, *(prompts if k < 3 else answers)) for k, rate in enumerate(rates)])
    (bins,) = even_in_time(fleet, server, 2, spare=0, seed=0)
    assert sorted(i for item in bins for i in item.adapters) == list(range(7))
    times = [float(engine_s(fleet)(server).max(axis=0)[list(item.adapters)].sum()) for item in bins]
    assert max(times) < 1.05 * min(times)
    assert not list(even_in_time(wide_fleet(40, 0.1), server, 3, spare=0, seed=0))


def test_a_split_that_is_even_after_a_loss(server: Profile) -> None:
    """The largest adapter and the smallest have servers of their own, so that little is on the one that takes both."""
    fleet = Workload([Adapter(f"a{k}", 8, rate) for k, rate in enumerate((6.0, 2.0, 2.0, 1.0, 1.0))])
    (bins,) = even_in_time(fleet, server, 3, spare=1, seed=0)
    assert sorted(i for item in bins for i in item.adapters) == list(range(5))
    left = [without_server(fleet, bins, lost)[0] for lost in range(3)]
    assert max(item.offered_tok_s(fleet) for some in left for item in some) == pytest.approx(
        fleet.offered_tok_s * 7 / 12
    )
    assert not list(even_in_time(fleet, server, 6, spare=1, seed=0))
    assert not list(even_in_time(fleet, server, 1, spare=1, seed=0))
    rates = (np.random.default_rng(0).random(300) ** 3).tolist()  # of which few are moved or exchanged
    many = Workload([Adapter(f"a{k}", 8, rate) for k, rate in enumerate(rates)])
    (bins,) = even_in_time(many, server, 20, spare=1, seed=0)
    loads = [item.offered_tok_s(many) for k in range(20) for item in without_server(many, bins, k)[0]]
    assert max(loads) < 1.1 * many.offered_tok_s / 19


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
        assert all(item.max_loras == min(SLOTS, len(item.adapters), most_slots_of(server, 32)) for item in bins)
        assert {item.max_lora_rank for item in bins} == {32}


def test_exchanges_make_the_fullest_of_few_parts_lighter(server: Profile) -> None:
    """Where a server gets three adapters, dealing leaves it a tenth above the mean; exchanges come within 2.5 %."""
    rates = np.random.default_rng(0).uniform(0.2, 1.2, 26)
    fleet = Workload([Adapter(f"a{i}", 16, float(rate)) for i, rate in enumerate(rates)])
    loads = fleet.offered_tok_s_by_adapter
    fullest = [
        max(loads[list(item.adapters)].sum() for item in split) / (loads.sum() / 8)
        for split in even_splits(fleet, server, 8)
    ]
    assert min(fullest[:-1]) > 1.025
    assert fullest[-1] < 1.025
    dealt = [list(item.adapters) for item in next(even_splits(fleet, server, 8))]
    parts = exchanged(dealt, loads)
    assert sorted(i for part in parts for i in part) == list(range(26))
    assert dealt == [list(item.adapters) for item in next(even_splits(fleet, server, 8))]


def test_only_more_even_splits_are_tried_after_one_that_breaks_by_far(
    server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of servers just within their limits a few percent of load decide: the evenest split is looked at, others not."""
    rates = np.random.default_rng(0).uniform(0.2, 1.2, 26)
    fleet = Workload([Adapter(f"a{i}", 16, float(rate)) for i, rate in enumerate(rates)])
    job, least, looked = Frontier(fleet, server), 1.025 * fleet.offered_tok_s / 8, []

    def fullest(bins: list[Bin]) -> tuple[list[Bin], float]:
        most = max(bins, key=lambda item: item.offered_tok_s(fleet))
        looked.append(most.offered_tok_s(fleet))
        return [most], 0.5 if looked[-1] < least else 9.0

    monkeypatch.setattr(job, "fullest", fullest)
    monkeypatch.setattr(job.kept, "used", lambda bins, most: [0.5 for _ in bins])
    (kept,) = job._even(8)
    assert max(item.offered_tok_s(fleet) for item in kept) == looked[-1] < least
    assert looked == sorted(looked, reverse=True)


def test_no_more_servers_than_adapters(server: Profile) -> None:
    """An empty server is none."""
    assert list(even_splits(wide_fleet(3, 0.05), server, 4)) == []


def test_a_wide_fleet_takes_no_more_gpus_than_its_even_splits(server: Profile) -> None:
    """Where servers get hundreds of adapters, no even split on fewer GPUs keeps the goal in the hours of the plan."""
    fleet = wide_fleet(5 * WIDE, 0.03)
    job = Frontier(fleet, server)
    best = Deployment(job).explored()
    assert best is not None
    assert best.n_gpus > 1
    for bins in even_splits(fleet, server, best.n_gpus - 1) if best.n_gpus > 2 else ():
        assert not job.kept.holds(bins)


def test_a_fresh_hour_that_breaks_the_fullest_server_is_kept_before_a_plan_is_made(
    server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made for it at once, and judged by the next set of fresh hours."""
    job = Frontier(wide_fleet(3 * WIDE, 0.05), server)
    hour, asked = Hour(job.workload, 99), []

    def broken_later(bins: list[Bin], number: int) -> list[Hour]:
        asked.append((len(bins), number))
        return [hour]

    monkeypatch.setattr(job.kept, "broken_later", broken_later)
    found = job.first(2, 6, fresh=True)
    assert asked == [(1, 0)]
    assert job.kept.hours[0] == hour
    assert job.sets == 1
    assert found is not None
    assert job.kept.holds(job.at(found).plan.bins)


@pytest.mark.usefixtures("quarter_hours")
def test_each_server_of_a_wide_fleet_has_a_part_of_a_hot_adapter(server: Profile) -> None:
    """Parts as large as a server's share leave nearly all other adapters to one server, which breaks its limits."""
    fleet = Workload([Adapter("hot", 16, 50.0), *(Adapter(f"a{k}", 8, 20.0 / 410) for k in range(410))])
    job = Frontier(fleet, server)
    parts = job.parts.spread_over(4, None)
    assert parts.parts == {0: 3}
    for split in even_splits(parts.fleet, server, 4):
        assert job.fullest(parts.joined(split))[1] > 1.0
    bins = next(job._splits(4))
    assert [item.adapters[0] for item in bins] == [0] * 4
    assert job.kept.holds(bins)


def test_where_no_split_holds_the_most_even_one_is_shown(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fullest server has no more load than that of any other split; those by time are not begun for wide fleets."""
    fleet = wide_fleet(6 * WIDE, 0.2)
    job = Frontier(fleet, server)
    monkeypatch.setattr("packer.planning.explore.even_in_time", lambda *_: pytest.fail("unused"))
    (shown,) = job._proposals(2)
    assert not job.kept.holds(shown)
    others = even_splits(fleet, server, 2)
    assert max(item.offered_tok_s(fleet) for item in shown) == min(
        max(item.offered_tok_s(fleet) for item in split) for split in others
    )


def test_a_search_that_goes_on_finds_what_the_first_one_found(server: Profile) -> None:
    """It begins with the same fresh hours, so that both name the same number of servers."""
    job = Frontier(wide_fleet(WIDE, 0.05), server)
    points = [Deployment(job).explored() for _ in range(2)]
    assert points[0] is not None
    assert points[1] is not None
    assert points[0].n_gpus == points[1].n_gpus
    job.sets = 5
    assert Deployment(job).job.sets == 0
