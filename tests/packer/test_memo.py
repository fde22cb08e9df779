"""Values that are computed once per object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packer.memo import Memo


def test_a_value_is_made_once_for_the_same_object_and_again_for_an_equal_one() -> None:
    """Keys are compared by identity."""
    made: list[list[int]] = []
    length = Memo[list[int], int](lambda key: made.append(key) or len(key))  # type: ignore[func-returns-value]
    one, other = [1, 2], [1, 2]
    assert [length(one), length(one), length(other), length(one)] == [2, 2, 2, 2]
    assert [id(key) for key in made] == [id(one), id(other)]


def test_the_oldest_key_is_forgotten_first() -> None:
    """At most `kept` values stay in memory."""
    made: list[str] = []
    first = Memo[list[str], None](lambda key: made.append(key[0]), kept=2)
    keys = [["a"], ["b"], ["c"]]
    for key in (*keys, keys[1], keys[2], keys[0]):
        first(key)
    assert made == ["a", "b", "c", "a"]


def test_keys_that_could_not_be_forgotten_are_forgotten_with_the_next() -> None:
    """Where another thread adds a key while the oldest one is looked for, no more than `kept` stay for long."""

    class Shared(dict[Any, Any]):
        busy = 3

        def __iter__(self) -> Iterator[Any]:
            self.busy -= 1
            if self.busy >= 0:
                raise RuntimeError("dictionary changed size during iteration")
            return super().__iter__()

    first = Memo[list[int], int](lambda key: key[0], kept=2)
    first._kept = Shared()
    keys = [[i] for i in range(6)]
    assert [first(key) for key in keys] == [0, 1, 2, 3, 4, 5]
    assert len(first._kept) == 2
