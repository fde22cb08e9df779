"""Placements near the running one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.solvers.nearest import Nearest


def evened(load: list[float], held: list[dict[int, float]], cap: float, most: float, loads: int, room: int) -> Nearest:
    """Servers of one capacity, evened."""
    near = Nearest(np.array(load), held, range(len(held)), rooms=[room] * len(held))
    near.even(np.full(len(held), cap), most, loads)
    return near


def test_a_common_adapter_needs_no_load() -> None:
    """Where both servers hold an adapter its requests change their way, and nothing is loaded."""
    near = evened([100.0, 20.0], [{0: 1.0, 1: 1.0}, {0: 0.0}], 80.0, 0.8, 10, 9)
    assert near.loads == []
    assert near.routes().keys() == {0}
    assert abs(100.0 * near.routes()[0][1] - 60.0) < 1e-9


def test_the_busiest_adapter_is_loaded_and_stays_where_it_was() -> None:
    """One load makes room, and its old copy stays for later."""
    near = evened([60.0, 30.0, 10.0], [{0: 1.0, 1: 1.0, 2: 1.0}, {}], 80.0, 0.8, 10, 9)
    assert near.loads == [(1, 0)]
    assert set(near.routes()[0]) == {0, 1}


@pytest.mark.parametrize(("slots", "then"), [([3, 3], [3, 3]), ([3, 2], [4, 2]), ([5, 3], [5, 1])])
def test_adapters_beyond_the_slots_of_a_server_go_to_free_slots(slots: list[int], then: list[int]) -> None:
    """After a loss, a server that came back gets whole adapters as far as slots go, of a load that makes both even."""
    near = Nearest(np.array([50.0, 40.0, 30.0, 20.0, 10.0, 6.0]), [dict.fromkeys(range(6), 1.0), {}], [0, 1])
    assert near.crowds([6, 3]) == near.crowds([3, 0]) == {}  # none has too many, or none has room
    near.even(np.full(2, 1000.0), 0.9, 10, near.crowds(slots))
    assert [sum(map(bool, own.values())) for own in near.held] == then
    assert len(near.loads) == then[1]
    assert slots != [3, 3] or max(near.used()) <= 90.0


def test_a_part_of_an_adapter_joins_its_other_part() -> None:
    """Where no slot is free but at another server, an adapter on two of them leaves the one with too many."""
    near = Nearest(np.full(5, 10.0), [{0: 0.5, 1: 1.0}, {0: 0.5, 2: 1.0}, {3: 1.0, 4: 1.0}, {}], range(4))
    near.even(np.full(4, 1000.0), 0.9, 10, near.crowds([1, 2, 1, 1]))
    assert near.held == [{0: 0.0, 1: 1.0}, {0: 1.0, 2: 1.0}, {3: 1.0, 4: 0.0}, {4: 1.0}]


def test_adapters_without_a_slot_anywhere_keep_no_other_server_overloaded() -> None:
    """Once no slot is free, a server that still has too many adapters stays as it is, and load leaves the others."""
    load = np.array([60.0] * 6 + [5.0, 5.0, 400.0] + [250.0] * 3)
    held = [dict.fromkeys(range(6), 1.0), {6: 1.0, 7: 1.0, 8: 0.1}, {8: 0.9, 9: 1.0, 10: 1.0, 11: 1.0}]
    near = Nearest(load, held, range(3))
    near.even(np.full(3, 1000.0), 0.9, 10, near.crowds([4, 4, 4]))
    assert len(near.loads) == 1
    assert max(near.used()) <= 900.0


def test_an_emptied_server_leaves_its_shares_to_copies_and_loads_the_rest() -> None:
    """A copy that is there takes the share; an adapter without one is loaded; without room nothing changes."""
    held = [{0: 0.5, 1: 1.0}, {0: 0.5, 2: 1.0}]
    near = Nearest(np.array([10.0, 5.0, 1.0]), held, [0, 1])
    assert near.empty(0, np.ones(2))
    assert (near.loads, near.held) == ([(1, 1)], [{}, {0: 1.0, 1: 1.0, 2: 1.0}])
    full = Nearest(np.array([10.0, 5.0, 1.0]), held, [0, 1], rooms=[2, 2])
    assert not full.empty(0, np.ones(2))
    assert (full.loads, full.held) == ([], held)


def test_what_finds_no_room_is_left_and_the_base_model_needs_none() -> None:
    """The heaviest adapters get the room; the rest is named, and the base model is placed whatever the room."""
    near = Nearest(np.array([1.0, 5.0, 9.0, 2.0]), [{3: 1.0}], [0], rooms=[2], roomless=[0])
    near.place_rest()
    assert (near.loads, near.left) == ([(0, 2), (0, 0)], [1])


def test_idle_copies_of_a_lost_server_share_its_adapters() -> None:
    """Each adapter goes to one of its copies, by load: with all of them on all servers, slots would hold fewer. The
    base model, which needs no slot, goes to all."""
    held = [{1: 0.0, 2: 0.0, 3: 0.0, 0: 0.0}, {1: 0.0, 2: 0.0, 3: 0.0, 0: 0.0}]
    near = Nearest(np.array([2.0, 5.0, 3.0, 1.0]), held, [0, 1], roomless=[0])
    near.place_rest()
    assert (near.loads, near.routes()) == ([], {0: {0: 0.5, 1: 0.5}, 1: {0: 1.0}, 2: {1: 1.0}, 3: {1: 1.0}})


def test_copies_with_requests_leave_for_adapters_without_a_server() -> None:
    """Where all servers are full, the copy with the least load gives its requests to the others of its adapter."""
    held = [{0: 0.5, 1: 0.25}, {0: 0.5, 1: 0.75}]
    near = Nearest(np.array([4.0, 10.0, 1.0]), held, [0, 1], rooms=[2, 2])
    near.place_rest()
    assert (near.loads, near.unloads, near.left) == ([(0, 2)], [(0, 0)], [])
    assert near.held == [{1: 0.25, 2: 1.0}, {0: 1.0, 1: 0.75}]
    assert near.routes() == {0: {1: 1.0}, 2: {0: 1.0}}
    fuller = Nearest(np.array([4.0, 10.0, 1.0]), held, [0, 1], rooms=[1, 0])
    fuller.place_rest()
    assert (fuller.unloads, fuller.left) == ([], [2])


def test_idle_copies_leave_full_servers() -> None:
    """A copy without requests makes room where another one has the requests; the only copy of an adapter stays."""
    held = [{0: 1.0, 1: 0.0}, {1: 1.0, 2: 0.0}]
    near = Nearest(np.array([1.0, 5.0, 0.0, 9.0]), held, [0, 1], rooms=[2, 2])
    near.place_rest()
    assert (near.loads, near.unloads, near.left) == ([(0, 3)], [(0, 1)], [])
    assert near.held == [{0: 1.0, 3: 1.0}, {1: 1.0, 2: 1.0}]
    full = Nearest(np.array([1.0, 5.0, 0.0]), [{0: 1.0}, {1: 1.0, 2: 0.0}], [0, 1], rooms=[2, 2])
    assert not full.empty(1, np.ones(2))
    assert (full.loads, full.unloads) == ([], [])
    held = [{0: 1.0, 1: 0.0}, {1: 1.0, 2: 1.0}, {3: 1.0}]
    needed = Nearest(np.array([1.0, 5.0, 9.0, 4.0]), held, [0, 1, 2], rooms=[2, 2, 2])
    assert needed.empty(1, np.ones(3))
    assert (needed.loads, needed.unloads) == (
        [(2, 2)],
        [],
    )  # the idle copy gets the requests of the emptied server


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0.0, 100.0), min_size=6, max_size=6),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), min_size=6, max_size=6),
    st.integers(0, 4),
    st.integers(2, 6),
)
def test_no_load_is_lost_and_limits_hold(
    load: list[float], places: list[list[int]], most_loads: int, room: int
) -> None:
    """Shares of an adapter sum to 1 on servers that hold it; loads and rooms keep their limits; no server gets worse
    than the worst was."""
    held = [{a: 1.0 / len(own) for a, own in enumerate(places) if s in own} for s in range(3)]
    near = evened(load, held, 90.0, 0.5, most_loads, room)
    loads, shares = near.loads, near.routes()
    assert len(loads) <= most_loads
    after = [dict(own) for own in held]
    for s, a in loads:
        assert a not in after[s]
        after[s][a] = 0.0
    for s, own in enumerate(after):
        assert len(own) <= max(room, len(held[s]))
    for a, parts in shares.items():
        assert abs(sum(parts.values()) - 1.0) < 1e-6
        for s, own in enumerate(after):
            assert a in own or s not in parts
            if a in own:
                own[a] = parts.get(s, 0.0)
    worst = [max(sum(load[a] * x for a, x in own.items()) for own in each) for each in (held, after)]
    assert worst[1] <= worst[0] + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6))
def test_shares_that_come_together_are_no_more_than_the_whole(parts: list[float]) -> None:
    """The last server that holds an adapter serves all of it, not a rounding error more: no change takes that."""
    held = [{0: part / sum(parts)} for part in parts]
    near = Nearest(np.array([10.0]), held, range(len(parts)))
    for s in range(len(parts) - 1):
        assert near.empty(s, np.ones(len(parts)))
    assert near.held[-1][0] <= 1.0
    assert abs(near.held[-1][0] - 1.0) < 1e-9
    assert type(near.held[-1][0]) is float


@pytest.mark.parametrize(("capacity", "to"), [(6.0, 1), (5.0, 2), (1.0, 1)])
def test_an_emptied_server_keeps_limits_apart(capacity: float, to: int) -> None:
    """Its adapters go to the server with the nearest limits, as those of a lost one, though another has less load;
    unless only the other has the capacity."""
    near = Nearest(np.array([1.0, 5.0, 1.0]), [{0: 1.0}, {1: 1.0}, {2: 1.0}], [0, 1, 2], order=[1, 1, 0])
    assert near.empty(0, np.full(3, capacity))
    assert near.held[to] == {to: 1.0, 0: 1.0}


def test_a_server_that_failed_to_load_an_adapter_comes_last() -> None:
    """Where it did not load before, it may not load again: another server is tried first, with more load."""
    held = [{0: 1.0}, {1: 1.0}, {2: 1.0}]
    near = Nearest(np.array([1.0, 5.0, 2.0]), held, [0, 1, 2], refused=[(2, 0)])
    assert near.empty(0, np.ones(3))
    assert near.held[1] == {1: 1.0, 0: 1.0}
    new = Nearest(np.array([1.0, 5.0, 2.0]), [{1: 1.0}, {2: 1.0}], [0, 1], refused=[(1, 0)])
    new.place_rest()
    assert new.held[0] == {1: 1.0, 0: 1.0}
