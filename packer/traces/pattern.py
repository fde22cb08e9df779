"""Rates per adapter in windows of time, and the loads that plans must serve: mean, percentiles, peak."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer import checks
from packer.arrays import FloatArray, distinct
from packer.errors import ValidationError
from packer.io.tables import csv_text
from packer.times import DAY_S
from packer.traces.trace import Trace

_CLOCK = re.compile(r"([01]?\d|2[0-3]):[0-5]\d", re.ASCII)
MAX_WINDOWS = 1_000_000
WHOLE_FROM = 0.9  # A window at either end of a trace counts as whole if the trace covers at least this share of it.
SURE = 3.0  # Standard deviations of its load by which a part of a window is busier than whole windows.
BRIEF = 1.0 / 12.0  # Share of a window below which a part says little about it: it may be a burst.


@dataclass(frozen=True, eq=False)
class RateTable:
    """Request rates of some adapters in successive windows.

    `names`: names of the adapters.
    `rates`: float64 (windows, adapters), req/s.
    `tokens`: float64 (adapters,), mean input + output tokens of a request: the weight of a rate in the offered load.
    `start_s`: float64 (windows,), start of each window, s since 1970 (UTC) or since the first request.
    `window_s`: length of a window, s.
    `whole`: true if the trace has no whole window; the table then has one window, which is the whole trace.
    `covered_s`: float64 (windows,), how much of each window was observed, s; None: all of it.
    `surge`: a part of a window that is left out, at an end of the trace, although it is surely busier than all other
    times as long: its start, as `start_s`, its length, s, and its load, as a multiple of the busiest window's.
    """

    names: tuple[str, ...]
    rates: FloatArray
    tokens: FloatArray
    start_s: FloatArray
    window_s: float
    whole: bool = False
    covered_s: FloatArray | None = None
    surge: tuple[float, float, float] | None = None

    @property
    def busiest_s(self) -> tuple[float, float]:
        """Start of the window with the highest offered load, as `start_s`, and how much of it was observed, s."""
        k = int(self.offered_tok_s.argmax())
        covered_s = self.window_s if self.covered_s is None else min(float(self.covered_s[k]), self.window_s)
        return float(self.start_s[k]), covered_s

    @property
    def offered_tok_s(self) -> FloatArray:
        """Offered load of each window, float64 (windows,)."""
        return self.rates @ self.tokens

    def starts_of(self, rates: FloatArray) -> list[float]:
        """Starts of the windows that have these rates, as `start_s`."""
        found: list[float] = self.start_s[(self.rates == rates).all(axis=1)].tolist()
        return found

    def by_time_of_day(self) -> RateTable:
        """The mean day: windows at the same time of day averaged over the days (UTC) that have requests. Its date is
        that of the first day; a `whole` trace stays so. Raises `ValidationError`: the windows do not divide a day."""
        if DAY_S % self.window_s:
            raise ValidationError(f"Expected windows that divide a day, got {self.window_s:g} s.")
        if self.whole:
            return self
        first_s = self.start_s[0] // DAY_S * DAY_S
        days = ((self.start_s - first_s) // DAY_S).astype(np.int64)
        phase_s = self.start_s[0] % self.window_s
        slots = (np.round((self.start_s - phase_s) / self.window_s) % (DAY_S / self.window_s)).astype(np.int64)
        slots[np.bincount(days, self.rates.sum(axis=1))[days] == 0.0] = -1
        kept = distinct(slots[slots >= 0])
        rates = np.array([self.rates[slots == slot].mean(axis=0) for slot in kept])
        return replace(self, rates=rates, start_s=first_s + phase_s + kept * self.window_s, covered_s=None)

    def day(self) -> dict[str, FloatArray]:
        """The rates of each window of the mean day (UTC), float64 (adapters,), by its start as HH:MM. Raises
        `ValidationError`: the windows do not divide a day into whole minutes, do not start at multiples of their
        length, or do not cover the whole day."""
        if self.window_s % 60.0 or DAY_S % self.window_s:
            raise ValidationError(f"Expected windows of whole minutes that divide a day, got {self.window_s:g} s.")
        if (self.start_s % self.window_s).any():
            said = f"Expected windows that start at multiples of {self.window_s:g} s,"
            raise ValidationError(f"{said} got one at {clock(self.start_s[0])}.")
        mean = self.by_time_of_day()
        found = {clock(start_s): rates for start_s, rates in zip(mean.start_s, mean.rates, strict=True)}
        for start in map(clock, np.arange(0.0, DAY_S, self.window_s)):
            if start not in found:
                rule = f"Expected traffic of a whole day, got none of the {self.window_s:g} s from {start} (UTC)."
                raise ValidationError(rule)
        return found

    def loads(self, percentiles: Sequence[float] = (50.0, 95.0)) -> dict[str, FloatArray]:
        """Rate vectors that a plan may be required to serve, float64 (adapters,) each, by name.

        `mean`: the mean rates. `p95` and so on: the window whose offered load is at that percentile.
        `peak`: the window with the highest offered load. `each-peak`: every adapter at its own highest rate, an upper
        bound on all windows.
        """
        order = np.argsort(self.offered_tok_s, kind="stable")
        found = {"mean": self.rates.mean(axis=0)}
        for percentile in percentiles:
            checks.real("a percentile", percentile, low=0.0, high=100.0)
            position = max(0, math.ceil(percentile * len(order) / 100.0 - 1e-9) - 1)
            found[f"p{percentile:g}"] = self.rates[order[position]]
        found["peak"] = self.rates[order[-1]]
        found["each-peak"] = self.rates.max(axis=0)
        return found


def rates_of(trace: Trace, window_s: float) -> RateTable:
    """The rates of a trace's adapters in windows: requests / the part of the window that the trace covers.

    A trace may cover only part of its first and last window. A window covered by less than `WHOLE_FROM` is left out,
    unless its rate, over half of the window at least, is surely higher (`SURE`) than that of each whole window, and its
    load than that of the same part of each: else traffic that grows until a log ends would be missed. The part then has
    its own rates, or those over half of the window if it is shorter than `BRIEF`. But if both are partial windows at
    the same time of day, they are merged into one. A trace without requests in whole windows is treated as one window.

    `trace`: a trace with adapters. It is taken to begin half a mean gap between requests before its first request, and
    to end as long after its last one.
    `window_s`: length of a window, s; windows start at multiples of it. But where such a window is whole in no part of
    a trace that is longer than one, as in an hour and a half from 10:20, the busiest window of all is one of them.
    Raises `ValidationError`: the trace has no adapters or lasts 0 s, or there are too many windows.
    """
    checks.real("the window (s)", window_s, low=0.0, open_low=True)
    adapter, gap_s = trace.owner, gap_of(trace)
    weights = (trace.input_tokens + trace.output_tokens).astype(np.float64)
    first = trace.start_s if trace.span_s <= window_s else _begin_s(trace, window_s, weights, gap_s)
    offset = trace.start_s - first
    window = ((trace.time_s + offset) // window_s).astype(np.int64)
    window = np.zeros_like(window) if trace.span_s <= window_s else window
    count = int(window[-1]) + 1
    if count > MAX_WINDOWS or count * len(trace.names) > 50 * MAX_WINDOWS:
        rule = f"Expected fewer windows than {count:,} for {len(trace.names):,} adapters: take a longer window."
        raise ValidationError(rule)
    begins = window_s * np.arange(count, dtype=np.float64)
    covered_s = np.minimum(begins + window_s, offset + trace.span_s + gap_s / 2)
    covered_s -= np.maximum(begins, offset - gap_s / 2)
    requests = np.bincount(adapter, minlength=len(trace.names))
    tokens = np.bincount(adapter, weights, minlength=len(trace.names)) / requests
    flat = np.bincount(window * len(trace.names) + adapter, minlength=count * len(trace.names))
    table = flat.reshape(count, len(trace.names)).astype(np.float64)
    # The last window begins whole days after the first one.
    if count > 1 and begins[-1] % DAY_S == 0.0 and max(covered_s[0], covered_s[-1]) < WHOLE_FROM * window_s:
        table[0] += table[-1]
        table[-1] = 0.0
        covered_s[0] += covered_s[-1]  # more than the window if the parts overlap by more than a gap
        covered_s[0] = max(min(window_s, covered_s[0]), covered_s[0] - gap_s)
    kept, load = covered_s >= WHOLE_FROM * window_s, table @ tokens
    most = (load / covered_s).max(initial=0.0, where=kept)
    if most:
        least = load - SURE * np.sqrt(np.bincount(window, weights**2, minlength=count))
        busier = ~kept & (least > most * np.maximum(covered_s, window_s / 2))
        into_s = trace.time_s + offset - window_s * window
        for k in np.flatnonzero(busier).tolist():  # at the first or the last window
            same = into_s >= window_s - covered_s[k] if k == 0 else into_s < covered_s[k]
            busier[k] = least[k] > np.bincount(window[same], weights[same], minlength=count).max(
                where=kept, initial=0.0
            )
        kept |= busier
    else:
        covered_s = np.array([trace.span_s + gap_s])
        rates = requests[np.newaxis] / covered_s
        return RateTable(trace.names, rates, tokens, np.array([trace.start_s]), window_s, True, covered_s)
    over_s = np.where(covered_s < BRIEF * window_s, window_s / 2, covered_s)
    rates = table[kept] / over_s[kept, np.newaxis]
    surge: tuple[float, float, float] | None = None
    for k in {0, count - 1} if load[-1] else ():  # else both are merged
        begin_s, times = max(0.0, begins[k] - offset), float(load[k] / covered_s[k] / (load / over_s)[kept].max())
        if not kept[k] and times > (1.0 if surge is None else surge[2]):
            other = np.abs(trace.time_s - begin_s) >= covered_s[k]
            if least[k] > _loads(trace, weights, trace.time_s[other], covered_s[k]).max(initial=0.0):
                surge = trace.start_s + begin_s, float(covered_s[k]), times
    whole = trace.span_s <= window_s
    return RateTable(trace.names, rates, tokens, first + begins[kept], window_s, whole, covered_s[kept], surge)


def _begin_s(trace: Trace, window_s: float, weights: FloatArray, gap_s: float) -> float:
    """Where the first of several windows begins, on the clock of `Trace.start_s`; see `rates_of`."""
    before_s = trace.start_s % window_s
    shown_s = max(window_s - before_s, min(window_s, before_s + trace.span_s - window_s)) + gap_s / 2
    if shown_s >= WHOLE_FROM * window_s:
        return trace.start_s - before_s
    starts_s = trace.time_s[trace.time_s <= trace.span_s - window_s]
    at_s = float(starts_s[_loads(trace, weights, starts_s, window_s).argmax()])
    return trace.start_s + at_s - window_s * (at_s > 0.0)


def _loads(trace: Trace, weights: FloatArray, starts_s: FloatArray, length_s: float) -> FloatArray:
    """The tokens of the requests that come in the time `length_s` from each of some times on, float64 (n,)."""
    summed = np.append(0.0, np.cumsum(weights))
    ends = np.searchsorted(trace.time_s, starts_s + length_s)
    found: FloatArray = summed[ends] - summed[np.searchsorted(trace.time_s, starts_s)]
    return found


def busiest_requests(trace: Trace, table: RateTable) -> Trace:
    """The requests of the window with the highest load, from its start, and their adapters; `table`: the rates."""
    begin_s = table.busiest_s[0] - trace.start_s
    inside = np.flatnonzero((trace.time_s >= begin_s) & (trace.time_s < begin_s + table.window_s))
    used, adapter = np.unique(trace.owner[inside], return_inverse=True)
    ranks = None if trace.ranks is None else tuple(trace.ranks[k] for k in used.tolist())
    whole = replace(trace, adapter=None, names=(), ranks=None).take(inside)
    return replace(
        whole, time_s=whole.time_s - max(begin_s, 0.0), start_s=trace.start_s + max(begin_s, 0.0),
        adapter=adapter.astype(np.int64), names=tuple(trace.names[k] for k in used.tolist()), ranks=ranks,
    )  # fmt: skip


def clock(time_s: float) -> str:
    """A time of day as HH:MM."""
    return f"{int(time_s // 3600) % 24:02d}:{int(time_s // 60) % 60:02d}"


def _times_s(names: Sequence[str]) -> list[float]:
    """These times of day (HH:MM), s; [] if one of them is another name."""
    if not all(map(_CLOCK.fullmatch, names)):
        return []
    return [3600.0 * int(hour) + 60.0 * int(minute) for hour, minute in (name.split(":") for name in names)]


def begins_at_s(names: Sequence[str], period_s: float) -> float:
    """Time of day at which the first of successive periods begins, s; 0 unless all are named by times (HH:MM). Raises
    `ValidationError`: a period does not begin at the time that names it."""
    times_s = _times_s(names)
    for k, (name, time_s) in enumerate(zip(names, times_s, strict=False)):
        at_s = times_s[0] + k * period_s
        if not -60.0 < (time_s - at_s + DAY_S / 2) % DAY_S - DAY_S / 2 < 60.0:
            rule = f"Expected each period of {period_s:g} s to begin at the time that names it"
            raise ValidationError(f"{rule}, got {name!r} for the one that begins at {clock(at_s)}.")
    return times_s[0] if times_s else 0.0


def spacing_s(names: Sequence[str]) -> float | None:
    """Time from each of these times of day (HH:MM) to the next, s; None if they are not evenly spaced times."""
    if len(times_s := _times_s(names)) < 2:
        return None
    gaps_s = {(later - time_s) % DAY_S for time_s, later in itertools.pairwise(times_s)}
    gap_s = gaps_s.pop()
    return None if gaps_s or not 0.0 < gap_s * len(names) <= DAY_S else gap_s


def latest_rates(trace: Trace, window_s: float) -> FloatArray:
    """Rates in the last `window_s` seconds, or all of a shorter trace, (adapters,), req/s; raises `ValidationError`."""
    checks.real("the window (s)", window_s, low=0.0, open_low=True)
    adapter, gap_s = trace.owner, gap_of(trace)
    recent = adapter[trace.time_s > trace.time_s[-1] - window_s]
    return np.bincount(recent, minlength=len(trace.names)) / min(window_s, trace.span_s + gap_s)


def gap_of(trace: Trace) -> float:
    """Mean time from one request to the next, s."""
    return trace.lasting_s / (len(trace) - 1)


def loads_text(names: Sequence[str], loads: Mapping[str, FloatArray]) -> str:
    """The CSV that `--objective headroom:rates=FILE` and `packer schedule` read: `adapter,<load>,<load>,…`, req/s."""
    rows = ([name, *(f"{vector[k]:.6g}" for vector in loads.values())] for k, name in enumerate(names))
    return csv_text(["adapter", *loads], rows)
