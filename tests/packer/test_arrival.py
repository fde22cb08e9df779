"""Arrival processes and request traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packer.arrival import Arrivals, Bursts, RequestTrace
from packer.blocks import Blocks
from packer.errors import ValidationError


def trace(times: list[float], adapter: int = 0, tokens: int = 1) -> RequestTrace:
    n = len(times)
    full = np.full(n, tokens, dtype=np.int64)
    return RequestTrace(np.array(times), np.full(n, adapter, dtype=np.int64), full, full.copy())


@pytest.mark.parametrize("times", [[1.0, 0.5], [-1.0, 0.0], [0.0, np.inf], [0.0, np.nan]])
def test_trace_times_are_sorted_and_finite(times: list[float]) -> None:
    """The kernel relies on sorted, finite times from 0."""
    with pytest.raises(ValidationError, match=r"sorted|row of finite numbers, got (inf|nan) in place 1"):
        trace(times)


def test_trace_takes_lists_of_whole_numbers() -> None:
    """Lists become arrays, and a value that is not a whole number, or not finite, is refused with its place."""
    good = RequestTrace([0, 1.5], [0, 1], [10, 20.0], [5, 5], sessions=[0, 0])  # type: ignore[arg-type]
    assert (good.time_s.dtype, good.input_tokens.dtype, good.input_tokens.tolist()) == (float, int, [10, 20])
    bad: list[dict[str, Any]] = [
        {"input_tokens": [10, 20.5]}, {"time_s": [np.nan, 1.0]}, {"adapter": None}, {"adapter": ["a", "b"]},
        {"sessions": [0.5, 1]}, {"sessions": [-1, 0]}, {"step_s": -1}, {"step_s": np.nan}, {"output_tokens": 5},
        {"priority": [2**63, 0]}, {"priority": [-(2**63), 0]},
    ]  # fmt: skip
    for each in bad:
        with pytest.raises(ValidationError):
            replace(good, **each)
    with pytest.raises(ValidationError, match=r"input_tokens .* row of whole numbers, got 20\.5 in place 1\."):
        replace(good, **bad[0])


def test_arrays_of_the_caller_stay_its_own() -> None:
    """A trace takes nothing from the caller's arrays: they can be changed, and the trace stays as it was."""
    starts, ids = np.array([0, 1, 2]), np.array([1, 2])
    columns = [np.array([0.0, 1.0]), *(np.array([16, 16]) for _ in range(3))]
    made = RequestTrace(*columns, blocks=Blocks(starts, ids, 16))
    for column in (starts, ids, *columns):
        column[:] = 7
    assert made.time_s.tolist() == [0.0, 1.0]
    assert made.adapter.tolist() == [16, 16]
    assert made.blocks is not None
    assert made.blocks.ids.tolist() == [1, 2]


def test_trace_columns_are_frozen_and_checked() -> None:
    """Columns have one length and can't be changed; adapters are >= 0, lengths >= 1."""
    good = trace([0.0, 1.0])
    assert len(good) == 2
    with pytest.raises(ValueError, match="read-only"):
        good.time_s[0] = 5.0
    with pytest.raises(ValidationError):
        trace([0.0], adapter=-1)
    with pytest.raises(ValidationError):
        trace([0.0], tokens=0)
    with pytest.raises(ValidationError, match="<= 1,000,000,000 tokens"):
        trace([0.0], tokens=2**62)
    with pytest.raises(ValidationError, match="same length"):
        RequestTrace(good.time_s, good.adapter[:1], good.input_tokens, good.output_tokens)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "uniform"},
        {"cv": -1.0},
        {"period_s": 0.0},
        {"period_s": 1e-300},
        {"period_s": 1e300},
        {"span": 0.5},
        {"kind": "piecewise"},
        {"kind": "piecewise", "factors": (0.0, 0.0)},
        {"kind": "piecewise", "factors": (-1.0, 2.0)},
        {"kind": "bursty", "common": Bursts(0.5, ((30.0, 1.0),)), "factors": (0.0, 0.0)},
        {"kind": "trace"},
        {"kind": "poisson", "trace": trace([0.0])},
    ],
)
def test_nonsense_is_refused(options: dict[str, object]) -> None:
    """A process that can't be drawn from is refused when it is specified."""
    with pytest.raises(ValidationError):
        Arrivals(**options)  # type: ignore[arg-type]


def test_rates_that_follow_factors_are_a_cycle() -> None:
    """Poisson and bursty arrivals may follow factors; runs then cover whole cycles. Others keep their own factors."""
    bursts = Arrivals("bursty", common=Bursts(0.5, ((30.0, 1.0),)))
    for arrivals, kind in ((Arrivals(), "piecewise"), (bursts, "bursty")):
        assert arrivals.following((60.0, 2.0)).following(()) == replace(arrivals, period_s=60.0)
        assert (arrivals.cycle_s, arrivals.mean_factor, arrivals.whole_s(100.0)) == (0.0, 1.0, 100.0)
        rising = arrivals.following((60.0, 0.5, 2.0))
        assert (rising.kind, rising.common) == (kind, arrivals.common)
        assert (rising.cycle_s, rising.mean_factor, rising.whole_s(130.0)) == (120.0, 1.25, 240.0)
        assert "rates × 0.5 … 2 in periods of 60 s" in rising.description
    own = Arrivals("lognormal", factors=(0.5, 2.0))
    assert own.mean_factor == 1.0
    assert own.following((60.0, 0.5, 2.0)) is own


def test_steps_of_recorded_times_stay_with_the_requests() -> None:
    """Some requests of a trace were recorded in the same steps; in half of the time the steps are half as long."""
    recorded = replace(trace([0.0, 1.0, 2.0]), step_s=1.0)
    assert recorded.take(slice(1, None)).step_s == 1.0
    assert recorded.faster(2.0).step_s == 0.5
