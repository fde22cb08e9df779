"""Servers with little room to grow get more slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from packer import Adapter, Bin, Plan, Workload
from packer.planning.loop import LITTLE
from packer.planning.rooms import with_room, with_slots
from packer.profile import Profile
from packer.room import LEVELS
from packer.twin import hours as stored
from packer.twin.hours import Hours
from packer.twin.limits import Limit


class Beyond(int):
    """A run: its level less its slots."""

    slo_used = 0.5


@pytest.mark.parametrize(("least", "slots"), [(LITTLE, 4), (math.inf, 6)])
def test_servers_with_room_get_more_slots_where_more_room_is_asked_for(
    server: Profile, monkeypatch: pytest.MonkeyPatch, least: float, slots: int
) -> None:
    """A server that its slots limit at a quarter more of the load has enough room, unless there are GPUs to spare."""
    monkeypatch.setattr(stored, "_run", lambda item, own, _: Beyond(LEVELS.index(round(own.rate, 4)) - item.max_loras))
    monkeypatch.setattr(Hours, "holds", lambda _self, beyond: (beyond <= -1,) * 3)
    monkeypatch.setattr(stored, "limit_of", lambda _at, _help=None: Limit("slots", 1.0, "", ""))
    fleet, hours = Workload([Adapter(f"a{k}", 8, 1.0) for k in range(6)]), Hours()
    items = [Bin((0, 1, 2, 3, 4, 5), server.settings(4, 8), server, (1.0 / 6.0,) * 6)]
    given = hours.rooms(items, fleet)
    assert (given[0].headroom or 0.0) > LITTLE
    made, _ = with_slots(hours, fleet, items, given, lambda _item: True, least)
    assert made[0].max_loras == slots


def test_equal_servers_are_tried_once_with_more_slots(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers with equal parts of the same adapters get the same slots, and no hour is simulated again."""
    asked = list[tuple[int, float]]()

    def run(item: Bin, fleet: Workload, _seed: int) -> Beyond:
        asked.append((item.max_loras, fleet.rate))
        return Beyond(LEVELS.index(round(fleet.rate, 4)) - item.max_loras)

    monkeypatch.setattr(stored, "_run", run)
    monkeypatch.setattr(Hours, "holds", lambda _self, beyond: (beyond <= -1,) * 3)
    monkeypatch.setattr(Hours, "by_chance", lambda *_: False)
    monkeypatch.setattr(stored, "limit_of", lambda _at, _help=None: Limit("slots", 1.0, "", ""))
    fleet, hours = Workload([Adapter(f"a{k}", 8, 1.0) for k in range(4)]), Hours()
    items = [Bin((0, 1, 2, 3), server.settings(2, 8), server, (0.25,) * 4)] * 4
    given = hours.rooms(items, fleet)
    assert {room.headroom for room in given} == {LEVELS[1]}
    made, rooms = with_slots(hours, fleet, items, given, lambda _item: True, LITTLE)
    assert [item.max_loras for item in made] == [4] * 4
    assert {room.headroom for room in rooms} == {LEVELS[3]}
    assert len(asked) == len(set(asked))


def test_learned_predictors_look_at_the_rates_of_the_margin(toy_plan: Callable[..., Plan]) -> None:
    """A plan by a learned predictor holds to the margin for which it was made, as one by the twin does."""
    least: Any = SimpleNamespace(
        twin_of=lambda _profile: None,
        scaled=lambda _fleet, _bins, factor: SimpleNamespace(feasible=[factor <= 1.35]),
    )
    found = with_room(replace(toy_plan(["a", "b"]), margin=0.35, rooms=()), least)
    assert set(found.headroom) == {1.35}
