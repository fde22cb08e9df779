"""Numbers and names for people."""

from __future__ import annotations

import math

import pytest

from packer.words import by_rank, counted, listed, number, plural, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.56, "1,234.6"), (0.0, "0.0"), (None, "–"), (math.nan, "–"), (math.inf, "–"), (-3.25, "-3.2")],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    """Thousands are separated, and a number that is missing or infinite is a dash."""
    assert number(value, 1) == text


def test_things_are_counted() -> None:
    """One thing has its name, none or several have the plural."""
    assert [counted(n, "GPU") for n in (0, 1, 2, 1234)] == ["0 GPUs", "1 GPU", "2 GPUs", "1,234 GPUs"]
    assert plural(1, "adapter") == "adapter"


def test_marks_that_change_what_follows_are_shown() -> None:
    """Control, direction and separator marks become escapes; letters, dashes and blanks stay."""
    assert visible("a\x1b[2J\u202e\u2028\xa0b – ü") == "a\\x1b[2J\\u202e\\u2028\\xa0b – ü"


def test_what_a_short_list_leaves_out_is_counted() -> None:
    """A list that is cut says how many more there are; a whole one says nothing."""
    assert listed([], 2) == ""
    assert listed((1, 2), 2) == "1, 2"
    assert listed(iter("abcde"), 2) == "a, b and 3 more"


def test_adapters_are_counted_by_rank() -> None:
    """The largest rank comes first."""
    assert by_rank([8, 32, 8]) == "1×r32, 2×r8"
