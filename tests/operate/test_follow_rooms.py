"""What `packer live follow` does about adapters that are not of its fleet, and about the base model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import packer
from packer.live.act import Acting
from packer.operate.follow import Following
from tests.live.stand_in import StandIn
from tests.operate.test_follow import _short, following, plan, routes, servers  # noqa: F401 - fixtures


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
