"""Estimate the adapters' traffic from a vLLM server's own metrics: shares of the requests, ranks, load times.

vLLM's counters do not distinguish adapters. Two gauges name adapters:

- `vllm:lora_requests_info`: the adapters with requests in flight, as a list in the labels. vLLM keeps one series
  for each list that it has seen; the value is the time at which the list was last current. At any time, the current
  list of a server is therefore that of the series with the largest value. In 0.8.5 `running_lora_adapters` lists the
  running adapters; in 0.32 it equals `waiting_lora_adapters` and lists all in flight. Only the former label is read.
- `vllm:lora_adapter_loaded` (proposed in pull request 54830, which deprecates the gauge above): a series for each
  adapter in the GPU's slots or in host memory, with its rank.

Shares are estimated from how often an adapter is seen. If its requests arrive at random with rate r and stay for a time
W, at least one is in flight with probability p = 1 − exp(−r·W) (an M/G/∞ queue). If adapters outnumber slots, an
adapter is in a slot of an LRU cache with probability p = 1 − exp(−r·T), where T is the cache's characteristic time
(Che, Tung and Wang 2002). In both cases r is proportional to −ln(1 − p), if W or T is the same for all adapters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from packer.adapter import MAX_RANK
from packer.errors import FileFormatError

Series = Sequence[tuple[Mapping[str, Any], Sequence[tuple[float, float]]]]  # Labels of a series and its points.

_LISTS = ("running_lora_adapters", "waiting_lora_adapters", "max_lora", "__name__")
_ADAPTER = ("adapter_name", "level", "pinned", "rank", "__name__")


def shares_in_flight(info: Series) -> dict[str, float]:
    """Shares of adapters in `vllm:lora_requests_info`, which sum to 1; raises `FileFormatError` if there are none."""
    current: dict[tuple[object, ...], dict[float, tuple[float, str]]] = {}
    for labels, points in info:
        latest = current.setdefault(_server(labels, _LISTS), {})
        running = str(labels.get("running_lora_adapters", ""))
        for time, value in points:
            if value > latest.get(time, (-math.inf, ""))[0]:
                latest[time] = (value, running)
    weights: dict[str, float] = {}
    for latest in current.values():
        _add(weights, [{part.strip() for part in running.split(",")} - {""} for _, running in latest.values()])
    return _normed(weights, "no adapter was seen running in this time.", "running")


def shares_resident(loaded: Series) -> dict[str, float]:
    """Share of each adapter from `vllm:lora_adapter_loaded`; they sum to 1. Raises `FileFormatError`: no adapter was in
    a slot, or all were at all times, so that their shares are unknown."""
    times: dict[tuple[object, ...], set[float]] = {}
    seen: dict[tuple[object, ...], dict[float, set[str]]] = {}
    for labels, points in loaded:
        server = _server(labels, _ADAPTER)
        times.setdefault(server, set()).update(time for time, _ in points)
        if labels.get("level") != "gpu":
            continue
        for time, value in points:
            if value > 0:
                seen.setdefault(server, {}).setdefault(time, set()).add(str(labels.get("adapter_name", "")))
    weights: dict[str, float] = {}
    for server, samples in times.items():
        _add(weights, [seen.get(server, {}).get(time, set()) - {""} for time in sorted(samples)])
    if weights and all(names == set(weights) for samples in seen.values() for names in samples.values()):
        raise FileFormatError(
            "every adapter was in a slot at all times, so their shares can't be distinguished: read a gateway's "
            "metrics or an access log.",
            column="loaded",
        )
    return _normed(weights, "no adapter was in a slot in this time.", "loaded")


def ranks_of(loaded: Series) -> dict[str, int]:
    """Adapter → rank, for adapters whose rank `vllm:lora_adapter_loaded` has."""
    found = {}
    for labels, _ in loaded:
        text = str(labels.get("rank", ""))
        if text.isascii() and text.isdecimal() and len(text) < 5 and 1 <= int(text) <= MAX_RANK:
            found[str(labels.get("adapter_name", ""))] = int(text)
    return found


def total_of(series: Series) -> float:
    """Sum of all values that are positive and finite."""
    return sum(value for _, points in series for _, value in points if 0.0 < value < math.inf)


def mean_load_ms(seconds: Series, loads: Series) -> float | None:
    """Mean time to load an adapter, from the sum and the count of `vllm:lora_adapter_load_seconds`."""
    count = total_of(loads)
    return 1e3 * total_of(seconds) / count if count else None


def _server(labels: Mapping[str, Any], own: Iterable[str]) -> tuple[object, ...]:
    """Labels that identify a server: all labels of a series except `own`, those of the metric itself."""
    return tuple(sorted((key, str(value)) for key, value in labels.items() if key not in own))


def _add(weights: dict[str, float], samples: Sequence[set[str]]) -> None:
    """Add the weight of each adapter on one server; `samples`: the adapters that were seen at each time."""
    seen = Counter(chain.from_iterable(samples))
    # The count is at most half a sample less than all, so that an adapter that is always there has a finite weight.
    for name, count in seen.items():
        part = min(count, len(samples) - 0.5) / len(samples)
        weights[name] = weights.get(name, 0.0) - math.log1p(-part)


def _normed(weights: Mapping[str, float], rule: str, column: str) -> dict[str, float]:
    if not weights:
        raise FileFormatError(rule, column=column)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
