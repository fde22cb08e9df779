"""Fleets measured from observed traffic: a log of requests, or Prometheus."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packer.adapter import Adapter
from packer.arrays import IntArray, distinct
from packer.arrival import RequestTrace
from packer.errors import FileFormatError, IncompatibleError, ValidationError, shown
from packer.objectives.headroom import read_rates, with_rates
from packer.operate.summary import sessions_of
from packer.operate.view import AS_LOGGED, BUSIEST, Loads, Named, Observed, View, surge_of
from packer.times import HOUR_S
from packer.traces.access_log import USUAL, Fields
from packer.traces.assign import Ranks
from packer.traces.bursts import bursts_within
from packer.traces.measure import measure_workload
from packer.traces.pattern import RateTable, busiest_requests, latest_rates, rates_of
from packer.traces.prefixes import BLOCK_TOKENS, with_hit_rate
from packer.traces.prometheus import Metrics
from packer.traces.read import read_latest, read_trace
from packer.traces.trace import Trace
from packer.traces.trend import trend_of
from packer.twin.engine.content import blocks_of_sessions
from packer.words import counted, listed, none_called
from packer.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

FEW = 384  # Of fewer requests, the total rate is known to no better than 10 %, with a confidence of 95 %.
FASTEST = 10_000.0  # Requests per second beyond which times are hardly in seconds.
MOST_BLOCKS, MOST_WRITTEN = 10_000_000, 1_000_000
"""How many blocks stand for the content of requests of which only cached tokens are known: replayed, or in a file."""


def observe_log(
    log: Trace, ranks: Ranks, view: View = BUSIEST, *, named: Named = AS_LOGGED, window_s: float = HOUR_S,
    rate_factor: float = 1.0, replay: bool = False,
) -> Observed:  # fmt: skip
    """The fleet of a log (`packer.traces.read.read_trace`), all rates times a factor; `replay`: with its requests."""
    trace, notes = named.of(log, ranks)
    notes += log.notes
    if len(trace) < FEW:
        alone, by = f"{counted(len(trace), 'request')} alone", f"by up to {1.96 * len(trace) ** -0.5:.0%}"
        notes.append(f"{alone}: the rate may differ {by} by chance; a longer log says more")
    if len(trace) > FASTEST * trace.span_s:
        within = f"{len(trace):,} requests within {trace.span_s:.2g} s"
        notes.append(f"{within}: are these times in seconds, or in days, as spreadsheets count them?")
    fleet = measure_workload(trace, replay=replay, window_s=view.bursts_s(window_s)).scaled(rate_factor)
    if replay and fleet.arrivals.trace is not None:
        fleet = fleet.replaying(_sharing(fleet.arrivals.trace, trace.cached_tokens, MOST_WRITTEN))
    rates = rates_of(trace, window_s)
    table, loads = view.loads(replace(rates, rates=rates.rates * rate_factor))
    if view.at != "mean" and not replay and not table.whole:
        fleet = with_rates(fleet, next(iter(loads.values())))
    if not replay:
        fleet = _following(fleet, trace, view, table, loads)
        notes += _trend_of(fleet)
    if fleet.shares_prefixes:
        turns, share = sessions_of(fleet)
        said = [f"requests come in sessions of {turns:.3g} turns on average"] * fleet.has_sessions
        if share >= 0.5:
            said.append(f"prompts of an adapter share {share:,.0f} tokens on average, shorter ones all of theirs")
        notes += [", and ".join(said)] if said else []
    if absent := sorted(name for name, rank in ranks.table.items() if rank and name not in set(trace.names)):
        notes.append(f"no requests to {listed(absent, 10)}, left out though the table of ranks has them")
    notes += _elsewhere(table, loads) if view.at == "peak" else []
    notes += [] if replay else surge_of(rates)
    as_logged = view == BUSIEST and rate_factor == 1.0 and not replay
    hour = requests_to(fleet.names, busiest_requests(trace, rates), window_s) if as_logged else None
    return Observed(fleet, table, loads, tuple(notes), trace.span_s, hour)


def _following(fleet: Workload, trace: Trace, view: View, table: RateTable, loads: Loads) -> Workload:
    """The fleet, with mean rates that follow the trend inside the first window whose rates it has, if it has such."""
    starts_s = table.starts_of(next(iter(loads.values()))) if view.at != "mean" else []
    if not starts_s:
        return fleet
    trend = trend_of(trace, starts_s[0], table.window_s, daily=view.by_time_of_day and not table.whole)
    return fleet.with_arrivals(fleet.arrivals.following(trend))


def _trend_of(fleet: Workload) -> list[str]:
    """Return a sentence if the rates follow a trend."""
    if not (factors := fleet.arrivals.factors):
        return []
    least, most = min(factors), max(factors)
    return [f"in that time the load goes from {least:.2g} to {most:.2g} × its mean; the rates follow it"]


def _elsewhere(table: RateTable, loads: Loads) -> list[str]:
    """Return a sentence if much load of adapters is in other windows than the busiest one, beyond chance."""
    peak, own = loads["peak"], loads["each-peak"]
    other = np.where(own - peak > 5.0 * np.sqrt(own / table.window_s), own - peak, 0.0)
    planned, count = float(peak @ table.tokens), counted(int((other > 0).sum()), "adapter")
    said = f"the busiest windows of {count} are other ones: --at each-peak plans for {own @ table.tokens / planned:.2g}"
    said += " × the load of the busiest one; --skip leaves out what a deploy replaced"
    return [said] if other @ table.tokens >= 0.5 * planned else []


def observe_metrics(metrics: Metrics, ranks: Ranks, view: View = BUSIEST) -> Observed:
    """The fleet of a gateway's counters (`packer.traces.prometheus`), with ShareGPT's spread of lengths."""
    table, loads = view.loads(metrics.table)
    known = replace(ranks, table={**metrics.ranks, **ranks.table})
    fleet = _of_metrics(metrics, next(iter(loads.values())).tolist(), known.of(table.names))
    notes = none_called(metrics.unmet, "--skip", table.names) + ranks.unseen(table.names)
    notes.append("mean lengths are measured; their spread is not in the metrics and is ShareGPT's")
    if metrics.estimated:
        notes.append("vLLM's metrics carry no adapter: the shares are estimated from which adapters are seen")
    if metrics.load_ms is not None:
        notes.append(f"loading an adapter took {metrics.load_ms:,.0f} ms on average (vllm:lora_adapter_load_seconds)")
    if metrics.hit_rate is not None:
        said = f"vLLM found {metrics.hit_rate:.1%} of the prompt tokens in its KV cache: prompts of each adapter share"
        notes.append(f"{said} a prefix that gives this rate, because the metrics do not say whose prompts share what")
    if metrics.acceptance is not None:
        notes.append(f"{metrics.acceptance:.1%} of the drafts of speculative decoding were kept")
    return Observed(fleet, table, loads, tuple(notes))


def log_of_plan(path: str | os.PathLike[str], fields: Fields = USUAL, latest_s: float | None = None) -> Trace:
    """Requests of a log, which may grow, to a plan's adapters, with rank 1; raises `FileFormatError`. `latest_s`: those
    of the last such time suffice (`read_latest`), in which the log must have been written."""
    log = read_trace(path, fields) if latest_s is None else read_latest(path, fields, latest_s)
    if latest_s is not None and (age_s := time.time() - os.path.getmtime(path)) > latest_s:
        said = f"it was last written {age_s / 60.0:.0f} minutes ago: its last window is not the present."
        raise FileFormatError(said, path=path)
    if log.adapter is None:
        raise FileFormatError("the log names no adapters, so that no plan can be compared with it.", path=path)
    return replace(log, ranks=(1,) * len(log.names))


def seen_in_log(trace: Trace, window_s: float, *, busiest: bool = False) -> Workload:
    """The fleet in the last window of a log, or in its busiest one."""
    if busiest:
        table = rates_of(trace, window_s)
        rates = table.loads(())["peak"]
        start_s = table.starts_of(rates)[0]
    else:
        rates, start_s = latest_rates(trace, window_s), trace.start_s + trace.span_s - window_s
    fleet = measure_workload(trace, window_s=window_s)
    arrivals = fleet.arrivals.following(trend_of(trace, start_s, window_s))
    kept = [replace(a, rate=rate) for a, rate in zip(fleet.adapters, rates.tolist(), strict=True) if rate > 0]
    return replace(fleet, adapters=tuple(kept), arrivals=arrivals)


def requests_to(names: Sequence[str], log: Trace, window_s: float) -> RequestTrace | None:
    """The requests of a log to the adapters of these names, by their place among the names; None if there are none.
    `window_s`: minimum length. It is longer than a short log, so that all of its requests end. Where the
    log has the number of cached tokens and no ids of blocks, the first prompts of sessions share them by adapter."""
    place = {name: i for i, name in enumerate(names) if name}
    numbers = np.array([place.get(name, -1) for name in log.names], dtype=np.int64)
    rows = np.flatnonzero(numbers[log.owner] >= 0)
    if not len(rows):
        return None
    found = log.requests().take(rows)
    found = replace(found, adapter=numbers[found.adapter], end_s=max(window_s, found.span_s))
    return _sharing(found, None if log.cached_tokens is None else log.cached_tokens[rows], MOST_BLOCKS)


def _sharing(requests: RequestTrace, cached: IntArray | None, most: int) -> RequestTrace:
    """The requests, of which the first of each session begins with so many tokens that its adapter's share, unless they
    have ids of blocks. `most`: about how many blocks are made; blocks of more tokens are made beyond it."""
    if requests.blocks is not None or cached is None:
        return requests
    sessions = np.arange(len(requests)) if requests.sessions is None else requests.sessions
    lengths = requests.input_tokens, requests.output_tokens
    tokens = BLOCK_TOKENS * math.ceil(sum(int(each.sum()) for each in lengths) / (BLOCK_TOKENS * most))
    blocks = blocks_of_sessions(sessions, requests.adapter, *lengths, tokens, cached=cached)
    return replace(requests, blocks=blocks)


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
    "pNN" (the hour at that percentile of the load); with a file, the name of one of its columns.
    `rates_path`: a file `adapter,<load>,<load>,…`, as `--loads` of the commands that measure workloads writes it.
    Raises `IncompatibleError`: there is neither a trace nor a file; `ValidationError`: there is no such load.
    """
    if rates_path is not None:
        given = read_rates(os.fspath(rates_path), fleet)
        if load not in given:
            raise ValidationError(f"Expected a load among {', '.join(given)} of {rates_path}, got {shown(load)}.")
        at = with_rates(fleet, given[load])
        return at if load == "mean" else at.with_arrivals(bursts_within(fleet.arrivals, HOUR_S))
    if fleet.arrivals.trace is None:
        raise IncompatibleError("A load needs a trace of requests, or a file of the rates at each load (--loads FILE).")
    return observe_replayed(fleet, load).fleet


