"""Observed traffic: which adapters its requests belong to, and which of its rates a fleet gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from packer.arrays import FloatArray
from packer.arrival import RequestTrace
from packer.errors import IncompatibleError, ValidationError
from packer.times import DAY_S, HOUR_S, SINCE_1970_S
from packer.traces.assign import DEFAULT_EXPONENT, Ranks, assign_adapters
from packer.traces.pattern import WHOLE_FROM, RateTable, clock
from packer.traces.trace import Trace
from packer.workload import Workload

Loads = Mapping[str, FloatArray]
DEFAULT_ADAPTERS = 200  # Number of adapters to assign requests to, if a trace names none.
DEFAULT_RANKS = (8, 16, 32)  # Ranks of such assigned adapters. Ranks of a log's own adapters are never assumed.


@dataclass(frozen=True)
class View:
    """Which rates of the observed time the fleet gets.

    `at`: "mean", "peak" (the busiest window), "each-peak" (each adapter's own busiest window) or "pNN" (the window at
    that percentile of the load).
    `percentiles`: further percentiles among `Observed.loads`.
    `by_time_of_day`: average windows at the same time of day (UTC) over the days first.
    """

    at: str = "peak"
    percentiles: tuple[float, ...] = (50.0, 95.0)
    by_time_of_day: bool = False

    def bursts_s(self, window_s: float) -> float | None:
        """Length of the windows in which bursts are measured, s: that of the rates' windows; None for mean rates."""
        return None if self.at == "mean" else window_s

    def loads(self, table: RateTable) -> tuple[RateTable, Loads]:
        """The table as viewed, and rate vectors float64 (adapters,) by name, the one called `at` first."""
        table = table.by_time_of_day() if self.by_time_of_day else table
        at, wanted = self.at, list(self.percentiles)
        if at.startswith("p") and at != "peak":
            try:
                wanted.append(float(at[1:]))
                at = f"p{float(at[1:]):g}"
            except ValueError:
                at = ""
        loads = table.loads(wanted)
        if at not in loads:
            raise ValidationError(f"Expected --at to be mean, peak, each-peak or p0 … p100, got {self.at!r}.")
        return table, {at: loads[at], **loads}


def lasting(span_s: float) -> str:
    """A length of time in words: "20 min"."""
    units = ((1.0, "s", 100.0), (60.0, "min", 90.0), (HOUR_S, "h", 48.0), (24 * HOUR_S, "days", math.inf))
    return next(f"{span_s / unit_s:.3g} {name}" for unit_s, name, most in units if span_s < most * unit_s)


def _time(start_s: float, *, dated: bool) -> str:
    """A time of a log: "10:00 (UTC)", after its day where it is `dated`, or the time since the log's start."""
    if start_s < SINCE_1970_S:
        return f"{start_s // HOUR_S:02.0f}:{start_s // 60.0 % 60.0:02.0f} after its start"
    return f"{datetime.fromtimestamp(start_s, UTC):%Y-%m-%d} " * dated + f"{clock(start_s)} (UTC)"


def surge_of(table: RateTable) -> list[str]:
    """Return a sentence if a busy part of a window at an end of the log is left out."""
    if table.surge is None:
        return []
    start_s, covered_s, times = table.surge
    said = f"the {lasting(covered_s)} from {_time(start_s, dated=False)} at an end of the log have {times:.2g} × the"
    return [f"{said} load of its busiest window and are left out, too short to tell growth from a burst"]


@dataclass(frozen=True, eq=False)
class Observed:
    """What was observed: the fleet, its rates by window, and the rate vectors that a plan may have to serve.

    `notes`: how the figures were obtained, in sentences.
    `span_s`: length of the observation, s; None: that of the table's windows.
    `hour`: requests of the busiest window, with adapters as indices of the fleet, if the fleet has its rates.
    """

    fleet: Workload
    table: RateTable
    loads: Loads
    notes: tuple[str, ...] = field(default=())
    span_s: float | None = None
    hour: RequestTrace | None = None

    @property
    def times_mean(self) -> float:
        """Offered load at the fleet's rates, divided by the offered load at the mean rates."""
        planned, tokens = next(iter(self.loads.values())), self.table.tokens
        return float(planned @ tokens / (self.loads["mean"] @ tokens))

    @property
    def span(self) -> str:
        """Length of the observation, and how much of it had no requests, in words."""
        found = lasting(self.span_s or float(np.ptp(self.table.start_s)) + self.table.window_s)
        empty_s = self.table.window_s * int((self.table.rates.sum(axis=1) == 0.0).sum())
        return f"{found}, of which {lasting(empty_s)} have no requests" if empty_s else found

    @property
    def planned_for(self) -> str:
        """Which rates the fleet has, in words: "10:00 (UTC), 2.9 × the mean"."""
        at, rates = next(iter(self.loads.items()))
        starts_s = self.table.starts_of(rates)
        when = {"mean": "the mean", "each-peak": "each adapter's busiest window"}.get(at, f"the load {at}")
        if starts_s and at != "mean":
            several = float(np.ptp(self.table.start_s)) + self.table.window_s > DAY_S
            when = _time(starts_s[0], dated=several)
            shown_s = self.table.busiest_s[1]
            if at == "peak" and shown_s < WHOLE_FROM * self.table.window_s:
                when = f"{when}, of which the log shows {lasting(shown_s)}"
        if at == "mean" or self.table.whole:
            return "the mean"
        if len(self.table.rates) == 1:
            kind = "busiest" if starts_s[0] % self.table.window_s else "only whole"
            return f"{when}, the {kind} window in it"
        return f"{when}, {self.times_mean:.2g} × the mean"


@dataclass(frozen=True)
class Named:
    """Which adapters a log's requests belong to, if the log does not say it.

    `adapters`: number of adapters to assign the requests to, whatever the log says; None: the log's own adapters, or
    `DEFAULT_ADAPTERS` if it names none.
    `exponent`, `seed`: of the power law of the adapters' popularity, and of the draws (`assign_adapters`).
    `needs_law`: whether a log that names its adapters, which needs no power law, is refused.
    """

    adapters: int | None = None
    exponent: float = DEFAULT_EXPONENT
    seed: int = 0
    needs_law: bool = False

    def of(self, trace: Trace, ranks: Ranks) -> tuple[Trace, list[str]]:
        """The trace with adapters and ranks, and what was assumed, in sentences."""
        if trace.adapter is not None and self.adapters is None:
            if self.needs_law:
                raise IncompatibleError("The log names its adapters: --exponent needs --adapters, which draws others.")
            own = trace.ranks is not None and not (ranks.table or ranks.others)
            ranked = trace if own else replace(trace, ranks=ranks.of(trace.names, seed=self.seed))
            return ranked, ranks.unseen(trace.names)
        count = self.adapters or DEFAULT_ADAPTERS
        notes = []
        if self.adapters is None:
            said = f"the log names no adapters: its requests go to {count}, by a power law of exponent"
            notes.append(f"{said} {self.exponent:g} (--adapters, --exponent); --key model=NAME says where names are")
        if not (ranks.table or ranks.others):
            ranks = Ranks(others=DEFAULT_RANKS)
            notes.append("each of these adapters gets a rank of 8, 16 or 32 at random (--ranks)")
        drawn = ranks.others if ranks.others and not ranks.table else None
        trace = assign_adapters(trace, count, ranks=drawn, exponent=self.exponent, seed=self.seed)
        return trace if drawn else replace(trace, ranks=ranks.of(trace.names, seed=self.seed)), notes


BUSIEST, AS_LOGGED = View(), Named()
