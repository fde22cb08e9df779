"""Servers of two plans are matched so that most adapters stay, and moves are ordered so that every one has room."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from packer.bin import Bin
from packer.errors import ValidationError
from packer.moves import Move, match, moved, ordered
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


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_moves_never_exceed_the_room_and_end_where_they_should(data: st.DataObject) -> None:
    """After each step no server holds more than its room; an adapter is off only if no server had room."""
    servers = data.draw(st.integers(1, 5))
    place = st.one_of(st.none(), st.integers(0, servers - 1))
    wanted = data.draw(st.lists(st.tuples(place, place), max_size=25))
    moves = [Move(f"a{i}", a, b) for i, (a, b) in enumerate(wanted) if a != b]
    spare = data.draw(st.integers(0, 2))
    held = {k: sum(a == k for a, _ in wanted) for k in range(servers)}
    room = {k: max(held[k], sum(b == k for _, b in wanted)) + spare for k in range(servers)}
    at = {f"a{i}": a for i, (a, _) in enumerate(wanted)}
    for step in ordered(moves, held, room):
        assert step
        free = {k: room[k] - sum(place == k for place in at.values()) for k in room}
        for move in step:
            assert at[move.adapter] == move.source
            if move.target is not None:
                free[move.target] -= 1
            elif wanted[int(move.adapter[1:])][1] is not None:
                assert all(left <= 0 for left in free.values())
        assert min(free.values()) >= 0
        at |= {move.adapter: move.target for move in step}
    assert [at[f"a{i}"] for i in range(len(wanted))] == [b for _, b in wanted]


def test_a_circle_goes_by_way_of_a_server_with_room() -> None:
    """Two adapters that change places on full servers need a third server; without one, an adapter is unloaded."""
    swap = [Move("a", 0, 1), Move("b", 1, 0)]
    by = ordered(swap, {0: 1, 1: 1, 2: 0}, {0: 1, 1: 1, 2: 1})
    assert by == [[Move("a", 0, 2)], [Move("b", 1, 0)], [Move("a", 2, 1)]]
    off = ordered(swap, {0: 1, 1: 1}, {0: 1, 1: 1})
    assert off == [[Move("a", 0, None)], [Move("b", 1, 0)], [Move("a", None, 1)]]


def test_moves_that_end_beyond_the_room_are_refused() -> None:
    """Two adapters do not end on a server with room for one."""
    with pytest.raises(ValidationError, match="at most 1 adapters on server 0 in the end, got 2"):
        ordered([Move("a", 1, 0), Move("b", None, 0)], {1: 1}, {0: 1, 1: 1})
