"""Load moved between servers with few loads."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.operate.spread import spread

ALL = [[True] * 6] * 3


def test_a_common_adapter_needs_no_load() -> None:
    """Where both servers hold an adapter its requests change their way, and nothing is loaded."""
    load = np.array([100.0, 20.0])
    held = [{0: 1.0, 1: 1.0}, {0: 0.0}]
    loads, shares = spread(load, np.array([80.0, 80.0]), held, [[True] * 2] * 2, [None, None], 0.8, 10)
    assert loads == []
    assert shares.keys() == {0}
    assert abs(100.0 * shares[0][1] - 60.0) < 1e-9


def test_the_busiest_adapter_is_loaded_and_stays_where_it_was() -> None:
    """One load makes room, and its old copy stays for later."""
    load = np.array([60.0, 30.0, 10.0])
    loads, shares = spread(
        load, np.array([80.0, 80.0]), [{0: 1.0, 1: 1.0, 2: 1.0}, {}], [[True] * 3] * 2, [None, None], 0.8, 10
    )
    assert loads == [(1, 0)]
    assert set(shares[0]) == {0, 1}


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
    loads, shares = spread(np.array(load), np.full(3, 90.0), held, ALL, [room] * 3, 0.5, most_loads)
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
