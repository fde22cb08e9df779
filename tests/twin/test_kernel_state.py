"""The small data structures of the step loop against lists and sums."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.twin.kernel_state import (
    count_before,
    fenwick_add,
    heap_pop,
    heap_push,
    heap_update,
    link_last,
    new_state,
    unlink,
)

M = 12


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "update"]), st.integers(0, M - 1), st.integers())))
@settings(deadline=None)
def test_heap_keeps_the_smallest_key_first(actions: list[tuple[str, int, int]]) -> None:
    """After any pushes, removals and changes of keys the first adapter has the smallest key."""
    heap, place, key = np.zeros(M, np.int64), np.full(M, -1, np.int64), np.zeros(M, np.int64)
    size, members = 0, set()
    for action, a, number in actions:
        if action == "push" and a not in members:
            key[a] = number % 100
            size = heap_push(heap, size, place, key, a)
            members.add(a)
        elif action == "pop" and a in members:
            size = heap_pop(heap, size, place, key, place[a])
            members.remove(a)
        elif action == "update" and a in members:
            key[a] = number % 100
            heap_update(heap, size, place, key, place[a])
        assert set(heap[:size].tolist()) == members
        assert all(heap[place[b]] == b for b in members)
        assert not members or key[heap[0]] == min(key[b] for b in members)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-3, 3))))
@settings(deadline=None)
def test_tree_counts_what_comes_before(changes: list[tuple[int, int]]) -> None:
    """The tree's sum before an index is that of a plain array."""
    tree, plain = np.zeros(42, np.int64), np.zeros(41, np.int64)
    for i, change in changes:
        fenwick_add(tree, i, change)
        plain[i] += change
    assert [count_before(tree, i) for i in range(42)] == [plain[:i].sum() for i in range(42)]


@given(st.lists(st.integers(0, 9)))
@settings(deadline=None)
def test_ring_keeps_the_order_of_arrival(toggles: list[int]) -> None:
    """A ring around its sentinel lists its members in the order in which they were appended."""
    before, after = np.full(11, 10, np.int64), np.full(11, 10, np.int64)
    members: list[int] = []
    for i in toggles:
        if i in members:
            unlink(before, after, i)
            members.remove(i)
        else:
            link_last(before, after, 10, i)
            members.append(i)
        forward, backward, at, back = [], [], after[10], before[10]
        while at != 10:
            forward.append(int(at))
            at = after[at]
        while back != 10:
            backward.append(int(back))
            back = before[back]
        assert forward == members == backward[::-1]


def test_new_state_is_empty() -> None:
    """Fresh arrays hold no request: every ring is its sentinel, and only what is asked for is counted."""
    state = new_state(5, 3, longest_output=7, block_size=4, bins=2, count_waiting=False)
    assert state.links[:, 5].tolist() == [5, 5]
    assert state.due[:, 5:].tolist() == [list(range(5, 14))] * 2
    assert state.adapter_links[3:, 3].tolist() == [3, 3]
    assert state.tree.size == 1
    assert new_state(5, 3, 7, 4, 2, count_waiting=True).tree.size == 6
