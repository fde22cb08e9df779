"""The histogram of gaps between tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from packer.twin.engine import emit
from packer.twin.engine.state import HISTOGRAM_BINS, HISTOGRAM_FLOOR_MS, HISTOGRAM_PER_E


@njit
def gap_bin(gap_s: float) -> int:
    """The kernel, called as kernels call it."""
    return emit.gap_bin(gap_s)


@given(st.floats(1e-9, 1e6))
@settings(deadline=None)
def test_gaps_fall_into_the_bin_around_them(gap_s: float) -> None:
    """A gap's bin holds it within its resolution of 0.7 %, beyond the ends the last bin takes it."""
    k = gap_bin(gap_s)
    assert 0 <= k < HISTOGRAM_BINS
    low_ms = HISTOGRAM_FLOOR_MS * np.exp(k / HISTOGRAM_PER_E)
    if 0 < k < HISTOGRAM_BINS - 1:
        assert low_ms * (1 - 1e-9) <= gap_s * 1e3 <= low_ms * np.exp(1 / HISTOGRAM_PER_E) * (1 + 1e-9)


def test_gaps_from_a_hundredth_of_a_millisecond_are_told_apart() -> None:
    """Steps of fast servers take some tenths of a millisecond; only gaps below 0.01 ms share the first bin."""
    assert (HISTOGRAM_FLOOR_MS, gap_bin(1e-9), gap_bin(9e-6)) == (0.01, 0, 0)
    assert 0 < gap_bin(1.02e-5) < gap_bin(1e-4) < gap_bin(1.01e-4)
