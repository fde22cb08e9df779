"""What `packer live follow` does about room, kinds of servers, adapters that leave its fleet, and the base model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import packer
from packer.change import Change
from packer.errors import IncompatibleError
from packer.live.act import Acting
from packer.live.fleet_file import Host, LiveFleet, RouterFile
from packer.operate.follow import Following
from packer.operate.keeper import Decision
from packer.plan import Plan
from tests.live.stand_in import StandIn
from tests.operate.test_follow import FAST, _short, following, plan, routes, servers  # noqa: F401 - fixtures
from tests.operate.test_follow_faults import look


def test_a_base_model_that_leaves_the_fleet_is_not_unloaded(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """Every server goes on with its base model, whether the fleet has requests for it or not."""
    loop = following()
    fleet, base = loop.fleet, servers[0].base
    loop.serve(replace(fleet, adapters=(*fleet.adapters, packer.Adapter(base, 0, 0.1))))
    loop.step(0.0)
    loop.serve(fleet)
    loop.step(60.0)
    assert loop.last_error == ""
    assert not [body for each in servers for path, body in each.calls if "unload" in path]


def test_a_base_model_that_comes_to_the_fleet_keeps_its_share(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """Pages name no requests to the base model, also where the fleet has them only since a while: that it is never
    named takes nothing from its load."""
    loop = following()
    base, rate = servers[0].base, float(loop.fleet.rates.sum())
    loop.serve(replace(loop.fleet, adapters=(*loop.fleet.adapters, packer.Adapter(base, 0, rate))))
    for minute in range(25):
        for each in servers:
            each.counters = (
                f"vllm:prompt_tokens_total {6e4 * minute}\nvllm:generation_tokens_total 0\n"
                'vllm:num_requests_running 20\nvllm:lora_requests_info{max_lora="4",running_lora_adapters='
                f'"{",".join(each.adapters)}",waiting_lora_adapters=""}} {4e9 + minute}\n'
            )
        loop.step(60.0 * minute)
    assert loop.load[-1] / loop.load.sum() == pytest.approx(0.5, abs=0.05)


def test_adapters_that_are_not_of_the_fleet_take_room(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """No adapter is placed on a server that others fill; it is named as one without room."""
    servers[0].adapters["other"] = "/adapters/other"
    loop = following()
    acting = loop.acting
    hosts = tuple(replace(each, room=3) for each in acting.fleet.servers)
    acting = Acting(acting.plan, replace(acting.fleet, servers=hosts))
    loop = Following(acting, loop.fleet, 1.0)
    acting.adopt(acting.placement(acting.look()), "test")
    loop.step(0.0)
    servers[1].close()
    for time_s in (60.0, 120.0):
        loop.step(time_s)
    assert "no server has room for 2 adapters: a2, a3" in loop.last_error
    assert "not done" not in loop.last_error


def test_the_last_routes_stay_in_the_router_file(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Where all adapters leave and no new one can be loaded, there are no routes to write, and the loop goes on."""
    loop = following()
    loop.step(0.0)
    for each in servers:
        each.faults = [("/v1/load_lora_adapter", 0, "400")]
    loop.serve(replace(loop.fleet, adapters=(packer.Adapter("new", 8, 0.1),)))
    loop.step(60.0)
    assert "load 'new' on" in loop.last_error
    assert not any(each.adapters for each in servers)
    for each in servers:
        each.faults = []
    loop.step(120.0)
    assert set(routes(tmp_path)) == {"new"}


def test_an_adapter_that_replaces_another_on_full_servers_comes_at_once(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    tmp_path: Path,
) -> None:
    """What leaves the fleet makes room before the new adapter is loaded, not at the next look."""
    loop = following()
    for s, server in enumerate(loop.acting.servers):
        loop.acting.servers[s] = replace(server, host=replace(server.host, room=2))
    loop.keeper.rooms = [2, 2]
    loop.step(0.0)
    loop.serve(replace(loop.fleet, adapters=(*loop.fleet.adapters[1:], packer.Adapter("new", 8, 0.1))))
    loop.step(60.0)
    assert (loop.last_error, set(servers[0].adapters)) == ("", {"a1", "new"})
    assert routes(tmp_path)["new"] == ["gpu-0"]


@pytest.mark.parametrize("room", [2, 3])
def test_a_server_that_comes_back_is_routed_again(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
    room: int,
) -> None:
    """Adapters for which no other server had room lose their routes with their server, and get them back with it."""
    loop = following()
    loop.keeper.rooms = [room, room]
    loop.step(0.0)
    port, held = servers[1].http.server_port, servers[1].adapters
    servers[1].close()
    loop.step(60.0)
    assert len(routes(tmp_path)) == room
    servers[1] = StandIn(held, plan.bins[0].profile.model.name, port)
    loop.step(120.0)
    assert set(routes(tmp_path)) == set(plan.workload.names)


