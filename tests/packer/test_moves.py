"""Servers of two plans are matched so that most adapters stay, and moves are ordered so that every one has room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from packer.bin import Bin
from packer.change import Change
from packer.errors import IncompatibleError
from packer.moves import Placement, aligned, match, moved, moves_of, ordered
from packer.testing.analytic import small_profile

PROFILE = small_profile()


def bins_of(places: list[int], n: int) -> list[Bin]:
    """Servers of adapters by the number of their server; those without any are left out."""
    rows = [tuple(i for i, place in enumerate(places) if place == k) for k in range(n)]
    return [Bin(row, PROFILE.settings(len(row), 8), PROFILE) for row in rows if row]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_as_many_adapters_stay_as_an_assignment_allows(data: st.DataObject) -> None:
    """No other matching of servers keeps more adapters in place, and each server continues one at most."""
    n = data.draw(st.integers(1, 30))
    servers = data.draw(st.integers(1, 6))
    place = st.lists(st.integers(0, servers - 1), min_size=n, max_size=n)
    old, new = bins_of(data.draw(place), servers), bins_of(data.draw(place), servers)
    kept = np.array([[len({*a.adapters} & {*b.adapters}) for b in old] for a in new])
    rows, columns = linear_sum_assignment(-kept)
    becomes = match(old, new)
    assert len(set(becomes.values())) == len(becomes)
    assert sum(int(kept[k, j]) for k, j in becomes.items()) == int(kept[rows, columns].sum())
    assert len(moved(old, new)) == n - int(kept[rows, columns].sum())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_running_servers_keep_their_order(data: st.DataObject) -> None:
    """Servers that were put in the order of the running ones are not numbered anew by another matching as good."""
    n, servers = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 6))
    place = st.lists(st.integers(0, servers - 1), min_size=n, max_size=n)
    old, new = bins_of(data.draw(place), servers), bins_of(data.draw(place), servers)
    numbers = [j for j in moves_of(old, aligned(old, new)).servers if j is not None]
    assert numbers == sorted(numbers)


def test_a_server_with_a_part_of_an_adapter_goes_on_as_itself() -> None:
    """An adapter on several servers stays on each of them, and servers that keep equally many keep their order."""

    def part(share: float, *whole: int) -> Bin:
        return Bin((0, *whole), PROFILE.settings(1, 8), PROFILE, (share, *(1.0 for _ in whole)))

    old = [part(0.25, 1, 2), part(0.25, 3, 4), part(0.5)]
    new = [part(0.25, 1, 2), part(0.25, 3), part(0.25, 4), part(0.25)]
    assert match(old, old) == {0: 0, 1: 1, 2: 2}
    assert match(old, new) == {0: 0, 1: 1, 2: 2}
    assert moves_of(old, new).adapters == (0, 4)


def followed(
    now: Placement, goal: Placement, changes: list[Change], room: list[int | None]
) -> tuple[list[set[str]], dict[str, dict[int, float]]]:
    """Carry out changes one step at a time, checking the rules that make them safe."""
    held = [set(placed) for placed in now]
    routes: dict[str, dict[int, float]] = {}
    for s, placed in enumerate(now):
        for name, share in placed.items():
            if share:
                routes.setdefault(name, {})[s] = share
    for change in changes:
        for s, name in change.load:
            assert name not in held[s]
            held[s].add(name)
            limit = room[s]
            assert limit is None or len(held[s]) <= max(limit, len(now[s]))
        for name, shares in change.route.items():
            assert sum(shares.values()) == pytest.approx(1.0)
            assert all(name in held[s] for s in shares), "a route leads to a server without the adapter"
            routes[name] = dict(shares)
        for s, name in change.unload:
            assert s not in routes.get(name, {}) or not any(name in placed for placed in goal)
            held[s].discard(name)
    return held, routes


def test_an_adapter_is_on_its_new_server_before_it_leaves_the_old_one() -> None:
    """A move loads, then routes, then unloads."""
    (change,) = ordered([{"a": 1.0}, {}], [{}, {"a": 1.0}])
    assert change == Change(0.0, load=((1, "a"),), route={"a": {1: 1.0}}, unload=((0, "a"),))


def test_a_move_waits_for_the_room_that_another_makes() -> None:
    """A full server first loses an adapter, which needs a place itself."""
    now: Placement = [{"a": 1.0}, {"b": 1.0}, {}]
    goal: Placement = [{}, {"a": 1.0}, {"b": 1.0}]
    changes = ordered(now, goal, [1, 1, 1])
    assert [change.load for change in changes] == [((2, "b"),), ((1, "a"),)]


def test_a_circle_goes_by_way_of_a_free_slot() -> None:
    """Two full servers that exchange adapters need a third place for a moment."""
    now: Placement = [{"a": 1.0}, {"b": 1.0}, {}]
    goal: Placement = [{"b": 1.0}, {"a": 1.0}, {}]
    held, routes = followed(now, goal, ordered(now, goal, [1, 1, 1]), [1, 1, 1])
    assert held == [{"b"}, {"a"}, set()]
    assert routes == {"a": {1: 1.0}, "b": {0: 1.0}}


def test_a_circle_uses_a_replica() -> None:
    """An adapter with a second copy gives up the first one early."""
    now: Placement = [{"a": 0.5}, {"a": 0.5, "b": 1.0}]
    goal: Placement = [{"b": 1.0}, {"a": 1.0}]
    held, _ = followed(now, goal, ordered(now, goal, [1, 2]), [1, 2])
    assert held == [{"b"}, {"a"}]


def test_full_servers_without_a_way_are_refused() -> None:
    """Nothing is done where no order keeps every adapter served."""
    with pytest.raises(IncompatibleError, match="full"):
        ordered([{"a": 1.0}, {"b": 1.0}], [{"b": 1.0}, {"a": 1.0}], [1, 1])
    with pytest.raises(IncompatibleError, match="at most 1 adapter on left, for which it has room, got 2"):
        ordered([{}], [{"a": 1.0, "b": 1.0}], [1], names=["left"])


def test_adapters_that_the_plan_does_not_name_stay() -> None:
    """Only `prune` takes away what the plan does not know."""
    now: Placement = [{"a": 1.0, "other": 1.0}]
    assert ordered(now, [{"a": 1.0}]) == []
    (change,) = ordered(now, [{"a": 1.0}], prune=True)
    assert change.unload == ((0, "other"),)


placements = st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.just(1.0), max_size=6), min_size=2, max_size=4)


def whole(placed: list[dict[str, float]]) -> list[dict[str, float]]:
    """With shares that sum to 1."""
    counts = {name: sum(name in own for own in placed) for own in placed for name in own}
    return [{name: 1.0 / counts[name] for name in own} for own in placed]


@settings(max_examples=150, deadline=None)
@given(placements, placements, st.integers(0, 2))
def test_every_order_keeps_adapters_served(
    before: list[dict[str, float]], after: list[dict[str, float]], spare: int
) -> None:
    """Whatever moves, routes lead to holders, room is kept, and the goal is reached."""
    count = max(len(before), len(after))
    now, goal = (whole([*each, *({} for _ in range(count - len(each)))]) for each in (before, after))
    room: list[int | None] = [max(len(now[s]), len(goal[s])) + spare for s in range(count)]
    try:
        changes = ordered(now, goal, room, prune=True)
    except IncompatibleError:
        assert spare == 0
        return
    held, routes = followed(now, goal, changes, room)
    assert held == [set(placed) for placed in goal]
    for name in {name for placed in goal for name in placed}:
        assert routes[name] == {s: placed[name] for s, placed in enumerate(goal) if name in placed}
