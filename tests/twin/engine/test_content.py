"""Blocks are looked for one by one exactly as far as another request of the same adapter begins alike."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packer.blocks import Blocks
from packer.twin.engine.content import content_of_blocks, content_of_prefixes

Requests = list[tuple[int, list[int]]]


@st.composite
def _requests(draw: st.DrawFn) -> tuple[Requests, int]:
    """Adapters and chained ids of requests, some of which go on where another one stops; a factor of the ids."""
    fresh = iter(range(10_000))
    found: Requests = []
    for _ in range(draw(st.integers(0, 12))):
        ids: list[int] = []
        if found and draw(st.booleans()):
            other = draw(st.sampled_from(found))[1]
            ids = other[: draw(st.integers(0, len(other)))]
        ids = ids + [next(fresh) for _ in range(draw(st.integers(0, 3)))]
        found.append((draw(st.integers(0, 2)), ids))
    return found, draw(st.sampled_from([1, 1_000_003]))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_requests())
def test_shared_ids_are_those_of_two_requests_of_an_adapter(case: tuple[Requests, int]) -> None:
    """A request shares its first k ids if another of its adapter has the k-th; equal ids have equal numbers there."""
    requests, factor = case
    adapter = np.array([a for a, _ in requests], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum([len(ids) for _, ids in requests])]).astype(np.int64)
    flat = np.array([i * factor for _, ids in requests for i in ids], dtype=np.int64)
    content = content_of_blocks(adapter, Blocks(starts, flat, 16))
    pairs: dict[int, tuple[int, int]] = {}
    for r, (a, ids) in enumerate(requests):
        others = {i for k, (b, each) in enumerate(requests) if k != r and b == a for i in each}
        assert content.shared[r] == sum(i in others for i in ids)
        first = content.first[r]
        numbers = content.numbers[first : first + content.shared[r]].tolist()
        for number, i in zip(numbers, ids, strict=False):
            assert 0 <= number < content.total
            assert pairs.setdefault(number, (a, i)) == (a, i)
    assert len(set(pairs.values())) == len(pairs)


def test_prefixes_are_contents_of_their_adapter() -> None:
    """Requests of one adapter share as much as the shorter of their prefixes, others nothing."""
    content = content_of_prefixes(np.array([0, 2, 0]), np.array([3, 2, 1]), 16)
    ids = [content.numbers[content.first[r] : content.first[r] + content.shared[r]].tolist() for r in range(3)]
    assert [len(each) for each in ids] == [3, 2, 1]
    assert ids[2] == ids[0][:1]
    assert not set(ids[1]) & set(ids[0])