def test_servers_without_known_capacity_end_no_loop(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """Servers that answer, but that other adapters fill, have no load by which their capacity could be simulated."""
    for each in servers:
        each.adapters = {"other": "/adapters/other"}
    loop = following()
    loop.keeper.rooms = [1, 1]
    assert loop.step(0.0) == []
    assert "no server has room for 4 adapters" in loop.last_error


def test_a_dry_run_says_once_which_adapters_would_leave(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """Adapters that are no longer in the fleet would be unloaded, and nothing is."""
    loop = following(dry_run=True)
    loop.step(0.0)
    loop.serve(replace(loop.fleet, adapters=loop.fleet.adapters[1:]))
    (left,) = loop.step(60.0)
    assert (left.why, left.change.unload) == ("adapters left the fleet", ((0, "a0"),))
    assert loop.step(120.0) == []
    assert set(servers[0].adapters) == {"a0", "a1"}


def test_servers_are_of_the_kind_whose_adapters_they_hold(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Servers in another order than the plan's are followed as what they are; one of no kind of the plan is refused."""
    few, many = (
        replace(item, settings=replace(item.settings, max_loras=n)) for item, n in zip(plan.bins, (2, 4), strict=True)
    )
    fleet = LiveFleet(tuple(Host(each.url) for each in reversed(servers)), None, FAST, state=str(tmp_path / "state"))
    loop = Following(Acting(replace(plan, bins=(few, many)), fleet), plan.workload, 1.0)
    for each, slots in zip(servers, (2, 4), strict=True):
        each.slots, each.longest = slots, 131072
    assert loop.check(loop.acting.look()) == {}
    assert [kind.max_loras for kind in loop.keeper.kinds] == [4, 2]
    assert [each.counts["/metrics"] for each in servers] == [1, 1]
    servers[0].slots = 8
    (why,) = loop.check(loop.acting.look()).values()
    assert why.startswith("Server 1 does not fit the plan: gpu-1 was started with max_loras 8")


def test_a_fleet_with_other_ranks_is_another_fleet(
    following: Callable[..., Following],  # noqa: F811
) -> None:
    """What the file of the fleet says about an adapter counts, also where the names are the same and the servers that
    hold it should take no such rank."""
    loop = following()
    other = replace(loop.fleet, adapters=tuple(replace(each, rank=16) for each in loop.fleet.adapters))
    look(loop, lambda: other)
    assert (loop.keeper.workload.ranks.tolist(), loop.last_error) == ([16] * 4, "")


def test_a_server_that_waits_to_stop_delays_nothing(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """While the last requests of a server end, looks go on, new adapters go elsewhere, and it stops after them."""
    loop = following()
    loop.acting.servers[1] = replace(
        loop.acting.servers[1], host=replace(loop.acting.servers[1].host, stop="true", start="true")
    )
    loop.acting.fleet = replace(loop.acting.fleet, limits=replace(FAST, drain_s=60.0))
    loop.step(0.0)
    servers[1].busy = {"a2"}
    routes = {name: {0: 1.0} for name in ("a2", "a3")}
    loop.acting.carry_out(Change(0.0, load=((0, "a2"), (0, "a3")), route=routes, stop=(1,)))
    loop.keeper.on[1] = loop.keeper.expected[1] = False
    loop.serve(replace(loop.fleet, adapters=(*loop.fleet.adapters, packer.Adapter("new", 8, 0.1))))
    loop.step(60.0)
    assert "new" in servers[0].adapters
    assert (loop.keeper.serving, loop.last_error, list(loop.acting.stopping)) == ([0], "", [1])
    servers[1].busy = set()
    loop._stop(61.0)
    assert (loop.acting.stopping, loop._leaving) == ({}, {1: 121.0})


def test_another_fleet_forgets_no_loads_and_no_reserve(
    following: Callable[..., Following],  # noqa: F811
) -> None:
    """A file of the fleet that often gets new rates neither ends the limit on loads nor keeps servers from a stop."""
    loop = following()
    loop.step(0.0)
    loop.keeper._made, loop.keeper._spare_since_s = [(0.0, 7)], 0.0
    loop.serve(loop.fleet.scaled(0.9))
    assert loop.keeper.workload.rate == pytest.approx(0.9 * 0.8)
    assert (loop.keeper._made, loop.keeper._spare_since_s) == ([(0.0, 7)], 0.0)


def test_an_adapter_that_cannot_leave_takes_room(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """While requests keep an adapter on a full server that left the fleet, another server gets the new one."""
    loop = following()
    loop.acting.servers[0] = replace(loop.acting.servers[0], host=replace(loop.acting.servers[0].host, room=2))
    loop.keeper.rooms = [2, None]
    loop.step(0.0)
    servers[0].busy = {"a0"}
    loop.serve(replace(loop.fleet, adapters=(*loop.fleet.adapters[1:], packer.Adapter("new", 8, 0.1))))
    loop.step(60.0)
    assert "not done, the server has room for 2 adapters" in loop.last_error
    loop.step(120.0)
    assert "new" in servers[1].adapters


def test_a_server_that_is_stopped_gets_no_adapters_while_it_ends(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command may return before its server is gone: what still answers does not serve, and its end is no error."""
    loop = following()
    loop.acting.servers[1] = replace(
        loop.acting.servers[1], host=replace(loop.acting.servers[1].host, stop="true", start="true")
    )
    loop.step(0.0)
    routes = {name: {0: 1.0} for name in ("a2", "a3")}
    stop = Decision(Change(0.0, load=((0, "a2"), (0, "a3")), route=routes, stop=(1,)), "test")
    with monkeypatch.context() as patched:
        patched.setattr(loop.keeper, "decide", lambda *_: [stop])
        loop.step(60.0)
    loop.keeper.on[1] = loop.keeper.expected[1] = False
    loop.step(60.9)
    assert (loop.keeper.serving, loop.ready.tolist()) == ([0], [True, False])
    loop.step(70.0)
    assert loop.keeper.serving == [0, 1], "it did not end"
    loop._leaving = {1: 1e9}
    port, held = servers[1].http.server_port, servers[1].adapters
    servers[1].close()
    loop.step(80.0)
    servers[1] = StandIn(held, loop.acting.plan.bins[0].profile.model.name, port)
    loop.step(90.0)
    assert loop.ready[1], "it ended and was started again"


def test_fleets_of_several_models_are_not_followed(
    following: Callable[..., Following],  # noqa: F811
    plan: Plan,  # noqa: F811
) -> None:
    """An adapter runs on servers of its base model alone: the command ends before its first look, and a file of the
    fleet with another model is not served."""
    loop = following()
    llamas = tuple(replace(each, model="llama") for each in plan.workload.adapters)
    mixed = replace(plan.workload, adapters=(*llamas, packer.Adapter("q", 8, 0.1, model="qwen")))
    for follow in (lambda: Following(loop.acting, mixed, 1.0), lambda: loop.serve(mixed)):
        with pytest.raises(IncompatibleError, match="got those of llama, qwen: follow a plan of each"):
            follow()
    assert loop.fleet == plan.workload


def test_a_server_serves_the_base_model_under_the_name_of_the_fleet(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
) -> None:
    """Requests to another name of the base model would be refused by every server."""
    loop = following()
    fleet = replace(plan.workload, adapters=(*plan.workload.adapters, packer.Adapter("plain", 0, 0.1)))
    bins = tuple(replace(item, adapters=(*item.adapters, 4), shares=()) for item in plan.bins)
    acting = Acting(replace(plan, workload=fleet, bins=bins), loop.acting.fleet)
    with pytest.raises(IncompatibleError, match=f"not serve 'plain', the fleet's base model, but '{servers[0].base}'"):
        acting.changes()


def test_without_a_state_the_routes_are_those_of_the_plan(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers that the plan's own commands started keep its shares; what a server lacks goes to the others."""
    first, last = plan.bins
    bins = (
        replace(first, adapters=(0, 1, 2), shares=(1.0, 0.8, 0.3)),
        replace(last, adapters=(1, 2, 3), shares=(0.2, 0.7, 1.0)),
    )
    for each, own in zip(servers, ((0, 1), (1, 2, 3)), strict=True):
        each.adapters = {f"a{k}": f"/adapters/a{k}" for k in own}
    fleet = LiveFleet(
        tuple(Host(each.url) for each in servers), RouterFile("routing", str(tmp_path / "router")), FAST,
        state=str(tmp_path / "state.json"),
    )  # fmt: skip
    monkeypatch.setattr(Following, "_loop", lambda *_: None)
    Following(Acting(replace(plan, bins=bins), fleet), plan.workload).run(lambda _: None)
    shares = json.loads((tmp_path / "state.json").read_text())["servers"]
    assert shares == {"gpu-0": {"a0": 1.0, "a1": 0.8}, "gpu-1": {"a1": 0.2, "a2": 1.0, "a3": 1.0}}
