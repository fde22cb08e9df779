"""The search for the smallest number that is enough finds it, with few tries, and ends when it is stopped."""

from __future__ import annotations

import pytest

from packer.search import fewest


@pytest.mark.parametrize("low", [0, 1, 5])
def test_every_threshold_is_found(low: int) -> None:
    """Whatever the smallest number is, also none up to the highest; no number is tried twice."""
    high = low + 40
    for least in range(low, high + 2):
        tried: list[int] = []

        def holds(n: int, least: int = least, tried: list[int] = tried) -> bool:
            tried.append(n)
            return n >= least

        assert fewest(holds, low, high) == (least if least <= high else None)
        assert len(set(tried)) == len(tried) <= 12
        assert all(low <= n <= high for n in tried)


def test_a_stopped_search_gives_what_it_found() -> None:
    """The smallest number so far, or none."""
    assert fewest(lambda n: n >= 10, 1, 100, lambda: True) is None
    assert fewest(lambda _n: True, 3, 100, lambda: True) == 3
