"""Candidates of max_loras."""

from __future__ import annotations

import pytest

from packer.solvers.candidates import max_loras_candidates


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        (1, (1,)),
        (7, (7,)),
        (8, (8,)),
        (20, (8, 16, 20)),
        (384, (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)),
    ],
)
def test_candidates_are_the_papers_up_to_the_adapters(adapters: int, expected: tuple[int, ...]) -> None:
    """No more slots than adapters are tried, and one slot for each adapter always is."""
    assert max_loras_candidates(adapters) == expected
