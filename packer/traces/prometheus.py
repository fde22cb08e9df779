"""Rates and lengths per adapter from a Prometheus server, or from a saved answer of one.

Gateways count requests and tokens per model, and behind a gateway an adapter is a model. vLLM's own counters do not
distinguish adapters: without a gateway, only the total rate and the mean lengths are measured, and the adapters' shares
are estimated (`packer.traces.vllm_metrics`).
"""

from __future__ import annotations

import http.client
import math
import os
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packer import checks
from packer.arrays import FloatArray
from packer.errors import FileFormatError, LiveError, ValidationError, reader, shown
from packer.io.documents import parse_json
from packer.io.files import read_text
from packer.io.shipped import table
from packer.io.web import Address, address_of, ask
from packer.traces.pattern import WHOLE_FROM, RateTable
from packer.traces.vllm_metrics import Series, mean_load_ms, ranks_of, shares_in_flight, shares_resident, total_of

MAX_ANSWER_BYTES = 128_000_000
TIMEOUT_S = 60.0  # Time limit of a whole response, s.
MAX_POINTS = 11_000  # Largest number of points for which Prometheus accepts a range query.


@dataclass(frozen=True, slots=True)
class CounterNames:
    """Names of a gateway's counters and of its label for the adapter; `running` and below: vLLM's own metrics."""

    requests: str
    input_tokens: str
    output_tokens: str
    label: str
    running: str = ""
    loaded: str = ""
    load_seconds: str = ""
    prefix_hits: str = "vllm:prefix_cache_hits_total"
    prefix_queries: str = "vllm:prefix_cache_queries_total"
    drafts_kept: str = "vllm:spec_decode_num_accepted_tokens_total"
    drafts: str = "vllm:spec_decode_num_draft_tokens_total"


SOURCES = {name: CounterNames(**row) for name, row in table("packer.traces", "prometheus.toml").items()}
"""Counters of known gateways, by name of the gateway."""

_COUNTED, _GAUGES = ("requests", "input_tokens", "output_tokens"), ("running", "loaded")
"""Fields of `CounterNames` for a gateway's counters, and for gauges, which are sampled at short intervals."""

ENDS = ("first", "last")  # When any of the counters was first and last seen in a window.

MOST_COUNT = 1e15
_SHARES = {"hit_rate": ("prefix_hits", "prefix_queries"), "acceptance": ("drafts_kept", "drafts")}
"""Fields of vLLM's counters whose quotients are shares: prompt tokens found in the KV cache / tokens looked up, and
accepted / proposed draft tokens of speculative decoding."""


def source_named(gateway: str, **names: str | None) -> CounterNames:
    """Counters of a gateway of `SOURCES` or "custom", with other `names`; raises `ValidationError`: one is missing."""
    given = {key: name for key, name in names.items() if name}
    known = SOURCES.get(gateway)
    if known is not None:
        return replace(known, **given)
    if len(given) < 4:
        raise ValidationError("Expected --requests-metric, --input-tokens-metric, --output-tokens-metric and --label.")
    return CounterNames(**given)


@dataclass(frozen=True, eq=False)
class Metrics:
    """Traffic according to the metrics.

    `mean_input`, `mean_output`: tokens of a request, float64 (adapters,). `estimated`: whether the adapters' shares are
    estimates. `ranks`: adapter → rank, and `load_ms`: mean time to load an adapter, if the metrics have them.
    `hit_rate`: share of prompt tokens found in vLLM's KV cache, `acceptance`: share of accepted drafts; None: unknown.
    `unmet`: models to skip that no request names.
    """

    table: RateTable
    mean_input: FloatArray
    mean_output: FloatArray
    estimated: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    load_ms: float | None = None
    hit_rate: float | None = None
    acceptance: float | None = None
    unmet: tuple[str, ...] = ()


def queries(source: CounterNames, window_s: float) -> dict[str, str]:
    """The PromQL queries by name."""
    window = f"{max(1, round(window_s))}s"
    by = f"sum by ({source.label}) " if source.label else "sum "
    found = {name: f"{by}(increase({getattr(source, name)}[{window}]))" for name in _COUNTED}
    found |= {name: query for name in _GAUGES if (query := getattr(source, name))}
    # When any of the counters exists: a new Prometheus, or one that was away, has a part of the window.
    there = f"(0 * count ({source.requests}) + time())[{window}:{_step_s(window_s)}s]"
    found |= {name: f"{kind}_over_time({there})" for name, kind in zip(ENDS, ("min", "max"), strict=True)}
    counted = (name for pair in _SHARES.values() for name in pair)
    found |= {name: f"sum (increase({getattr(source, name)}[{window}]))" for name in counted}
    if source.load_seconds:
        for part in ("sum", "count"):
            found[f"load_{part}"] = f"sum (increase({source.load_seconds}_{part}[{window}]))"
    return found


