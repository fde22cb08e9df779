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
    """Factors on the mean rates in `PARTS` equal parts of a window, which follow the offered load; their mean is 1.

    The load of the parts is fitted by a parabola. No factors, and no trend, if an F-test explains it by the scatter
    of the parts around their mean, at least that of Poisson arrivals; if its highest factor is below `LEAST`; or for
    windows longer than an hour, which a simulated hour does not show.

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
        tokens = (trace.input_tokens[inside] + trace.output_tokens[inside]).astype(np.float64)
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
