"""The controller of a plan that holds when any one server is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import packer
from packer.live.act import Acting
from packer.live.fleet_file import Host, LiveFleet, RouterFile
from packer.operate.follow import Following
from packer.operate.keeper import Decision, Keeper
from packer.operate.rehearse import keeper_of
from tests.operate.test_keeper import FLEET, KIND, PROFILE, keeper, seen


def half_an_hour(control: Keeper, load: float) -> list[Decision]:
    """What is decided in 30 minutes with all servers ready."""
    ready = [True] * len(control.kinds)
    return [each for minute in range(30) for each in control.decide(60.0 * minute, seen(load, ready))]


def test_no_server_stops_that_leaves_none_to_lose() -> None:
    """A server stops only if the goal holds without it and any one more."""
    assert half_an_hour(keeper(2, 2, spare=1), 100.0) == []
    assert half_an_hour(keeper(3, 3, spare=1), 950.0) == []
    (made,) = half_an_hour(keeper(3, 3, spare=1), 850.0)
    assert len(made.change.stop) == 1
    assert "the other servers, one of them lost, have had 15% in reserve" in made.why


def test_a_used_up_spare_server_is_replaced() -> None:
    """After a loss a server starts, or is said to be needed, as where the load is more than they hold without one."""
    control = keeper(3, 2, spare=1)
    assert control.decide(0.0, seen(990.0, [True, True, False])) == []
    *_, start = control.decide(60.0, seen(990.0, [True, False, False]))
    assert (len(start.change.start), control.missing) == (1, 0)
    assert start.why == "990 tok/s are expected, 0 is what the servers, one of them lost, hold"
    control = keeper(2, 2, spare=1, may_start=False)
    control.decide(0.0, seen(1010.0, [True, True]))
    assert control.missing == 1


def test_all_adapters_have_room_after_a_loss() -> None:
    """A stop after which the loss of a server would leave adapters without room, or with far fewer slots than adapters,
    is not made; where the servers have too little room now, one more is needed."""
    control = keeper(3, 3, spare=1, rooms=[5, 5, 5], may_start=False)
    assert half_an_hour(control, 100.0) == []
    assert "the others, one of them lost, would have held 0 tok/s" in control.waiting
    control = keeper(3, 3, spare=1)
    control.kinds[:] = [replace(KIND, max_loras=4)] * 3
    control.capacity.of = lambda _server, own: 1000.0 if len(own) < 8 else 50.0  # type: ignore[method-assign]
    assert half_an_hour(control, 100.0) == []
    control = keeper(2, 2, spare=1, rooms=[5, 5], may_start=False)
    control.decide(0.0, seen(100.0, [True, True]))
    assert control.missing == 1


def test_the_spare_server_is_that_of_the_plan(tmp_path: Path) -> None:
    """`live follow` and its rehearsal keep a spare server for a plan that was made with one."""
    plan = replace(packer.solve(FLEET, PROFILE, with_headroom=False), statistics={"spare": 1})
    hosts = tuple(Host(f"http://127.0.0.1:{9 + k}") for k in range(len(plan.bins)))
    fleet = LiveFleet(hosts, RouterFile("routing", str(tmp_path / "router")), state=str(tmp_path / "state.json"))
    assert Following(Acting(plan, fleet), plan.workload).keeper.spare == 1
    assert keeper_of(plan, FLEET, 2)[0].spare == 1