def fetch(
    server: Address | str, source: CounterNames, *, end_s: float, span_s: float, window_s: float
) -> dict[str, Any]:
    """Responses of a Prometheus server to `queries`, by name, and the window; the input of `parse`. Raises
    `ValidationError`: the URL is not an HTTP address, or the span has too many windows; `LiveError`: the server can't
    be reached, refuses a query, or does not respond in HTTP and JSON."""
    where = address_of(server) if isinstance(server, str) else server
    checks.real("the window (s)", window_s, low=1.0)
    checks.real("the span (s)", span_s, low=window_s)
    if span_s / window_s > MAX_POINTS:
        raise ValidationError(f"Expected at most {MAX_POINTS:,} windows, got {span_s / window_s:,.0f}.")
    answers: dict[str, Any] = {"window_s": window_s}
    for name, query in queries(source, window_s).items():
        # The increase of a counter covers the window before the query time; gauges are sampled at short intervals.
        step = max(15.0, span_s / (MAX_POINTS - 1)) if name in _GAUGES else window_s
        parameters = {"query": query, "start": end_s - span_s + window_s, "end": end_s, "step": step}
        answers[name] = _get(where, parameters)
    return answers


def _get(where: Address, parameters: Mapping[str, object]) -> Any:
    body = urllib.parse.urlencode({key: str(value) for key, value in parameters.items()}).encode()
    at = f"Prometheus at {where.url}"
    try:
        limits: dict[str, Any] = {"limit_bytes": MAX_ANSWER_BYTES, "total_s": TIMEOUT_S}
        status, data = ask(where, "/api/v1/query_range", body=body, **limits)
    except (OSError, ValueError) as error:
        raise LiveError(f"{at} can't be reached: {error}") from None
    except http.client.HTTPException as error:
        raise LiveError(f"Expected {at} to answer in HTTP, got {error!r}.") from None
    if 300 <= status < 400:
        raise LiveError(f"Expected the address of Prometheus itself: {where.url} redirects ({status}).")
    if not 200 <= status < 300:
        reason = where.said(status, data[:4096].decode("utf-8", "replace"))[:400]
        hint = " --api-key-env gives it a key." if status in (401, 403) else ""
        raise LiveError(f"Prometheus refused {parameters['query']!r}: {reason}{hint}")
    try:
        answer = parse_json(data.decode())
        if answer["data"]["resultType"] == "matrix":
            return answer
    except (ValueError, LookupError, TypeError):
        pass
    raise LiveError(f"Expected {at} to answer query_range by a matrix in JSON, got {shown(data)}.")


