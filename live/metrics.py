"""Figures from vLLM's /metrics page, whatever release wrote it: a missing figure is None, never an error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from packer.io.shipped import table
from packer.kv_shape import KvShape

NAMES: Mapping[str, Sequence[str]] = table("packer.live", "figures.toml")
"""Figure → its names, the newest first (0.32, then those of older releases). The first three are gauges, kv_usage a
share. The others are counters from the server's start; prefix_queries and prefix_hits count tokens."""
_CACHE, _LORA = "vllm:cache_config_info", "vllm:lora_requests_info"
_KEPT = (_CACHE, *(name for names in NAMES.values() for name in names))
_STARTS = tuple(name.encode() for name in _KEPT)
_LINE = re.compile(r'(vllm:\w+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*+")*+)\})?\s+(\S+)(?:\s+[-+.\deE]+)?\s*(?:\s# .*)?')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MAX_PAGE_BYTES = 4 << 20  # Maximum bytes of a server's answer; only the `thinned` lines of /metrics count.
MAX_KEPT = 100_000  # Characters of a page that are kept; vLLM writes some hundred for each engine.
MAX_FIGURE = 1e18


@dataclass(frozen=True)
class KvCache:
    """A server's KV cache as vLLM states it: blocks of all data-parallel engines, and `said` tokens of each engine.
    `said`: in requests of `max_model_len`; None before 0.24, which do not state it."""

    blocks: int
    block_size: int
    engines: int
    said: int | None

    @property
    def tokens(self) -> int:
        """Tokens of the server: as vLLM says, or of all blocks."""
        return self.blocks * self.block_size if self.said is None else self.said * self.engines

    def capacity(self, shape: KvShape | None, max_model_len: int) -> int:
        """Tokens that all layers keep, without vLLM's null blocks (vllm/v1/core/block_pool.py). Each group of layers
        has blocks of its own, so a token takes one place in each group's blocks."""
        usable = (self.blocks - self.engines) * self.block_size
        if shape is not None:  # the rarest kind of layers is one group: the share tells how many there are
            return usable // Fraction(shape.windowed_share).limit_denominator(64).denominator
        several = self.tokens * (max_model_len + self.block_size) < usable * max_model_len
        return self.tokens if several else usable


@dataclass(frozen=True)
class Page:
    """One scrape of /metrics; a figure that is not on the page is absent from `figures`, or None.

    `figures`: by the keys of `NAMES`. `adapters`: adapters with requests in the engine when this list last changed;
    `all_named`: also those of requests without a first token. vLLM's two lists, of running and of waiting adapters,
    are then not the same one (`series_of_lists` in `packer.twin.engine_rules`).
    """

    time_s: float
    figures: Mapping[str, float]
    adapters: frozenset[str] | None = None
    max_loras: int | None = None
    kv_cache: KvCache | None = None
    all_named: bool = False

    @property
    def in_flight(self) -> frozenset[str] | None:
        """Adapters with requests in the engine now; None if the page does not determine them."""
        if not self.requests:
            return None if self.requests is None else frozenset()
        return None if self.figures.get("waiting") and not self.all_named else self.adapters

    @property
    def requests(self) -> float | None:
        """Number of requests in the engine now; None if the page does not have it."""
        running = self.figures.get("running")
        return None if running is None else running + self.figures.get("waiting", 0.0)

    @property
    def named(self) -> float:
        """Number of requests in the engine whose adapters the page names; without it the number of the adapters."""
        waiting = self.figures.get("waiting", 0.0) if self.all_named else 0.0
        named = len(self.adapters or ())
        return 0.0 if self.adapters is None else self.figures.get("running", named) + waiting

    def busy(self, adapter: str | None = None) -> bool | None:
        """Whether requests of an adapter, or any requests, are in the engine now; None if the page does not say."""
        if adapter is None:
            return None if self.requests is None else self.requests > 0.0
        # vLLM joins the names by commas, so that a name with commas is there if all its parts are.
        return None if self.in_flight is None else _parts(adapter) <= self.in_flight


