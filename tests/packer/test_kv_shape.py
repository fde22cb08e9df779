"""What requests hold: the closed forms against a count of blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import ValidationError
from packer.kv_shape import KvShape

SHAPES = st.builds(KvShape, st.integers(0, 5000), st.floats(0.0, 0.99), st.floats(0.0, 3000.0))


def blocks_of_vllm(prompt: int, output: int, window: int, groups: int, size: int = 16) -> float:
    """Mean blocks over a request's decodes: vLLM's SlidingWindowManager frees blocks before the window of the next
    token (`get_num_skipped_tokens`), then takes those of the tokens; one group of the others keeps all its blocks."""
    held = []
    for computed in range(prompt, prompt + output - 1):
        kept = math.ceil((computed + 1) / size)
        skipped = max(0, computed - window + 1) // size
        held.append(kept + (groups - 1) * (kept - skipped))
    return float(np.mean(held))


@pytest.mark.parametrize(
    ("prompt", "output", "window", "groups"),
    [
        (250, 231, 1024, 7), (900, 600, 1024, 7), (6000, 500, 1024, 7), (20_000, 300, 1024, 7), (250, 231, 128, 2),
        (2000, 300, 128, 2), (5000, 1000, 4096, 2),
    ],
)  # fmt: skip
def test_decodes_hold_what_vllm_counts(prompt: int, output: int, window: int, groups: int) -> None:
    """In the mean over decodes, a request holds what vLLM's groups of layers hold, half a block for rounding apart."""
    shape = KvShape(window + 7, (groups - 1) / groups)
    mean = float(shape.held_by_decodes(np.array([prompt]), np.array([output]))[0]) / output
    counted = blocks_of_vllm(prompt, output, window, groups) * 16 / groups
    assert mean + 7.5 == pytest.approx(counted, rel=0.006)


@given(shape=SHAPES, tokens=st.integers(1, 200_000), ahead=st.integers(0, 20_000))
def test_longest_is_the_inverse(shape: KvShape, tokens: int, ahead: int) -> None:
    """A request of the longest length holds no more than given, and one of two tokens more does."""
    held = shape.held(tokens, ahead)
    assert shape.longest(held, ahead) in (tokens - 1, tokens)


@given(shape=SHAPES, prompt=st.integers(1, 20_000), output=st.integers(1, 400))
def test_sum_over_decodes(shape: KvShape, prompt: int, output: int) -> None:
    """The integral over a request's decodes is the sum of what it holds at each, at the middle of each token."""
    total = sum(shape.held(prompt + k + 0.5) for k in range(output))
    found = shape.held_by_decodes(np.array([prompt]), np.array([output]))
    assert found[0] == pytest.approx(total, rel=1e-6, abs=1.0)


def test_a_share_of_all_is_refused() -> None:
    """Some layers keep all tokens: a model whose layers all have windows has a context of its window."""
    with pytest.raises(ValidationError, match="windowed_share"):
        KvShape(128, 1.0)
