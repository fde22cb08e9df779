"""The walk over the adapters of a batch has the order of CPython's own sets."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from packer.arrays import IntArray, Record
from packer.twin.engine import walk_order
from packer.twin.engine.state import MEMBER, SERVER, adapters_of, set_places


@njit
def note_leave(server: Record, last_step: int) -> None:
    """The kernel, called as kernels call it."""
    walk_order.note_leave(server, last_step)


@njit
def order(server: Record, adapters: Record, sets: IntArray, members: Record, step: int) -> int:
    """The kernel, called as kernels call it."""
    return walk_order.order(server, adapters, sets, members, step)


@njit
def enter(server: Record, adapters: Record, members: Record) -> None:
    """The kernel, called as kernels call it."""
    walk_order.enter(server, adapters, members)


class Named:
    """What a set orders: an object of known hash."""

    def __init__(self, row: int, value: int) -> None:
        self.row, self.value = row, value

    def __hash__(self) -> int:
        return self.value


def in_order(server: Record, sets: IntArray, row: int) -> list[int]:
    """Members of one of the two sets, in the order of its places."""
    places = sets[row, : server.set_count[row]]
    return list(places[places > 0].tolist())


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=40),
    st.sampled_from([2**61 - 2, 255, 40]),
    st.integers(0, 99),
    st.booleans(),
)
@settings(deadline=None)
def test_order_is_that_of_a_set(changes: list[tuple[int, int]], most: int, seed: int, each: bool) -> None:
    """Adapters join and leave: the order of a step, made at once or in the next one, is that of iterating a set."""
    m = 80
    rng = np.random.default_rng(seed)
    adapters, _ = adapters_of(np.full(m, 8), np.full(m, 0), seed)
    adapters["hash"] %= most  # small hashes collide
    server, members = np.zeros(1, dtype=SERVER)[0], np.zeros(set_places(m), dtype=MEMBER)
    sets = np.zeros((2, len(members)), dtype=np.int64)
    batch: dict[int, Named] = {}
    for step, (leaving, joining) in enumerate(changes):
        server.step = step
        before = [named.row for named in set(batch.values())]
        for a in rng.permutation(sorted(batch))[:leaving].tolist():
            del batch[a]
            adapters[a].in_batch, adapters[a].last_use = 0, step + 1
            note_leave(server, step - 1)
        joiners = [a for a in (1 + rng.permutation(m)[:joining]).tolist() if a not in batch]
        for k, a in enumerate(joiners):
            batch[a] = Named(a, int(adapters[a].hash))
            adapters[a].in_batch, adapters[a].joined = 1, step + 1
            members[k].joining = a
        server.joiners = len(joiners)
        if each or rng.random() < 0.3:
            assert in_order(server, sets, order(server, adapters, sets, members, step - 1)) == before
            enter(server, adapters, members)
            now = [named.row for named in set(batch.values())]
            assert in_order(server, sets, order(server, adapters, sets, members, step)) == now
        else:
            enter(server, adapters, members)


@pytest.mark.parametrize("members", [1, 4, 5, 18, 19, 76, 77, 306, 307, 1000])
def test_places_are_those_that_a_set_grows_to(members: int) -> None:
    """The memory that a set takes tells how many places it has: 16 bytes each, the first 8 are in the object."""
    grown = set(iter(range(members)))
    beyond = sys.getsizeof(grown) - sys.getsizeof(set())
    assert set_places(members) == (beyond // 16 or 8)


def test_hashes_are_of_the_seed() -> None:
    """Every adapter has one hash; the same seed gives the same."""
    ranks = np.full(50, 8)
    first, again, other = (adapters_of(ranks, ranks, seed)[0]["hash"][1:].tolist() for seed in (3, 3, 4))
    assert len(set(first)) == 50
    assert first == again != other
