"""The evaluator of a formula, which tests of plug-ins plan with."""

from __future__ import annotations

import pytest

from packer.testing.analytic import closed_form


@pytest.mark.parametrize("ttft_ms", [0.5, 200.0])
def test_figures_of_a_formula_are_in_proportion(ttft_ms: float) -> None:
    """Medians are means, 99th percentiles three times as much, at whatever latency."""
    found = closed_form(100.0, 90.0, ttft_ms, 2.0 * ttft_ms, 1000.0, starved=False, memory_error=False)
    assert found.median_ttft_ms == found.mean_ttft_ms == ttft_ms
    assert found.p99_ttft_ms == 3.0 * ttft_ms
    assert found.p99_itl_ms == 3.0 * found.mean_itl_ms == 6.0 * ttft_ms
