"""Quantiles of groups are those that NumPy gives for each group."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from packer.arrays import FloatArray
from packer.twin.quantiles import by_group


@given(
    arrays(np.float64, st.integers(0, 200), elements=st.sampled_from([0.0, 0.5, 1.0, 7.25, 1e-9, 3e5])),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.99, 1.0]),
    st.randoms(use_true_random=False),
)
def test_each_group_has_its_quantile(values: FloatArray, groups: int, share: float, rng: Random) -> None:
    """With equal values, groups of one value and empty groups, in any order; the values stay in theirs."""
    owner = np.array([rng.randrange(groups) for _ in values], dtype=np.int64)
    before, sizes = values.copy(), np.bincount(owner, minlength=groups)
    found = by_group(values, owner, sizes, share)
    wanted = [np.quantile(values[owner == k], share) if n else np.nan for k, n in enumerate(sizes)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    np.testing.assert_array_equal(values, before)