@reader
def read_export(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The responses of a server in a file that `--save` wrote, for `parse`."""
    data = parse_json(read_text(path))
    if not isinstance(data, dict) or "requests" not in data:
        raise FileFormatError("expected what --save writes: an object with the key 'requests'.")
    return data


def parse(answers: Mapping[str, Any], source: CounterNames, *, skip: Collection[str] = ()) -> Metrics:
    """Rates and mean lengths per adapter from the responses, without the models in `skip`. Raises `FileFormatError`: a
    response does not have Prometheus's format, or no request was counted."""
    window_s = answers.get("window_s")
    if isinstance(window_s, bool) or not isinstance(window_s, (int, float)) or not 1 <= window_s < 1e9:
        raise FileFormatError(f"expected window_s to be a length in s, got {shown(window_s)}.")
    found = {name: _series(answers.get(name), source.label, name) for name in _COUNTED}
    covered_s = _covered_s(answers, {time for series in found["requests"].values() for time in series}, window_s)
    if not covered_s:
        raise FileFormatError("no request was counted in this time.", column="requests")
    times = [time for time, each in covered_s.items() if each >= WHOLE_FROM * max(covered_s.values())]
    loaded = _optional(answers, "loaded")
    shares = None
    if source.running:  # newer versions of vLLM export the adapters in slots, not those in flight
        running = _optional(answers, "running")
        shares = shares_resident(loaded) if loaded and not running else shares_in_flight(running)
    known = set(found["requests"] if shares is None else shares)
    names = sorted(set(found["requests"]) - set(skip))
    counts = np.array([[found["requests"][name].get(t, 0.0) for name in names] for t in times])
    sums = {
        kind: np.array([sum(found[kind].get(name, {}).get(t, 0.0) for t in times) for name in names])
        for kind in _COUNTED[1:]
    }
    if shares is not None:
        names = sorted(known - set(skip))
        weights = np.array([shares[name] for name in names])
        counts = counts.sum(axis=1, keepdims=True) * weights
        sums = {kind: total.sum() * weights for kind, total in sums.items()}
    observed_s = np.array([covered_s[t] for t in times], dtype=np.float64)
    metrics = replace(_metrics(names, counts, sums, times, window_s, observed_s), estimated=shares is not None)
    load_ms = mean_load_ms(*(_optional(answers, f"load_{part}") for part in ("sum", "count")))
    counted = {name: [total_of(_optional(answers, each)) for each in pair] for name, pair in _SHARES.items()}
    more: dict[str, Any] = {name: min(1.0, part / whole) for name, (part, whole) in counted.items() if whole}
    unmet = tuple(each for each in skip if each not in known)
    return replace(metrics, ranks=ranks_of(loaded), load_ms=load_ms, unmet=unmet, **more)


def _covered_s(answers: Mapping[str, Any], times: Collection[float], window_s: float) -> dict[float, float]:
    """How much of the window that ends at each of these times was observed, s, from the first to the last sample of any
    counter; all of it if a file does not say it."""
    first, last = (_series(answers[name], "", name).get("all", {}) if answers.get(name) else {} for name in ENDS)
    found = dict.fromkeys(sorted(times), window_s)
    for time in found:
        begin_s, end_s = first.get(time, -math.inf), last.get(time, math.inf)
        if time - window_s <= begin_s <= end_s <= time:  # else the file is no answer to this query
            seen_s = end_s - begin_s + _step_s(window_s)
            found[time] = window_s if seen_s >= WHOLE_FROM * window_s else seen_s
    return found


def _step_s(window_s: float) -> int:
    """Time between the looks at the counters in a window, s."""
    return max(1, round(window_s) // 60)


def _optional(answers: Mapping[str, Any], name: str) -> Series:
    """The series of a response that is missing from older servers and saved files: then []."""
    return _result(answers[name], name) if answers.get(name) is not None else []


def _metrics(
    names: Sequence[str], counts: FloatArray, sums: Mapping[str, FloatArray], times: Sequence[float], window_s: float,
    covered_s: FloatArray,
) -> Metrics:  # fmt: skip
    total = counts.sum(axis=0)
    kept = [k for k in range(len(names)) if total[k] > 0 and names[k]]
    if not kept:
        raise FileFormatError("no request of a named adapter was counted.", column="requests")
    means = []
    for kind in _COUNTED[1:]:
        known = sums[kind][kept].sum()
        if known <= 0:
            raise FileFormatError(f"no {kind.replace('_', ' ')} were counted.", column=kind)
        fleet = known / total[kept].sum()
        own = sums[kind][kept] / total[kept]
        means.append(np.where(own >= 1.0, own, max(1.0, fleet)))
    rates, own_names = counts[:, kept] / covered_s[:, np.newaxis], tuple(names[k] for k in kept)
    starts_s, tokens = np.array(times) - window_s, means[0] + means[1]
    table = RateTable(own_names, rates, tokens, starts_s, float(window_s), covered_s=covered_s)
    return Metrics(table, means[0], means[1])


def _series(answer: Any, label: str, name: str) -> dict[str, dict[float, float]]:
    """Adapter → time → value from one answer of query_range."""
    table: dict[str, dict[float, float]] = {}
    for labels, points in _result(answer, name):
        series = table.setdefault(str(labels.get(label, "")) if label else "all", {})
        for time, value in points:
            if MOST_COUNT < value < math.inf:
                raise FileFormatError(f"expected counts up to {MOST_COUNT:g}, got {value:g}.", column=name)
            if math.isfinite(value) and value >= 0:
                series[time] = series.get(time, 0.0) + value
    return table


def _result(answer: Any, name: str) -> list[tuple[Mapping[str, Any], list[tuple[float, float]]]]:
    if isinstance(answer, dict) and answer.get("status") == "error":
        raise FileFormatError(f"Prometheus says: {str(answer.get('error'))[:200]}.", column=name)
    try:
        if answer["data"]["resultType"] != "matrix":
            raise TypeError
        series: list[tuple[Mapping[str, Any], list[tuple[float, float]]]] = [
            (dict(item["metric"]), [(float(time), float(value)) for time, value in item["values"]])
            for item in answer["data"]["result"]
        ]
        if not all(math.isfinite(time) for _, points in series for time, _ in points):
            raise ValueError
        return series
    except (KeyError, TypeError, ValueError, OverflowError):
        rule = f"expected an answer of Prometheus's query_range (a matrix), got {shown(answer)}."
        raise FileFormatError(rule, column=name) from None
