"""Guards of constructors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from packer import checks
from packer.errors import ValidationError


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, 2.1, 10**400, True, "1", None, 1j])
def test_real_refuses(value: object) -> None:
    """Only finite numbers within the span pass; a bool is not a number, and the message shows the value."""
    with pytest.raises(ValidationError, match="Expected x to be a finite number >= 0 and <= 2, got "):
        checks.real("x", value, low=0.0, high=2.0)


def test_real_returns_plain_floats() -> None:
    """NumPy scalars and ints become Python floats, so that equal values hash and print alike."""
    for value in (1, np.float32(1), np.int64(1)):
        assert type(checks.real("x", value, low=0.0)) is float
    with pytest.raises(ValidationError):
        checks.real("x", 0, low=0.0, open_low=True)


@pytest.mark.parametrize("value", [0, 9, 7.5, 7.0, True, "7", None, 10**30])
def test_integer_refuses(value: object) -> None:
    """Only whole numbers within the span pass."""
    with pytest.raises(ValidationError, match=r"whole number in \[1, 8\]"):
        checks.integer("x", value, low=1, high=8)


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_slot_rank_for_is_the_smallest_that_holds(rank: int, slot: int) -> None:
    """A slot is the smallest of vLLM's values that holds the adapter."""
    assert checks.slot_rank_for(rank) == slot
    assert checks.slot_rank("slot", slot) == slot


def test_slot_ranks_beyond_vllm_are_refused() -> None:
    """vLLM accepts a fixed list of slot ranks and nothing above 512."""
    with pytest.raises(ValidationError, match="513"):
        checks.slot_rank_for(513)
    for value in (0, 7, 24, 8.0, True):
        with pytest.raises(ValidationError, match="1, 8, 16, 32, 64, 128, 256, 320, 512"):
            checks.slot_rank("slot", value)
