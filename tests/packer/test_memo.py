"""Values that are computed once per object."""

from __future__ import annotations

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
