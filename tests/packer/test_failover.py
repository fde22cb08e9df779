"""A lost server: its adapters go to those that are left, every share of every adapter is kept."""

from __future__ import annotations

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.failover import nearness, placed, without_server
from packer.goal import Goal
from packer.profile import Profile
from packer.solvers.nearest import Nearest
from packer.workload import Workload


@pytest.fixture
def server(toy_profile: Profile) -> Profile:
    """A small server."""
    return toy_profile


def test_replicas_take_over_and_others_move(server: Profile) -> None:
    """Remaining replicas share what the lost one served; whole adapters go to the least loaded server that fits."""
    fleet = Workload(
        [
            Adapter("split", 8, 4.0),
            Adapter("small", 8, 1.0),
            Adapter("large", 32, 0.5),
            Adapter("other", 8, 3.0),
        ]
    )
    bins = (
        Bin((0, 1, 2), server.settings(3, 32), server, (0.5, 1.0, 1.0)),
        Bin((0, 3), server.settings(2, 32), server, (0.2, 1.0)),
        Bin((0,), server.settings(1, 8), server, (0.3,)),
    )
    left, unplaced = without_server(fleet, bins, 0)
    assert unplaced == ()
    assert dict(zip(left[0].adapters, left[0].shares, strict=True)) == pytest.approx({0: 0.4, 3: 1.0, 2: 1.0})
    assert dict(zip(left[1].adapters, left[1].shares, strict=True)) == pytest.approx({0: 0.6, 1: 1.0})
    assert [item.settings for item in left] == [item.settings for item in bins[1:]]


def test_an_adapter_without_large_enough_slots_is_unplaced(server: Profile) -> None:
    """Where no server that is left has slots of its rank, an adapter is named."""
    fleet = Workload([Adapter("large", 32, 1.0), Adapter("small", 8, 1.0)])
    bins = (Bin((0,), server.settings(1, 32), server), Bin((1,), server.settings(1, 8), server))
    assert without_server(fleet, bins, 0) == (bins[1:], (0,))


def test_a_class_with_tight_limits_keeps_its_servers_to_itself(server: Profile) -> None:
    """Adapters of a lost server go to servers with limits like theirs, however lightly loaded others are: the least
    loaded server is that of the tight class, whose limits they would break. The controller places them alike."""
    rates = {"fast 0": 1.0, "fast 1": 0.9, "slow 0": 5.0, "slow 1": 4.0, "slow 2": 3.5}
    adapters = [Adapter(name, 8, rate, slo_class=name[:4]) for name, rate in rates.items()]
    fleet = Workload(adapters).held_to(Goal().parsed(["fast:mean_itl_ms=16", "slow:mean_itl_ms=60"]))
    bins = [Bin((i,), server.settings(3, 8), server) for i in range(5)]
    order, loads = fleet.slo.order(fleet).tolist(), fleet.offered_tok_s_by_adapter
    for lost, others in ((0, {1, 0}), (2, {4, 2})):
        left, unplaced = without_server(fleet, bins, lost)
        assert (unplaced, others in [set(item.adapters) for item in left]) == ((), True)
        kept = [{i: 1.0} if i != lost else {} for i in range(5)]
        near = Nearest(loads, kept, [i for i in range(5) if i != lost], order=order)
        near.place_rest()
        assert [set(own) for own in near.held if own] == [set(item.adapters) for item in left]
    wider, _ = placed(fleet, bins[2:], [0, 1])  # if no server has tighter limits
    near = Nearest(loads, [{}, {}, {2: 1.0}, {3: 1.0}, {4: 1.0}], [2, 3, 4], order=order)
    near.place_rest()
    held = [set(item.adapters) for item in wider]
    assert held == [set(own) for own in near.held[2:]] == [{2}, {3, 1}, {4, 0}], "evenly by load"


def test_tighter_limits_come_before_wider_ones() -> None:
    """On a server with wider limits an adapter would tighten those of the others: it goes there last."""
    assert sorted([{2}, {0}, {1}, {3}], key=lambda kinds: nearness(1, kinds)) == [{1}, {0}, {2}, {3}]
