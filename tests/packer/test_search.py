"""The search for the smallest number that is enough finds it, with few tries, and ends when it is stopped."""

from __future__ import annotations

import pytest

from packer.search import fewest, reach


@pytest.mark.parametrize(("low", "same"), [(0, 1), (1, 1), (5, 1), (1, 2)])
def test_every_threshold_is_found(low: int, same: int) -> None:
    """Whatever the smallest number is, also none up to the highest; no number is tried twice."""
    high = low + 40
    for least in range(low, high + 2):
        tried: list[int] = []

        def holds(n: int, least: int = least, tried: list[int] = tried) -> bool:
            tried.append(n)
            return n >= least

        assert fewest(holds, low, high, same=same) == (least if least <= high else None)
        assert len(set(tried)) == len(tried) <= 12 * same
        assert all(low <= n <= high for n in tried)


def test_steps_double_after_as_many_as_are_asked_for() -> None:
    """With two of each length, the three smallest numbers are tried one after the other."""
    tried: list[int] = []
    assert fewest(lambda n: tried.append(n) or n >= 9, 1, 100, same=2) == 9
    assert tried == [1, 2, 3, 5, 7, 11, 9, 8]


def test_a_stopped_search_gives_what_it_found() -> None:
    """The smallest number so far, or none."""
    assert fewest(lambda n: n >= 10, 1, 100, lambda: True) is None
    assert fewest(lambda _n: True, 3, 100, lambda: True) == 3


@pytest.mark.parametrize("start", [None, 0, 7, 19])
@pytest.mark.parametrize("last", range(-1, 20))
def test_the_reach_is_found_from_anywhere(start: int | None, last: int) -> None:
    """The last number that holds and the first that does not are neighbours, wherever the search begins, and no number
    is tried twice."""
    tried: list[int] = []
    assert reach(lambda n: tried.append(n) or n <= last, 0, 19, start) == (last, last + 1)
    assert len(tried) == len(set(tried)) <= 10


def test_a_search_that_is_lost_tries_the_highest_number() -> None:
    """If that does not hold, none does, in few tries; else the smallest number that is enough is found as without."""
    for least in (3, 9, 40, 77, 500, 501):
        tried: list[int] = []

        def holds(n: int, least: int = least, tried: list[int] = tried) -> bool:
            tried.append(n)
            return n >= least

        assert fewest(holds, 1, 500, same=2, lost=6) == (least if least <= 500 else None)
        assert len(set(tried)) == len(tried) <= (7 if least > 500 else 23)
