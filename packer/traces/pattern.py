"""Rates per adapter over windows of time, and the hours that matter: mean, percentiles, peak."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.errors import ValidationError
from packer.traces.trace import Trace

FloatArray = npt.NDArray[np.float64]
DAY_S = 86_400.0


@dataclass(frozen=True, eq=False)
class RateTable:
    """Request rates of some adapters in successive windows.

    Parameters
    ----------
    names
        The adapters.
    rates
        float64 (windows, adapters), req/s.
    tokens
        float64 (adapters,), mean input + output tokens of a request: the weight of a rate in the load.
    start_s
        float64 (windows,), when each window starts, s since 1970 (UTC) or since the first request.
    window_s
        Length of a window.
    """

    names: tuple[str, ...]
    rates: FloatArray
    tokens: FloatArray
    start_s: FloatArray
    window_s: float

    @property
    def offered_tok_s(self) -> FloatArray:
        """Offered load of each window, float64 (windows,)."""
        load: FloatArray = self.rates @ self.tokens
        return load

    def by_time_of_day(self) -> RateTable:
        """The mean day: windows at the same time of day averaged over the days (UTC)."""
        slots = (self.start_s % DAY_S // self.window_s).astype(np.int64)
        kept = np.unique(slots)
        rates = np.array([self.rates[slots == slot].mean(axis=0) for slot in kept])
        return RateTable(
            self.names, rates, self.tokens, kept.astype(np.float64) * self.window_s, self.window_s
        )

    def loads(self, percentiles: Sequence[float] = (50.0, 95.0)) -> dict[str, FloatArray]:
        """Rate vectors that a plan may have to stand, float64 (adapters,) each, by name.

        `mean`; `p95` and so on: the window whose offered load is at that percentile of all windows; `peak`:
        the window with the highest offered load; `each-peak`: every adapter at its own highest window, which
        no window reaches but which no order of events exceeds.
        """
        order = np.argsort(self.offered_tok_s, kind="stable")
        found = {"mean": self.rates.mean(axis=0)}
        for percentile in percentiles:
            checks.real("a percentile", percentile, low=0.0, high=100.0)
            position = max(0, math.ceil(percentile / 100.0 * len(order)) - 1)
            found[f"p{percentile:g}"] = self.rates[order[position]]
        found["peak"] = self.rates[order[-1]]
        found["each-peak"] = self.rates.max(axis=0)
        return found


def rates_of(trace: Trace, window_s: float, *, start_s: float = 0.0) -> RateTable:
    """The rates of a trace's adapters in windows; windows that are cut off are left out.

    `start_s`: time of the first request, s since 1970 (UTC); windows start at its multiples of `window_s`.
    """
    checks.real("the window (s)", window_s, low=0.0, open_low=True)
    if trace.adapter is None:
        raise ValidationError("Expected a trace whose requests name their adapters.")
    first = math.floor(start_s / window_s) * window_s
    window = ((trace.time_s + start_s - first) // window_s).astype(np.int64)
    count = int(window[-1]) + 1
    if count * len(trace.names) > 50_000_000:
        raise ValidationError(
            f"Expected fewer windows than {count:,} for {len(trace.names):,} adapters: take a longer window."
        )
    flat = np.bincount(window * len(trace.names) + trace.adapter, minlength=count * len(trace.names))
    rates = flat.reshape(count, len(trace.names)) / window_s
    whole = slice(0, count)
    if count > 2:  # the first and the last window are cut off
        whole = slice(1, count - 1)
    elif count == 1:
        rates = rates * (window_s / max(trace.span_s, 1e-9)) if trace.span_s < window_s else rates
    requests = np.bincount(trace.adapter, minlength=len(trace.names))
    tokens = np.bincount(trace.adapter, trace.input_tokens + trace.output_tokens, minlength=len(trace.names))
    starts = first + window_s * np.arange(count, dtype=np.float64)
    return RateTable(trace.names, rates[whole], tokens / requests, starts[whole], window_s)


def loads_text(names: Sequence[str], loads: dict[str, FloatArray]) -> str:
    """The CSV that `--objective headroom:rates=FILE` reads: `adapter,<load>,<load>,…`, req/s."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["adapter", *loads])
    for k, name in enumerate(names):
        writer.writerow([name, *(f"{vector[k]:.6g}" for vector in loads.values())])
    return text.getvalue()


def write_loads(
    path: str | os.PathLike[str], names: Sequence[str], loads: dict[str, FloatArray], *, force: bool = False
) -> None:
    """Write `loads_text` atomically."""
    from packer.io.files import write_text

    write_text(path, loads_text(names, loads), force=force)
