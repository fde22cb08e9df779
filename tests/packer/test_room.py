"""Servers with equal room are shown once, by their numbers."""

from __future__ import annotations

from packer.room import Room, grouped, spans


def test_equal_rooms_are_grouped_with_the_least_first() -> None:
    """Each server is in one group; servers without headroom come before those with some."""
    wide, tight, none = Room(2.0), Room(1.1, "slots"), Room(None)
    rooms = [wide, tight, wide, none, wide, tight]
    assert grouped(rooms) == [((3,), none), ((1, 5), tight), ((0, 2, 4), wide)]


def test_numbers_in_a_row_are_a_span() -> None:
    """Consecutive numbers are written by their ends, others one by one."""
    assert spans([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"
    assert spans([3]) == "3"
    assert spans([]) == ""
