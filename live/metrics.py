"""Figures from vLLM's /metrics page, whatever release wrote it: a missing figure is None, never an error."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from packer.errors import MissingDependencyError

NAMES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}
"""Figure → its names, the newest first (0.32, then those of older releases)."""
_CACHE = "vllm:cache_config_info"
_READ = (_CACHE, *(name for names in NAMES.values() for name in names))
MAX_KEPT = 100_000
"""Characters of a page that are kept; vLLM writes some hundred for each engine."""


@dataclass(frozen=True)
class Sample:
    """One scrape of /metrics. Gauges: running, waiting, kv_usage (share); the others count from the start:
    preemptions, tokens that were looked up in the prefix cache, and found there.
    """

    time_s: float
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    kv_cache_tokens: int | None = None


def parse_metrics(text: str, time_s: float = 0.0) -> Sample:
    """Read one page; a figure that is not on it is None. Figures of several engines are added."""
    values: dict[str, float] = {}
    labels: dict[str, Mapping[str, str]] = {}
    for name, tags, value in samples(kept(text)):
        values[name] = values.get(name, 0.0) + value
        labels[name] = tags
    found = {key: next((values[n] for n in names if n in values), None) for key, names in NAMES.items()}
    cache = labels.get(_CACHE, {})
    blocks, size = _whole(cache.get("num_gpu_blocks")), _whole(cache.get("block_size"))
    tokens = blocks * size if blocks is not None and size is not None else None
    return Sample(time_s, **found, kv_cache_tokens=tokens)


def kept(text: str) -> str:
    """The lines of a page with figures that are read, at most `MAX_KEPT` characters."""
    lines = [line for line in text.splitlines() if line.startswith(_READ)]
    return "\n".join(lines)[:MAX_KEPT]


def _whole(text: str | None) -> int | None:
    """A count of at most 15 digits."""
    return int(text) if text is not None and re.fullmatch("[0-9]{1,15}", text) else None


def samples(text: str) -> list[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of each line of a page that can be read."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise MissingDependencyError(
            "Reading /metrics needs prometheus-client: pip install 'adapter-packer[live]'."
        ) from None
    found: list[tuple[str, Mapping[str, str], float]] = []
    for line in text.splitlines():
        with suppress(Exception):  # a damaged line: the parser raises almost anything, and the others count
            for family in text_string_to_metric_families(line):
                found += [(s.name, s.labels, float(s.value)) for s in family.samples]
    return [sample for sample in found if math.isfinite(sample[2])]


@dataclass(frozen=True)
class MetricsSummary:
    """Means of the gauges over a run, growth of the counter; None where the page lacks a figure.

    `restarts`: how often the counter fell, because the server began anew. `prefix_hit_rate`: tokens of prompts that
    were in the KV cache / all that were looked up there.
    """

    mean_running: float | None
    mean_waiting: float | None
    mean_kv_usage: float | None
    preemptions: float | None
    kv_cache_tokens: int | None
    samples: int
    restarts: int = 0
    prefix_hit_rate: float | None = None


def summarise(pages: Iterable[tuple[float, str]]) -> MetricsSummary:
    """Figures of a run from its pages (seconds, text); pages that could not be read have the text ""."""
    samples = [parse_metrics(text, time_s) for time_s, text in pages if text]
    during = [s for s in samples if s.time_s > 0.0]
    counts = [s.preemptions for s in samples if s.preemptions is not None]
    queries = _growth([s.prefix_queries for s in samples])
    hits = _growth([s.prefix_hits for s in samples])
    return MetricsSummary(
        _mean([s.running for s in during]),
        _mean([s.waiting for s in during]),
        _mean([s.kv_usage for s in during]),
        _growth([s.preemptions for s in samples]),
        next((s.kv_cache_tokens for s in samples if s.kv_cache_tokens is not None), None),
        len(samples),
        sum(b < a for a, b in pairwise(counts)),
        hits / queries if hits is not None and queries else None,
    )


def _growth(values: list[float | None]) -> float | None:
    """By how much a counter grew; after a restart it begins at 0."""
    known = [v for v in values if v is not None]
    return sum(b - a if b >= a else b for a, b in pairwise(known)) if known else None


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return sum(known) / len(known) if known else None
