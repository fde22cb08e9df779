"""What a change to running servers does besides loads: requests end before unloads and stops, and room is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from packer.change import Change
from packer.live import act
from packer.live.act import Acting
from packer.live.fleet_file import LiveFleet
from packer.live.metrics import page_of
from packer.plan import Plan
from tests.live.stand_in import StandIn
from tests.live.test_act import GOAL, LOAD, _short, fleet, plan_of, routed, servers  # noqa: F401 - fixtures


@pytest.fixture
def made(
    fleet: LiveFleet,  # noqa: F811
    plan_of: Callable[..., Plan],  # noqa: F811
    said: list[str],
) -> Acting:
    """The servers, routed as they are, with the first full."""
    full = replace(fleet, servers=(replace(fleet.servers[0], room=3), fleet.servers[1]))
    acting = Acting(plan_of(GOAL), full, said.append)
    acting.adopt(acting.placement(acting.look()), "test")
    return acting


@pytest.fixture
def said() -> list[str]:
    return []


def test_an_idle_copy_makes_room_and_ends_no_route(
    made: Acting,
    said: list[str],
    servers: list[StandIn],  # noqa: F811
) -> None:
    """A copy without requests leaves a full server before another adapter comes; its adapter is routed as before."""
    servers[1].adapters["a"] = "/adapters/a"
    made.state.servers["gpu-0"]["a"], made.state.servers["gpu-1"]["a"] = 0.0, 1.0
    assert made.carry_out(Change(0.0, load=((0, "c"),), route={"c": {0: 1.0}}, unload=((0, "a"),))) == []
    assert servers[0].adapters.keys() == {"b", "f", "c"}
    assert routed(made.fleet)["a"] == {"gpu-1": 1.0}
    assert not any("end the routes" in text for text in said)


def test_a_copy_with_requests_makes_room_after_its_route_has_ended(
    made: Acting,
    servers: list[StandIn],  # noqa: F811
) -> None:
    """A copy that leaves a full server gives its requests away, then leaves, then the other adapter comes."""
    servers[1].adapters["a"] = "/adapters/a"
    made.state.servers["gpu-0"]["a"] = made.state.servers["gpu-1"]["a"] = 0.5
    routes = {"a": {1: 1.0}, "c": {0: 1.0}}
    assert made.carry_out(Change(0.0, load=((0, "c"),), route=routes, unload=((0, "a"),))) == []
    assert servers[0].adapters.keys() == {"b", "f", "c"}
    assert (routed(made.fleet)["a"], routed(made.fleet)["c"]) == ({"gpu-1": 1.0}, {"gpu-0": 1.0})


def test_a_server_stops_after_its_requests(
    made: Acting,
    servers: list[StandIn],  # noqa: F811
) -> None:
    """A server with requests in flight, or with routes because an adapter could not be loaded elsewhere, stays on."""
    done: list[object] = []
    made._stop = done.append  # type: ignore[method-assign]
    routes = {name: {1: 1.0} for name in "abf"}
    move = Change(0.0, load=tuple((1, name) for name in "abf"), route=routes, stop=(0,))
    servers[1].faults = [(LOAD, 1, "400")]
    made.fleet = replace(made.fleet, limits=replace(made.fleet.limits, tries=1))
    assert len(made.carry_out(move)) == 1
    assert made.stopped() == {0: "stop gpu-0: not done, it still has the requests of 'a'."}
    servers[1].faults, servers[0].busy = [], {"f"}
    assert made.carry_out(replace(move, load=((1, "a"),))) == []
    assert made.stopped() == {}, "it waits for 'f', while other changes are made"
    made.stopping[0] -= 1.0 + made.fleet.limits.drain_s
    assert made.stopped() == {0: "stop gpu-0: Requests did not end within 0.4 s; it stays on."}
    assert done == []
    servers[0].busy = set()
    made.carry_out(Change(0.0, stop=(0,)))
    assert (made.stopped(), done, made.stopping) == ({0: ""}, [0], {})


def test_a_step_that_a_restart_made_impossible_has_failed(
    made: Acting,
    servers: list[StandIn],  # noqa: F811
) -> None:
    """A server that lost its adapters since the changes were planned gets no routes to them, and that is no success."""
    (route,) = act.ordered([{"a": 1.0}, {"a": 0.0}], [{"a": 0.5}, {"a": 0.5}])
    servers[1].adapters.clear()
    assert act.apply(made, [route], "test") == ["'a' is not on all its new servers and stays as it is."]
    assert routed(made.fleet)["a"] == {"gpu-0": 1.0}


def test_adapters_that_leave_together_are_waited_for_together(
    made: Acting,
    servers: list[StandIn],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time for requests to end is that of a change, not of each adapter that leaves: their routes end at once."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda s: setattr(clock, "now", clock.now + s)
    monkeypatch.setattr(act, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep, time=lambda: 0.0))
    servers[0].busy = {"a", "b", "f"}
    assert len(made.carry_out(Change(0.0, unload=tuple((0, name) for name in "abf")))) == 3
    assert clock.now < 2.0 * made.fleet.limits.drain_s


def test_a_server_whose_metrics_take_long_is_seldom_asked_for_them(
    made: Acting,
    servers: list[StandIn],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server gives no output while it renders a page: a page of a second is read a few times a minute, however many
    adapters leave, and those that are idle leave at once."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda s: setattr(clock, "now", clock.now + s)
    monkeypatch.setattr(act, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep, time=lambda: 0.0))
    monkeypatch.setattr(act, "page_of", lambda text: (clock.sleep(1.0), page_of(text))[1])
    made.fleet = replace(made.fleet, limits=replace(made.fleet.limits, drain_s=60.0))
    servers[0].busy = {"f"}
    assert len(made.carry_out(Change(0.0, unload=tuple((0, name) for name in "abf")))) == 1
    assert servers[0].adapters.keys() == {"f"}
    assert servers[0].counts["/metrics"] <= 12


def test_adapters_from_other_paths_are_said(
    made: Acting,
    said: list[str],
    servers: list[StandIn],  # noqa: F811
) -> None:
    """A server that holds an old version of an adapter under its name goes on with it, and not without a word."""
    servers[0].adapters["a"] = "/old/a"
    made.say_changed(made.look())
    assert said[-1].endswith("and left so: 'a' on gpu-0 from '/old/a' instead of '/adapters/a'")
    servers[0].adapters["a"] = "/adapters/a"
    said.clear()
    made.say_changed(made.look())
    assert said == []


def test_what_another_hand_did_is_said_before_the_changes(
    made: Acting,
    said: list[str],
    servers: list[StandIn],  # noqa: F811
    plan_of: Callable[..., Plan],  # noqa: F811
) -> None:
    """Another packer with another state file, or a restart, changed what the state says."""
    servers[1].adapters = {"own": "/adapters/own"}
    acting = Acting(plan_of([{"a": 1.0}, {"c": 1.0}]), made.fleet, said.append)
    acting.changes()
    assert said[-1].startswith("gpu-1 does not hold what packer left there: 'own' came, ")
    acting.adopt(acting.placement(acting.look()), "test")
    said.clear()
    acting.changes()
    assert said == []
