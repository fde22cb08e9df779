"""Fleets measured from observed traffic: a gateway's access log, or Prometheus."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from packer.adapter import Adapter
from packer.errors import FileFormatError, IncompatibleError, ValidationError, shown
from packer.objectives.headroom import read_rates, with_rates
from packer.operate.day import HOUR_S
from packer.traces.access_log import AccessLog, read_access_log
from packer.traces.bursts import bursts_within
from packer.traces.measure import measure_workload
from packer.traces.pattern import RateTable, clock, latest_rates, rates_of
from packer.traces.prometheus import Metrics
from packer.traces.ranks import Ranks
from packer.traces.trace import Trace
from packer.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

Loads = Mapping[str, npt.NDArray[np.float64]]


@dataclass(frozen=True)
class View:
    """Which rates of the observed time the fleet gets.

    `at`: "mean", "peak" (the busiest window), "each-peak" (each adapter's own busiest window) or "pNN" (the window at
    that percentile of the load).
    `percentiles`: further percentiles among `Observed.loads`.
    `by_time_of_day`: average windows at the same time of day (UTC) over the days first.
    """

    at: str = "mean"
    percentiles: tuple[float, ...] = (50.0, 95.0)
    by_time_of_day: bool = False

    def bursts_s(self, window_s: float) -> float | None:
        """Length of the windows in which bursts are measured, s: those of the rates, unless these are the mean."""
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


@dataclass(frozen=True, eq=False)
class Observed:
    """What was observed: the fleet, its rates by window, and the rate vectors that a plan may have to serve.

    `notes`: how the figures were obtained, in sentences.
    """

    fleet: Workload
    table: RateTable
    loads: Loads
    notes: tuple[str, ...] = field(default=())

    @property
    def times_mean(self) -> float:
        """Offered load at the rates of the fleet over that at the mean rates."""
        return float(
            next(iter(self.loads.values())) @ self.table.tokens / (self.loads["mean"] @ self.table.tokens)
        )

    @property
    def span(self) -> str:
        """How long was observed, in words."""
        span_s = float(self.table.start_s[-1] - self.table.start_s[0]) + self.table.window_s
        return f"{span_s / HOUR_S:.3g} h" if span_s < 48 * HOUR_S else f"{span_s / (24 * HOUR_S):.3g} days"

    @property
    def planned_for(self) -> str:
        """Which rates the fleet has, in words: "10:00 (UTC), 2.9 × the mean"."""
        at, rates = next(iter(self.loads.items()))
        same = np.flatnonzero((self.table.rates == rates).all(axis=1))
        when = {"mean": "the mean", "each-peak": "each adapter's busiest window"}.get(at, f"the load {at}")
        if len(same) and at != "mean":
            start_s = float(self.table.start_s[same[0]])
            day = f"{datetime.fromtimestamp(start_s, UTC):%Y-%m-%d} " if len(self.table.rates) > 24 else ""
            when = f"{day}{clock(start_s)} (UTC)"
        return when if at == "mean" else f"{when}, {self.times_mean:.2g} × the mean"


def observe_log(
    log: AccessLog, ranks: Ranks, view: View = View(), *, window_s: float = HOUR_S, replay: bool = False
) -> Observed:
    """The fleet of an access log (`packer.traces.access_log.read_access_log`); `replay`: with its requests."""
    if replay and view.at != "mean":
        raise IncompatibleError("A replayed log has its own rates: --replay and --at exclude each other.")
    trace = replace(log.trace, ranks=ranks.of(log.trace.names))
    fleet = measure_workload(trace, replay=replay, window_s=view.bursts_s(window_s))
    table, loads = view.loads(rates_of(trace, window_s, start_s=log.start_s))
    if view.at != "mean":
        fleet = with_rates(fleet, next(iter(loads.values())))
    notes = [] if log.trace.step_s == 0.0 else [stepped(log.trace.step_s)]
    if trace.dropped or log.other:
        notes.append(f"left out {trace.dropped} requests without tokens and {log.other} other lines")
    return Observed(fleet, table, loads, tuple(notes))


def stepped(step_s: float) -> str:
    """What is said of timestamps that come in steps."""
    return f"timestamps come in steps of {step_s:g} s: the requests of a step are spread over it at random"


def observe_metrics(metrics: Metrics, ranks: Ranks, view: View = View()) -> Observed:
    """The fleet of a gateway's counters (`packer.traces.prometheus`); the spread of lengths is ShareGPT's."""
    table, loads = view.loads(metrics.table)
    known = replace(ranks, table={**metrics.ranks, **ranks.table})
    fleet = _of_metrics(metrics, next(iter(loads.values())).tolist(), known.of(table.names))
    notes = ["mean lengths are measured; their spread is not in the metrics and is ShareGPT's"]
    if metrics.estimated:
        notes.append("vLLM's metrics carry no adapter: the shares are estimated from which adapters are seen")
    if metrics.load_ms is not None:
        notes.append(
            f"loading an adapter took {metrics.load_ms:,.0f} ms in the mean (vllm:lora_adapter_load_seconds)"
        )
    return Observed(fleet, table, loads, tuple(notes))


def seen_in_log(path: str | os.PathLike[str], window_s: float, *, busiest: bool = False) -> Workload:
    """The fleet in the last window of a log, which may still grow, or in its busiest one; its ranks are 1."""
    log = read_access_log(path, growing=True)
    trace = replace(log.trace, ranks=(1,) * len(log.trace.names))
    if busiest:
        rates = rates_of(trace, window_s, start_s=log.start_s).loads(())["peak"]
    else:
        rates = latest_rates(trace, window_s)
    return _at(measure_workload(trace, window_s=window_s), rates.tolist())


def latest_of_metrics(metrics: Metrics, where: str) -> Workload:
    """The fleet in the last window of the metrics; its ranks are 1: metrics have none."""
    rates = metrics.table.rates[-1].tolist()
    if not any(rates):
        raise FileFormatError("no request was counted in the latest window.", path=where)
    return _of_metrics(metrics, rates, (1,) * len(rates))


def at_load(fleet: Workload, load: str, rates_path: str | os.PathLike[str] | None = None) -> Workload:
    """The fleet at one of its loads; adapters without a request then keep a rate near 0.

    `fleet`: a fleet that replays a trace, unless there is a file of rates.
    `load`: "mean", "peak" (the hour with the highest offered load), "each-peak" (each adapter's own busiest hour) or
    "pNN" (the hour at that percentile of the load); of a file the name of one of its columns.
    `rates_path`: a file `adapter,<load>,<load>,…`, as `--loads` of the commands that measure workloads writes it.
    Raises `IncompatibleError`: there is neither a trace nor a file; `ValidationError`: there is no such load.
    """
    if rates_path is not None:
        given = read_rates(os.fspath(rates_path), fleet)
        if load not in given:
            raise ValidationError(
                f"Expected a load among {', '.join(given)} of {rates_path}, got {shown(load)}."
            )
        at = with_rates(fleet, given[load])
        return at if load == "mean" else at.with_arrivals(bursts_within(fleet.arrivals, HOUR_S))
    replayed = fleet.arrivals.trace
    if replayed is None:
        raise IncompatibleError(
            "A load needs a trace of requests, or a file of the rates at each load (--loads FILE)."
        )
    seen = np.unique(replayed.adapter)
    names = tuple(fleet.names[i] for i in seen.tolist())
    ranks = tuple(fleet.adapters[i].rank for i in seen.tolist())
    trace = Trace(
        replayed.time_s, replayed.input_tokens, replayed.output_tokens, np.searchsorted(seen, replayed.adapter),
        names, ranks, source=fleet.name,
    )  # fmt: skip
    view = View(load, ())
    _, loads = view.loads(rates_of(trace, HOUR_S))
    measured = measure_workload(trace, window_s=view.bursts_s(HOUR_S))
    classes = {adapter.name: adapter.slo_class for adapter in fleet.adapters}
    adapters = tuple(replace(a, slo_class=classes[a.name]) for a in measured.adapters)
    return with_rates(replace(measured, adapters=adapters, slo=fleet.slo), next(iter(loads.values())))


def _at(fleet: Workload, rates: Sequence[float]) -> Workload:
    """The fleet at other rates; adapters without a request are left out."""
    kept = [replace(a, rate=rate) for a, rate in zip(fleet.adapters, rates, strict=True) if rate > 0]
    return replace(fleet, adapters=tuple(kept))


def _of_metrics(metrics: Metrics, rates: Sequence[float], ranks: Sequence[int]) -> Workload:
    columns = (metrics.table.names, ranks, rates, metrics.mean_input.tolist(), metrics.mean_output.tolist())
    adapters = [
        Adapter(name, rank, rate, SHAREGPT_INPUT.scaled(inputs), SHAREGPT_OUTPUT.scaled(outputs))
        for name, rank, rate, inputs, outputs in zip(*columns, strict=True)
        if rate > 0
    ]
    return Workload(adapters, name="metrics")
