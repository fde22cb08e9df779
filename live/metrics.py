"""Figures from vLLM's /metrics page, whatever release wrote it: a missing figure is None, never an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packer.errors import MissingDependencyError

NAMES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
}
"""Figure → its names, the newest first (0.32, then those of older releases)."""


@dataclass(frozen=True)
class Sample:
    """One scrape of /metrics. Gauges: running, waiting, kv_usage (share); preemptions count from the start."""

    time_s: float
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    preemptions: float | None = None
    kv_cache_tokens: int | None = None


def parse_metrics(text: str, time_s: float = 0.0) -> Sample:
    """Read one page; what it lacks is None. Several engines' figures are added."""
    values: dict[str, float] = {}
    labels: dict[str, Mapping[str, str]] = {}
    for name, tags, value in _samples(text):
        values[name] = values.get(name, 0.0) + value
        labels[name] = tags
    found = {key: next((values[n] for n in names if n in values), None) for key, names in NAMES.items()}
    cache = labels.get("vllm:cache_config_info", {})
    blocks, size = _whole(cache.get("num_gpu_blocks")), _whole(cache.get("block_size"))
    tokens = blocks * size if blocks is not None and size is not None else None
    return Sample(time_s, **found, kv_cache_tokens=tokens)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise MissingDependencyError(
            "Reading /metrics needs prometheus-client: pip install 'adapter-packer[live]'."
        ) from None
    found: list[tuple[str, Mapping[str, str], float]] = []
    try:
        for family in text_string_to_metric_families(text):
            found += [(s.name, s.labels, float(s.value)) for s in family.samples]
    except (ValueError, KeyError, IndexError):
        return found  # a damaged page: what came before the damage counts
    return found


@dataclass(frozen=True)
class MetricsSummary:
    """Means of the gauges over a run, growth of the counter; None where the page lacks a figure."""

    mean_running: float | None
    mean_waiting: float | None
    mean_kv_usage: float | None
    preemptions: float | None
    kv_cache_tokens: int | None
    samples: int


def summarise(pages: Iterable[tuple[float, str]]) -> MetricsSummary:
    """Figures of a run from its pages (seconds, text); pages that could not be read have the text ""."""
    samples = [parse_metrics(text, time_s) for time_s, text in pages if text]
    during = [s for s in samples if s.time_s > 0.0]
    counts = [s.preemptions for s in samples if s.preemptions is not None]
    return MetricsSummary(
        _mean([s.running for s in during]),
        _mean([s.waiting for s in during]),
        _mean([s.kv_usage for s in during]),
        counts[-1] - counts[0] if counts else None,
        next((s.kv_cache_tokens for s in samples if s.kv_cache_tokens is not None), None),
        len(samples),
    )


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else None
