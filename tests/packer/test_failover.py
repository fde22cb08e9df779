"""A lost server: its adapters go to those that are left, every share of every adapter is kept."""

from __future__ import annotations

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.failover import without_server
from packer.profile import Profile
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
