"""The planner's tasklets are the most that the two constraints of LLMStation's programme allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_tuning import best_plan

from packer.twin.tuning.policies.llmstation import plan

TIMES = st.floats(0.01, 10.0)


@given(st.integers(1, 12), st.integers(0, 30), TIMES, st.floats(0.0, 10.0), TIMES, st.floats(0.0, 100.0))
def test_as_exhaustive_search(
    layers: int, left: int, decode_ms: float, slower: float, tasklet_ms: float, slo_ms: float
) -> None:
    """N_d and N_p are those of a search over all pairs."""
    beside_ms = decode_ms + slower
    beside, tasklets = plan.py_func(layers, left, decode_ms, beside_ms, tasklet_ms, slo_ms)
    assert (beside, tasklets) == best_plan(layers, left, decode_ms, beside_ms, tasklet_ms, slo_ms)


@given(st.integers(1, 80), TIMES, TIMES, TIMES, st.floats(1.0, 100.0))
def test_below_equation_1(layers: int, decode_ms: float, slower: float, tasklet_ms: float, slo_ms: float) -> None:
    """N_p <= (SLO − N l_d0) l_d / ((l_d − l_d0) l_p), which it misses by less than one decode layer."""
    beside_ms = decode_ms + slower
    _, tasklets = plan.py_func(layers, 10**9, decode_ms, beside_ms, tasklet_ms, slo_ms)
    bound = max(0.0, (slo_ms - layers * decode_ms) * beside_ms / (slower * tasklet_ms))
    bound = min(bound, layers * beside_ms / tasklet_ms)
    assert tasklets <= bound * (1 + 1e-6) + 1e-6
    assert tasklets >= bound - beside_ms / tasklet_ms - 1.0 - 1e-6


@pytest.mark.parametrize(("slo_ms", "expected"), [(31.9, (0, 0)), (32.0, (0, 0)), (36.0, (8, 16)), (99.0, (32, 64))])
def test_by_hand(slo_ms: float, expected: tuple[int, int]) -> None:
    """32 layers of 1 ms, 1.5 ms beside training, tasklets of 0.75 ms: each half a ms of room takes two tasklets."""
    assert plan(32.0, 64.0, 1.0, 1.5, 0.75, slo_ms) == expected
