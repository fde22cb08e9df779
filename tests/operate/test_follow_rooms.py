"""What `packer live follow` does about adapters that are not of its fleet, and about the base model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import packer
from packer.operate.follow import Following
from tests.live.stand_in import StandIn
from tests.operate.test_follow import _short, following, plan, servers  # noqa: F401 - fixtures


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
