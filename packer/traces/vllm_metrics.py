"""Which adapters a vLLM server works on, from its own metrics: shares of the requests, ranks, time of a load.

vLLM's counters carry no adapter. Two gauges name adapters:

- `vllm:lora_requests_info`: the adapters with requests in flight, as a list in the labels. vLLM keeps one series
  for each list that it has seen; its value is when that list was last current, so of a server the series with the
  largest value at a time is the list of that time. In 0.8.5 `running_lora_adapters` holds those that run; in 0.32
  it and `waiting_lora_adapters` are the same list, of all in flight. Only the former is read.
- `vllm:lora_adapter_loaded` (proposed in pull request 54830, beside which the former is deprecated): a series for
  each adapter in the GPU's slots or in host memory, with its rank.

Shares follow from how often an adapter is seen. If its requests arrive at random with rate r and stay for a time W,
one is in flight with probability p = 1 − exp(−r·W) (a M/G/∞ queue). Where adapters outnumber slots, an adapter is in
a slot of an LRU cache with probability p = 1 − exp(−r·T), T the cache's characteristic time (Che, Tung and Wang 2002).
Either way r is proportional to −ln(1 − p), as long as W or T is alike for all adapters of a server. Such shares are
estimates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from packer.adapter import MAX_RANK
from packer.errors import FileFormatError

Series = Sequence[tuple[Mapping[str, Any], Sequence[tuple[float, float]]]]
"""Labels of a series and its points (time, value)."""

_LISTS = ("running_lora_adapters", "waiting_lora_adapters", "max_lora", "__name__")
_ADAPTER = ("adapter_name", "level", "pinned", "rank", "__name__")


def shares_in_flight(info: Series) -> dict[str, float]:
    """Share of each adapter from `vllm:lora_requests_info`; they sum to 1.

    Raises `FileFormatError`: no adapter was seen.
    """
    current: dict[tuple[object, ...], dict[float, tuple[float, str]]] = {}
    for labels, points in info:
        latest = current.setdefault(_server(labels, _LISTS), {})
        running = str(labels.get("running_lora_adapters", ""))
        for time, value in points:
            if value > latest.get(time, (-math.inf, ""))[0]:
                latest[time] = (value, running)
    weights: dict[str, float] = {}
    for latest in current.values():
        lists = [{part.strip() for part in running.split(",")} - {""} for _, running in latest.values()]
        _add(weights, lists)
    return _normed(weights, "no adapter was seen running in this time.", "running")


def shares_resident(loaded: Series) -> dict[str, float]:
    """Share of each adapter from `vllm:lora_adapter_loaded`; they sum to 1.

    Raises `FileFormatError`: no adapter was in a slot, or all were at all times and have no shares.
    """
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
    """Adapter → rank, where `vllm:lora_adapter_loaded` has it."""
    found = {}
    for labels, _ in loaded:
        text = str(labels.get("rank", ""))
        if text.isascii() and text.isdecimal() and len(text) < 5 and 1 <= int(text) <= MAX_RANK:
            found[str(labels.get("adapter_name", ""))] = int(text)
    return found


def total_of(series: Series) -> float:
    """Sum of all points, without those that are no numbers."""
    return sum(value for _, points in series for _, value in points if 0.0 < value < math.inf)


def mean_load_ms(seconds: Series, loads: Series) -> float | None:
    """Mean time to load an adapter, from the sum and the count of `vllm:lora_adapter_load_seconds`."""
    count = total_of(loads)
    return 1e3 * total_of(seconds) / count if count else None


def _server(labels: Mapping[str, Any], own: Iterable[str]) -> tuple[object, ...]:
    """What identifies a server among the labels of its series."""
    return tuple(sorted((key, str(value)) for key, value in labels.items() if key not in own))


def _add(weights: dict[str, float], samples: Sequence[set[str]]) -> None:
    """Add the weight of each adapter on one server, seen in these samples."""
    seen = Counter(chain.from_iterable(samples))
    # Half a sample less than always, so that an adapter that is always there gets a finite weight.
    for name, count in seen.items():
        part = min(count, len(samples) - 0.5) / len(samples)
        weights[name] = weights.get(name, 0.0) - math.log1p(-part)


def _normed(weights: Mapping[str, float], rule: str, column: str) -> dict[str, float]:
    if not weights:
        raise FileFormatError(rule, column=column)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