def observe_replayed(fleet: Workload, load: str = "peak") -> Observed:
    """Observe the trace that a fleet replays; the result has random arrivals at one of its loads, as in `at_load`."""
    view, trace = View(load, ()), replayed_trace(fleet)
    rates = rates_of(trace, HOUR_S)
    table, loads = view.loads(rates)
    drawn = _drawn(fleet, trace, view.bursts_s(HOUR_S))
    at = drawn if load == "mean" else with_rates(drawn, next(iter(loads.values())))
    at = _following(at, trace, view, table, loads)
    hour = requests_to(at.names, busiest_requests(trace, rates), HOUR_S) if view.at == BUSIEST.at else None
    return Observed(at, table, loads, (*_trend_of(at), *surge_of(rates)), trace.span_s, hour)


def drawn_within(fleet: Workload, window_s: float) -> Workload:
    """The fleet with the random arrivals within windows of this length, if the rates of the windows are known. For a
    fleet that replays a trace they are measured from it; adapters without a request stay as they are."""
    if fleet.arrivals.trace is not None:
        drawn = _drawn(fleet, replayed_trace(fleet), window_s)
        known = {adapter.name: adapter for adapter in drawn.adapters}
        return replace(drawn, adapters=tuple(known.get(a.name, a) for a in fleet.adapters))
    return fleet.with_arrivals(bursts_within(fleet.arrivals, window_s))


