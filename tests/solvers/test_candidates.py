"""Values of max_loras: all small ones, few between larger ones, none that is of no use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packer.bin import Bin
from packer.profile import Profile
from packer.settings import Settings
from packer.solvers.candidates import (
    EVERY,
    LADDER,
    max_loras_candidates,
    most_slots_of,
    neighbours,
    tried_words,
)
from packer.twin.memory.policy import memory_error


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        (1, (1,)),
        (7, (1, 2, 3, 4, 6, 7)),
        (8, (1, 2, 3, 4, 6, 8)),
        (20, (1, 2, 3, 4, 6, 8, 12, 16, 20)),
        (384, LADDER),
    ],
)
def test_candidates_go_from_one_slot_to_one_for_each_adapter(
    server: Profile, adapters: int, expected: tuple[int, ...]
) -> None:
    """No more slots than adapters are tried, and one slot for each adapter always is."""
    assert max_loras_candidates(adapters, server, 8) == expected

    other = replace(server, engine=replace(server.engine, name="sglang", prefix_caching=None))
    found = max_loras_candidates(adapters, other, 8)
    assert found == tuple(sorted({*expected, max(1, adapters - 1)}))  # requests to the base model take one


def test_proofs_try_every_value_of_small_servers(server: Profile) -> None:
    """And say which ones they tried of larger ones."""
    assert max_loras_candidates(13, server, 8, proof=True) == tuple(range(1, 14))
    found = max_loras_candidates(40, server, 8, proof=True)
    assert found == (*range(1, EVERY + 1), 24, 32, 40)
    words = tried_words(40)
    assert all(f" {value}," in words for value in found[EVERY:-1])


@pytest.mark.parametrize("rank", [8, 64, 320])
def test_no_more_slots_than_the_server_starts_with(server: Profile, rank: int) -> None:
    """The most with which it starts is a candidate, and nothing beyond."""
    most = most_slots_of(server, rank)
    starts = [memory_error(server, server.settings(n, rank)) is None for n in (most, most + 1)]
    assert starts == [True, False]
    assert max_loras_candidates(100_000, server, rank)[-1] == most


@pytest.mark.parametrize(("slots", "steps", "expected"), [
    (8, 2, (16, 12)), (8, -2, (4, 6)), (9, 2, (16, 12)), (9, -1, (8,)), (20, 2, ()), (1, -2, ()), (1, 1, (2,)),
])  # fmt: skip
def test_neighbours_of_a_number_of_slots(server: Profile, slots: int, steps: int, expected: tuple[int, ...]) -> None:
    """The nearest candidates above or below, farthest first, also of a number that is none itself."""
    assert neighbours(Bin(tuple(range(20)), Settings(slots, 8), server), steps) == expected
