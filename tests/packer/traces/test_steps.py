"""Timestamps that were recorded in steps are found, and their requests spread over each step."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.traces.trace import spread, step_of, trace_of_requests


@given(st.integers(0, 100), st.sampled_from([0.5, 1.0, 3.0, 60.0]))
def test_requests_stay_in_their_step(seed: int, step_s: float) -> None:
    """Spread times are in order, and each is in the step in which it was recorded, but for the start at 0."""
    rng = np.random.default_rng(seed)
    recorded = np.sort(rng.integers(0, 30, 200)) * step_s
    recorded -= recorded[0]
    assert step_of(recorded) == step_s
    found = spread(recorded, step_s)
    assert found[0] == 0.0
    assert (np.diff(found) >= 0.0).all()
    moved = found - recorded
    assert moved.max() - moved.min() <= step_s + 1e-9
    assert (found == spread(recorded, step_s)).all()


@pytest.mark.parametrize("seed", range(5))
def test_exact_times_have_no_step(seed: int) -> None:
    """Times of a clock without steps stay as they are, as do a few requests at whole seconds."""
    times = np.sort(np.random.default_rng(seed).random(500)) * 3600.0
    assert step_of(times - times[0]) == 0.0
    assert step_of(np.arange(40.0)) == 0.0
    assert step_of(np.arange(400.0)) == 0.0


def test_a_quiet_log_in_whole_seconds_has_a_step() -> None:
    """Few requests of a quiet log share a second: taken for exact, those that do would count as bursts."""
    times = np.floor(np.cumsum(np.random.default_rng(0).exponential(20.0, 5000)))
    assert step_of(times - times[0]) == 1.0


def test_a_trace_says_its_step() -> None:
    """A trace whose times are multiples of 3 s says so; lengths stay with their requests, in the order given."""
    times = np.repeat(3.0 * np.arange(50), 4)
    inputs = np.arange(1, 201)
    requests = pl.DataFrame({"time_s": times, "input_tokens": inputs, "output_tokens": np.ones(200, dtype=np.int64)})
    trace = trace_of_requests(requests, "stepped")
    assert trace.step_s == 3.0
    assert (trace.input_tokens == inputs).all()
    assert len(np.unique(trace.time_s)) == 200