def page_of(text: str, time_s: float = 0.0) -> Page:
    """Read a page; figures of several engines are summed, shares averaged, damaged lines are skipped. vLLM keeps a
    series of `lora_requests_info` for each list of adapters that it has seen, which may be thousands; its value is when
    that list was last current."""
    values: dict[str, list[float]] = {}
    cache, latest, loras = "", 0.0, ""
    for line in text.splitlines():
        found = _LINE.fullmatch(line) if line.startswith((_LORA, *_KEPT)) else None
        value = _figure(found[3]) if found else None
        if found is None or value is None:
            continue
        name, labels = found[1], found[2] or ""
        if name == _LORA and value > latest:
            latest, loras = value, labels
        elif name == _CACHE:
            cache = labels
        values.setdefault(name, []).append(value)
    figures = {key: next((values[n] for n in names if n in values), []) for key, names in NAMES.items()}
    sizes, lists = dict(_LABEL.findall(cache)), dict(_LABEL.findall(loras))
    blocks, size, said = (_whole(sizes.get(n)) for n in ("num_gpu_blocks", "block_size", "kv_cache_size_tokens"))
    known = KvCache(blocks, size, len(values[_CACHE]), said) if blocks and size else None
    listed = [lists.get(f"{state}_lora_adapters", "") for state in ("running", "waiting")]
    adapters = _parts(re.sub(r"\\(.)", r"\1", ",".join(listed)))
    return Page(
        time_s, {key: sum(each) / (len(each) if key == "kv_usage" else 1) for key, each in figures.items() if each},
        adapters if latest else None, _whole(lists.get("max_lora")), known, listed[0] != listed[1],
    )  # fmt: skip


def _parts(names: str) -> frozenset[str]:
    """The parts of a text between commas, without spaces around them; empty ones are left out."""
    return frozenset(part.strip() for part in names.split(",")) - {""}


def thinned(page: bytes) -> bytes:
    """The lines of a page that `page_of` reads, of the lists of adapters the latest alone, and what follows the last
    line's end: pages of vLLM grow with each list."""
    *lines, rest = page.split(b"\n")
    most, latest, own = 0.0, b"", list[bytes]()
    for line in lines:
        if not line.startswith(_LORA.encode()):
            own += [line] if line.startswith(_STARTS) else []
        elif (value := _value(line.decode(errors="replace"))) and value > most:
            most, latest = value, line
    return b"\n".join([*own, latest, rest])


def _value(line: str) -> float | None:
    """The value of a line with labels, by the slow pattern only if a time or an exemplar follows it."""
    value = _figure(line.partition('"} ')[2])
    found = _LINE.fullmatch(line) if value is None else None
    return _figure(found[3]) if found else value


def kept(text: str) -> str:
    """The lines of a page with figures, at most `MAX_KEPT` characters."""
    return "\n".join(line for line in text.splitlines() if line.startswith(_KEPT))[:MAX_KEPT]


def _figure(text: str) -> float | None:
    """Parse a count or a share; None for NaN, infinite, negative or other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= MAX_FIGURE else None


def _whole(text: str | None) -> int | None:
    """A count of at most 15 digits."""
    return int(text) if text is not None and re.fullmatch("[0-9]{1,15}", text) else None


def grown(pages: Iterable[Page], *keys: str) -> float:
    """Return the growth of counters, which begin at 0 after a restart; between pages that lack one it counts as 0."""
    pairs = ((a.figures, b.figures, key) for a, b in pairwise(pages) for key in keys)
    known = ((a[key], b[key]) for a, b, key in pairs if key in a and key in b)
    return float(sum(b - a if b >= a else b for a, b in known))


@dataclass(frozen=True)
class MetricsSummary:
    """Means of the gauges over a run and growth of the preemption counter; None if the pages lack a figure.

    `restarts`: how often this counter fell because the server restarted. `prefix_hit_rate`: prompt tokens found in
    the KV cache / prompt tokens looked up there.
    """

    mean_running: float | None
    mean_waiting: float | None
    mean_kv_usage: float | None
    preemptions: float | None
    kv_cache: KvCache | None
    samples: int
    restarts: int = 0
    prefix_hit_rate: float | None = None


def summarise(pages: Iterable[tuple[float, str]]) -> MetricsSummary:
    """Summarise a run's pages (seconds, text); pages that could not be read have the text ""."""
    seen = [page_of(text, time_s) for time_s, text in pages if text]

    def mean(key: str) -> float | None:
        # The page of time 0 was read before the run: only counters begin with it.
        known = [page.figures[key] for page in seen if page.time_s > 0.0 and key in page.figures]
        return sum(known) / len(known) if known else None

    def growth(key: str) -> float | None:
        known = [page for page in seen if key in page.figures]
        return grown(known, key) if known else None

    counts = [page.figures["preemptions"] for page in seen if "preemptions" in page.figures]
    queries, hits = growth("prefix_queries"), growth("prefix_hits")
    cache = next((page.kv_cache for page in seen if page.kv_cache is not None), None)
    hit_rate = hits / queries if hits is not None and queries else None
    restarts, grew = sum(b < a for a, b in pairwise(counts)), growth("preemptions")
    running, waiting, usage = mean("running"), mean("waiting"), mean("kv_usage")
    return MetricsSummary(running, waiting, usage, grew, cache, len(seen), restarts, hit_rate)
