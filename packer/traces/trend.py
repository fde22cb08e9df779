"""Measure how the load of a trace changes within one window: a rise, a fall or a peak of its mean rates.

Bursts (`packer.traces.bursts`) are measured beside such a trend. A fleet with the rates of the window follows it, or a
plan would be made for the mean of the window alone.
"""

from __future__ import annotations

import numpy as np

from packer.arrays import FloatArray
from packer.times import DAY_S, HOUR_S
from packer.traces.trace import Trace

PARTS = 12  # Equal parts of a window whose loads are fitted; rates are constant in each.
CHANCE = 0.001  # Probability with which loads of parts that vary at random show a trend.
LEAST_S = 12.0  # Shortest window with a trend.
LEAST = 1.1  # Smallest height of a trend, as a multiple of the mean load.
STEEP = 3.0  # Largest slope, as a multiple of the smaller step to a neighbour: a load that grows fivefold each period.
DECODE = 3.0
"""Prompt tokens that take as much engine time as an output token: 2.2 and 3.5 with full batches by the calibrated step
laws (`packer.solvers.backbone.engine_s`), more with smaller ones. In 24 logs whose lengths grow, plans
held in the log's hour with 3; with 4 one broke."""


def trend_of(trace: Trace, start_s: float, window_s: float, *, daily: bool = False) -> tuple[float, ...]:
    """The length of a part, s, and the factors of `trend_within`, of a window that begins then: of what the trace
    covers of it, or with `daily` of the same window of every day. Whole cycles of the factors fill the window, so that
    a simulated hour has no more than it. () without a trend."""
    end_s = start_s + window_s
    if not daily:
        start_s, end_s = max(start_s, trace.start_s), min(end_s, trace.start_s + trace.span_s)
    factors = trend_within(trace, start_s, end_s, daily=daily)
    return (window_s / round(window_s / (end_s - start_s)) / PARTS, *factors) if factors else ()


def trend_within(trace: Trace, start_s: float, end_s: float, *, daily: bool = False) -> tuple[float, ...]:
    """Factors on the mean rates in `PARTS` equal parts of a window, which follow the load; their mean is 1.

    The load is the engine time of the requests: their tokens, an output token counted as `DECODE`. The load of the
    parts is fitted by a parabola. No factors, and no trend, if an F-test explains it by the scatter of the parts around
    their mean, at least that of Poisson arrivals; if its highest factor is below `LEAST`; or for windows longer than an
    hour, which a simulated hour does not show.

    `start_s`, `end_s`: the window, on the clock of `Trace.start_s`. `daily`: the same window of every day.
    """
    from scipy.stats import f

    window_s = end_s - start_s
    if not LEAST_S <= window_s <= HOUR_S:
        return ()
    begin_s, days = start_s - trace.start_s, range(1)
    if daily:
        begin_s, days = begin_s % DAY_S, range(-1, int(trace.span_s // DAY_S) + 1)
    load, squares = np.zeros(PARTS), 0.0
    for day in days:
        edges = np.searchsorted(trace.time_s, begin_s + day * DAY_S + np.linspace(0.0, window_s, PARTS + 1))
        inside = slice(edges[0], edges[-1])
        tokens = trace.input_tokens[inside] + DECODE * trace.output_tokens[inside]
        load += np.bincount(np.repeat(np.arange(PARTS), np.diff(edges)), tokens, minlength=PARTS)
        squares += float(tokens @ tokens)
    mean = max(1.0, float(load.sum()) / PARTS)
    load /= mean
    basis, _ = np.linalg.qr(np.vander(np.linspace(-1.0, 1.0, PARTS), 3, increasing=True))
    fit: FloatArray = basis @ (load @ basis)
    shown = float(((fit - 1.0) ** 2).sum()) / 2.0
    scatter = max(float(((load - fit) ** 2).sum()) / (PARTS - 3), squares / PARTS / mean**2)
    if fit.max() < LEAST or f.sf(shown / scatter, 2, PARTS - 3) > CHANCE:
        return ()
    fit = np.maximum(fit, 0.0)
    factors = np.round(fit * (PARTS / fit.sum()), 4)
    factors[factors.argmax()] += PARTS - factors.sum()  # the mean stays 1 despite rounding
    return tuple(np.round(factors, 4).tolist())


def trends_between(loads: FloatArray, period_s: float) -> list[tuple[float, ...]]:
    """The trends of successive periods of a day that repeats, if only their mean loads, float64 (n,), are known: the
    length of a part, s, and factors as those of `trend_within`; () without a trend.

    The load of a period is a parabola with its mean and the means of its neighbours. Loads may also be constant in each
    period and jump between them. So the slope is at most `STEEP` times the smaller step to a neighbour: a period with
    the load of a neighbour, the highest and the lowest have no trend. The parabola has no peak inside the period.
    """
    before, after = loads - np.roll(loads, 1), np.roll(loads, -1) - loads
    slope = np.minimum(np.abs(before + after) / 2.0, STEEP * np.minimum(np.abs(before), np.abs(after)))
    slope *= np.where(before * after > 0.0, np.sign(before), 0.0)
    bend = np.clip((after - before) / 2.0, -np.abs(slope), np.abs(slope))
    at = (np.arange(PARTS) + 0.5) / PARTS - 0.5
    parts = np.maximum(np.stack([loads, slope, bend], axis=1) @ [np.ones(PARTS), at, at**2 - 1.0 / 12.0], 0.0)
    factors = np.round(parts / np.maximum(parts.mean(axis=1, keepdims=True), 1e-12), 4).tolist()
    known = LEAST_S <= period_s <= HOUR_S
    return [(period_s / PARTS, *each) if known and max(each) >= LEAST else () for each in factors]
