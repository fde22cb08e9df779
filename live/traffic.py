"""What running servers have to do, from their own /metrics: tokens, adapters in flight, latency."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from packer.errors import LiveError
from packer.live.act import AT_ONCE
from packer.live.host import Running

_INFO = "vllm:lora_requests_info{"
_LISTS = re.compile(r'(?:running|waiting)_lora_adapters="((?:[^"\\]|\\.)*)"')
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
    "generated": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    "ttft_s": ("vllm:time_to_first_token_seconds_sum",),
    "ttfts": ("vllm:time_to_first_token_seconds_count",),
    "itl_s": ("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"),
    "itls": ("vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"),
}
"""Counters and their names, the newest first."""
PRIOR = 10.0
"""The planned shares of a server's load count as so many looks at what is in flight."""


@dataclass(frozen=True)
class Look:
    """One page of a server: counters, and the adapters in flight."""

    time_s: float
    counters: Mapping[str, float]
    adapters: frozenset[str]


def look_of(text: str, time_s: float) -> Look:
    """Read a page. Lines are not parsed further than needed: a page may have thousands of lists of adapters."""
    names = {name: key for key, each in COUNTERS.items() for name in reversed(each)}
    found: dict[str, float] = {}
    latest, current = 0.0, ""
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        head, _, last = line.rpartition(" ")
        try:
            value = float(last)
        except ValueError:
            continue
        if line.startswith(_INFO):
            if value > latest:
                latest, current = value, head
        elif (key := names.get(head.partition("{")[0])) is not None:
            found[key] = found.get(key, 0.0) + value
    busy = {part.strip() for part in ",".join(_LISTS.findall(current)).split(",")} - {""}
    return Look(time_s, found, frozenset(busy))


def grown(before: Look, now: Look, key: str) -> float:
    """By how much a counter grew; after a restart it begins at 0."""
    a, b = before.counters.get(key, 0.0), now.counters.get(key, 0.0)
    return b - a if b >= a else b


@dataclass(eq=False)
class Traffic:
    """Pages of the last `span_s` of each server.

    vLLM's counters carry no adapter. Of the tokens of a server an adapter gets the share of its requests in flight,
    which are proportional to its load (Little's law); the planned shares count as `PRIOR` further looks.
    """

    servers: Sequence[Running]
    span_s: float
    looks: list[deque[Look]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.looks = [deque() for _ in self.servers]

    def scrape(self, now_s: float) -> list[str]:
        """Read every page; returns why some could not be read."""

        def one(server: Running) -> Look | str:
            try:
                return look_of(server.metrics(), now_s)
            except LiveError as error:
                return str(error)

        faults = []
        with ThreadPoolExecutor(min(AT_ONCE, len(self.servers))) as pool:
            for own, found in zip(self.looks, pool.map(one, self.servers), strict=True):
                if isinstance(found, str):
                    faults.append(found)
                    continue
                own.append(found)
                while own and own[0].time_s < now_s - self.span_s:
                    own.popleft()
        return faults

    def tok_s(self, s: int, span_s: float = float("inf"), skip_s: float = 0.0) -> float:
        """Prompt and output tokens of a server per second over the last `span_s`, without the last `skip_s`."""
        own = self.looks[s]
        if len(own) < 2:
            return 0.0
        end_s = own[-1].time_s - skip_s
        part = [each for each in own if end_s - span_s <= each.time_s <= end_s]
        if len(part) < 2:
            return self.tok_s(s) if skip_s or span_s < float("inf") else 0.0
        total = sum(grown(a, b, key) for a, b in pairwise(part) for key in ("prompt", "generated"))
        return total / (part[-1].time_s - part[0].time_s)

    def shares(self, s: int, planned: Mapping[str, float]) -> dict[str, float]:
        """Share of each adapter in a server's tokens; they sum to 1. `planned`: its load there, by the plan."""
        total = sum(planned.values())
        found = {name: PRIOR * load / total for name, load in planned.items()} if total > 0 else {}
        for look in self.looks[s]:
            for name in look.adapters:
                found[name] = found.get(name, 0.0) + 1.0 / len(look.adapters)
        whole = sum(found.values())
        return {name: part / whole for name, part in found.items()} if whole > 0 else {}

    def mean_ms(self, s: int, what: str) -> float | None:
        """Mean "ttft" or "itl" of a server over its pages, ms; None without enough of them."""
        own = self.looks[s]
        if len(own) < 2:
            return None
        count = sum(grown(a, b, f"{what}s") for a, b in pairwise(own))
        total = sum(grown(a, b, f"{what}_s") for a, b in pairwise(own))
        return 1e3 * total / count if count >= 50 else None
