"""Measure how the load of a trace changes within one window: a rise, a fall or a peak of its mean rates.

Bursts (`packer.traces.bursts`) are measured beside such a trend. A fleet with the rates of the window follows it, or a
plan would be made for the mean of the window alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.times import DAY_S, HOUR_S
from packer.traces.pattern import WHOLE_FROM, rates_of
from packer.traces.trace import Trace

PARTS = 12  # Equal parts of a window whose loads are fitted; rates are constant in each.
CHANCE = 0.001  # Probability with which loads of parts that vary at random show a trend.
CELLS, TIMES, FEWEST, STRETCHES = 60, 4, 3, 5
"""Equal parts of a window with steps; how often one of two loads comes at most; parts with each load, next to none with
another; stretches with loads of their own at most."""
LEFT, LESS, VARIED = 0.05, 0.25, 3.0
"""Steps leave at most this share of the variance of the parts, and more than two levels this share of what a parabola
leaves; both are at least so many times that of chance. Of 2,000 hours with bursts of 10 s to 2,000 s, six showed two
loads; all 600 hours with two did. Of 1,000 such hours, 11 showed steps of any kind, ten with bursts of more than
360 s; of 139 hours with three to five levels, 132 did."""
LEAST_S = 12.0  # Shortest window with a trend.
LEAST = 1.1  # Smallest height of a trend, as a multiple of the mean load.
STEEP = 3.0  # Largest slope, as a multiple of the smaller step to a neighbour: a load that grows fivefold each period.
DECODE = 3.0
"""Prompt tokens that take as much engine time as an output token: 2.2 and 3.5 with full batches by the calibrated step
laws (`packer.solvers.backbone.engine_s`), more with smaller ones. In 24 logs whose lengths grow, plans
held in the log's hour with 3; with 4 one broke."""


