"""Simulated hours are those of the server that was asked for."""

from __future__ import annotations

from collections.abc import Callable

from packer.adapter import Adapter
from packer.bin import Bin
from packer.profile import LatencySpec, Profile
from packer.twin.hours import Hours
from packer.workload import Workload


def test_hours_are_kept_by_kind_of_server(make_profile: Callable[..., Profile]) -> None:
    """The same adapters with the same slots on a slower kind of server have an hour of their own."""
    fleet = Workload([Adapter("a", 8, 0.2), Adapter("b", 8, 0.1)])
    kinds = [make_profile(latency=LatencySpec("linear", {"base_ms": ms})) for ms in (10.0, 30.0)]
    hours = Hours()
    quick, slow = hours.all([Bin((0, 1), kind.settings(2, 8), kind) for kind in kinds], fleet)
    assert quick.figures.mean_itl_ms < 0.5 * slow.figures.mean_itl_ms