def replayed_trace(fleet: Workload) -> Trace:
    """The requests of a fleet that replays a trace."""
    replayed = fleet.arrivals.trace
    assert replayed is not None
    seen = distinct(replayed.adapter)
    names = tuple(fleet.names[i] for i in seen.tolist())
    ranks = tuple(fleet.adapters[i].rank for i in seen.tolist())
    return Trace(
        replayed.time_s, replayed.input_tokens, replayed.output_tokens, np.searchsorted(seen, replayed.adapter),
        names, ranks, source=fleet.name, blocks=replayed.blocks, sessions=replayed.sessions,
        step_s=replayed.step_s, start_s=replayed.start_s,
    )  # fmt: skip


def _drawn(fleet: Workload, trace: Trace, window_s: float | None) -> Workload:
    """The workload measured from a trace; what a trace does not show is that of the fleet that replays it."""
    measured, own = measure_workload(trace, window_s=window_s), {each.name: each for each in fleet.adapters}
    adapters = tuple(
        replace(
            own[a.name], rate=a.rate, input_tokens=a.input_tokens, output_tokens=a.output_tokens,
            shared_prefix_tokens=a.shared_prefix_tokens, sessions=a.sessions,
        )
        for a in measured.adapters
    )  # fmt: skip
    return replace(measured, adapters=adapters, slo=fleet.slo, fine_tuning=fleet.fine_tuning)


def _of_metrics(metrics: Metrics, rates: Sequence[float], ranks: Sequence[int]) -> Workload:
    columns = (metrics.table.names, ranks, rates, metrics.mean_input.tolist(), metrics.mean_output.tolist())
    adapters = [
        Adapter(name, rank, rate, SHAREGPT_INPUT.scaled(inputs), SHAREGPT_OUTPUT.scaled(outputs))
        for name, rank, rate, inputs, outputs in zip(*columns, strict=True)
        if rate > 0
    ]
    if metrics.acceptance is not None:
        adapters = [replace(adapter, acceptance=float(f"{metrics.acceptance:.4g}")) for adapter in adapters]
    fleet = Workload(adapters, name="metrics")
    return fleet if metrics.hit_rate is None else with_hit_rate(fleet, metrics.hit_rate)