def trend_of(trace: Trace, start_s: float, window_s: float, *, daily: bool = False) -> tuple[float, ...]:
    """The length of a part, s, and the factors of `trend_within`, of a window that begins then: of what the trace
    covers of it, or with `daily` of the same window of every day, if one day covers it or several do once. Whole cycles
    of the factors fill the window, so that a simulated hour has no more than it. () without a trend."""
    days = range(int(trace.span_s // DAY_S) + 2) if daily else range(1)
    shown = [_shown(trace, start_s + day * DAY_S, window_s) for day in days]
    parts_s = [max(0.0, end_s - begin_s) for begin_s, end_s in shown]
    least_s = WHOLE_FROM * window_s
    daily = daily and (max(parts_s) >= least_s or least_s <= sum(parts_s) <= window_s)  # parts that overlap are a step
    start_s, end_s = (start_s, start_s + window_s) if daily else shown[int(np.argmax(parts_s))]
    factors = trend_within(trace, start_s, end_s, daily=daily)
    return (window_s / round(window_s / (end_s - start_s)) / len(factors), *factors) if factors else ()


def _shown(trace: Trace, start_s: float, window_s: float) -> tuple[float, float]:
    """Begin and end of what the trace covers of a window, which is nothing if the end is not later."""
    return max(start_s, trace.start_s), min(start_s + window_s, trace.start_s + trace.span_s)


def trend_within(trace: Trace, start_s: float, end_s: float, *, daily: bool = False) -> tuple[float, ...]:
    """Factors on the mean rates in equal parts of a window, which follow the load; their mean is 1.

    The load is the engine time of the requests: their tokens, an output token counted as `DECODE`. A load that has
    few levels gives the factors of `_steps`. Else the load of `PARTS` parts is fitted by a parabola.
    No factors, and no trend, if an F-test explains it by the scatter of the parts around their mean, at least that of
    Poisson arrivals; if its highest factor is below `LEAST`; or for windows longer than an hour, which a simulated hour
    does not show.

    `start_s`, `end_s`: the window, on the clock of `Trace.start_s`. `daily`: the same window of every day.
    """
    from scipy.stats import f

    window_s = end_s - start_s
    if not LEAST_S <= window_s <= HOUR_S:
        return ()
    begin_s, days, whole = start_s - trace.start_s, range(1), list[int]()
    if daily:
        begin_s, days = begin_s % DAY_S, range(-1, int(trace.span_s // DAY_S) + 1)
        cut_s = (1.0 - WHOLE_FROM) * window_s  # a day that shows part of the window would be a step of the mean day
        whole = [day for day in days if -cut_s <= begin_s + day * DAY_S <= trace.span_s - window_s + cut_s]
    fine, squares = np.zeros(CELLS), 0.0
    for day in whole or days:
        edges = np.searchsorted(trace.time_s, begin_s + day * DAY_S + np.linspace(0.0, window_s, CELLS + 1))
        inside = slice(edges[0], edges[-1])
        tokens = trace.input_tokens[inside] + DECODE * trace.output_tokens[inside]
        fine += np.bincount(np.repeat(np.arange(CELLS), np.diff(edges)), tokens, minlength=CELLS)
        squares += float(tokens @ tokens)
    if factors := _steps(fine, squares):
        return factors
    load = fine.reshape(PARTS, -1).sum(axis=1)
    mean = max(1.0, float(load.sum()) / PARTS)
    load /= mean
    fit = _parabola(load)
    shown = float(((fit - 1.0) ** 2).sum()) / 2.0
    scatter = max(float(((load - fit) ** 2).sum()) / (PARTS - 3), squares / PARTS / mean**2)
    if fit.max() < LEAST or f.sf(shown / scatter, 2, PARTS - 3) > CHANCE:
        return ()
    return _factors(fit)


def _parabola(load: FloatArray) -> FloatArray:
    """The parabola that is nearest to the loads of equal parts, at each part."""
    basis, _ = np.linalg.qr(np.vander(np.linspace(-1.0, 1.0, len(load)), 3, increasing=True))
    fit: FloatArray = basis @ (load @ basis)
    return fit


def flattened(trace: Trace, window_s: float) -> Trace:
    """The trace with the times at which its requests would come without the steps (`_steps`) inside its windows, which
    start at multiples of their length: a trend beside which bursts are measured. Steps are kept that are higher, by
    `LEAST`, than the load of the busiest window with its trend, because a plan for that window does not serve them, and
    those of that window unless they are its trend. A part of a window at the end that has no rates of its own has the
    steps of the busiest window or none.
    """
    if window_s > HOUR_S or window_s < LEAST_S:
        return trace
    table = rates_of(trace, window_s)
    windows = [_shown(trace, start_s, window_s) for start_s in table.start_s.tolist()]
    ends_s = float(table.start_s[-1]) + window_s
    last = _shown(trace, ends_s, window_s)
    windows += [last] if last[1] > last[0] else []
    windows = [_shown(trace, trace.start_s, trace.span_s)] if table.whole else windows
    busiest = int(table.offered_tok_s.argmax())
    factors = trend_within(trace, *windows[busiest])
    time_s, found, per_s = trace.time_s.copy(), list[tuple[FloatArray, tuple[float, ...]]](), list[float]()
    for begin_s, end_s in windows:
        edges = np.linspace(begin_s, end_s, CELLS + 1) - trace.start_s
        counts = np.diff(np.searchsorted(trace.time_s, edges)).astype(np.float64)
        per_s.append(float(counts.sum()) / (end_s - begin_s or 1.0))  # the last request may begin a window
        found.append((edges, tuple(each * per_s[-1] for each in _steps(counts, counts.sum()))))
    stepped = len(factors) == CELLS
    most = max(found[busiest][1], default=0.0) if stepped else per_s[busiest] * max(factors, default=1.0)
    for k, (edges, steps) in enumerate(found):
        own = k != busiest or stepped
        if own and steps and most / LEAST * (k == len(table.rates)) <= max(steps) <= LEAST * most:
            passed = np.concatenate([[0.0], np.cumsum(steps)]) * ((edges[-1] - edges[0]) / sum(steps))
            inside = slice(*np.searchsorted(time_s, edges[[0, -1]]))
            time_s[inside] = np.interp(trace.time_s[inside], edges, edges[0] + passed)
    return replace(trace, time_s=time_s)


def _steps(load: FloatArray, squares: float) -> tuple[float, ...]:
    """Factors of `CELLS` equal parts, which are constant in the groups of one of `_divisions`; their mean is 1. No
    factors if each leaves more than `LEFT` of the variance of the parts that chance does not explain, which bursts
    hardly ever do; or, with more than two groups, more than `LESS` of what a parabola leaves of it. The parts in which
    the load changes have their own, between those beside them.

    `load`: of each part, the sum of the weights of its requests; `squares`: the sum of the squares of all weights.
    """
    mean = load.sum() / CELLS
    if mean <= 0.0:
        return ()
    load = load / mean
    chance, varied = squares / CELLS / mean**2, float(((load - 1.0) ** 2).mean())
    beyond = float(((load - _parabola(load)) ** 2).mean())
    for group in _divisions(load) if varied > VARIED * chance else ():
        changes = np.flatnonzero(np.diff(group))
        clear = ~np.isin(np.arange(CELLS), [changes, changes + 1])
        number = np.bincount(group[clear], minlength=group.max() + 1)
        if number.min() < FEWEST:
            continue
        levels = np.bincount(group[clear], load[clear], minlength=len(number)) / number
        fit = levels[group]
        for k in changes.tolist():
            fit[k : k + 2] = np.clip(load[k : k + 2], *sorted(fit[k : k + 2].tolist()))
        left = float(((load - fit)[clear] ** 2).mean()) - chance
        curved = len(levels) > 2 and (beyond < VARIED * chance or left > LESS * (beyond - chance))
        if left <= LEFT * (varied - chance) and levels.max() >= LEAST and not curved:
            return _factors(fit)
    return ()


def _divisions(load: FloatArray) -> Iterator[IntArray]:
    """Groups of parts, as their numbers, (parts,): two whose means differ most, relative to what is left within them,
    and of which one comes at most `TIMES` times; then the stretches, up to `STRETCHES`, that leave the least."""
    n = len(load)
    ordered, below = np.sort(load), np.arange(1, n)
    total = np.cumsum(ordered)
    apart = total[:-1] / below - (total[-1] - total[:-1]) / (n - below)
    high = (load > ordered[(apart**2 * below * (n - below)).argmax()]).astype(np.int64)
    if np.count_nonzero(np.diff(high)) <= 2 * TIMES:
        yield high
    sums, begin, end = np.append(0.0, np.cumsum(load)), *np.triu_indices(n + 1, 1)
    # What a stretch leaves, less the squares of its parts: their sum is the same however the parts are divided.
    left = np.full((n + 1, n + 1), np.inf)
    left[begin, end] = -((sums[end] - sums[begin]) ** 2) / (end - begin)
    least, last = left[0], list[IntArray]()
    for _ in range(1, STRETCHES):
        ways = least[:, np.newaxis] + left
        last.append(ways.argmin(axis=0))
        least = ways.min(axis=0)
        edges = [n]
        for before in reversed(last):
            edges.append(int(before[edges[-1]]))
        if len(edges) > 2:
            yield np.searchsorted(edges[:0:-1], np.arange(n), "right")


def _factors(fit: FloatArray) -> tuple[float, ...]:
    """The factors, rounded; none is below 0, and their mean is 1."""
    fit = np.maximum(fit, 0.0)
    factors = np.round(fit * (len(fit) / fit.sum()), 4)
    factors[factors.argmax()] += len(fit) - factors.sum()  # the mean stays 1 despite rounding
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
