"""Load of running servers from their own /metrics: tokens, adapters in flight, latency."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from packer.live.host import RunningServer, each_of
from packer.live.metrics import Page, grown, page_of

PRIOR = 10.0
"""Weight of the plan: the planned shares of a server's load count as this many scrapes with adapters in flight, its
planned rates as this many observed requests."""
STEPS = 20  # Of Newton's method, which needs 3 to 6.


class Sampled(NamedTuple):
    """Requests of a server.

    `requests`: number of requests. `input_tokens`, `output_tokens`: mean tokens. `hit_rate`: share of prompt tokens
    found in the prefix cache; None: not known. `looks`: number of scrapes that determine the shares of adapters;
    infinite: requests name their adapter.
    """

    requests: float
    input_tokens: float
    output_tokens: float
    hit_rate: float | None = None
    looks: float = math.inf


@dataclass(eq=False)
class Traffic:
    """Pages of each server in the last `span_s` seconds, without figures if none could be read; `times_s`: when.

    vLLM's counters do not name adapters. An adapter's share of a server's tokens is its share of the requests in
    flight, which are proportional to load (Little's law). Pages have the number of these requests and the names of
    their adapters, but not the number of each: adapters of a busy server are always named. Therefore the planned shares
    count unless names are seen more or less often than these explain (`factors`).

    `planned`: the planned load of each adapter on the server, at each of its pages.
    """

    servers: Sequence[RunningServer]
    span_s: float
    looks: list[deque[Page]] = field(default_factory=list)
    planned: list[deque[Mapping[str, float]]] = field(default_factory=list)
    times_s: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.looks, self.planned = [deque() for _ in self.servers], [deque() for _ in self.servers]

    def scrape(self, now_s: float, which: Mapping[int, Mapping[str, float]]) -> list[str]:
        """Read the pages of these servers, which answer; return why some do not say what the server does. `which`: with
        the planned load of each adapter there."""
        asked, faults = list(which), []
        answers = each_of([self.servers[s] for s in asked], lambda server: page_of(server.metrics(), now_s))
        for s, found in zip(asked, answers, strict=True):
            self.looks[s].append(page := Page(now_s, {}) if isinstance(found, str) else found)
            self.planned[s].append(which[s])
            if not _counts(page):
                counts_none = f"{self.servers[s].name}: /metrics counts no tokens."
                faults.append(found if isinstance(found, str) else counts_none)
        self.times_s.append(now_s)
        while self.times_s[0] < now_s - self.span_s:
            self.times_s.popleft()
        for own, planned in zip(self.looks, self.planned, strict=True):  # also of servers that are gone
            while own and own[0].time_s < self.times_s[0]:
                own.popleft()
                planned.popleft()
        return faults

    def tok_s(self, s: int, span_s: float = float("inf"), skip_s: float = 0.0) -> float | None:
        """Return a server's prompt and output tokens per second over `span_s`, ending `skip_s` before the last scrape;
        None before the second scrape, or if the server answered, but its pages do not count tokens. Time in which the
        server did not exist counts as time without tokens."""
        if len(self.times_s) < 2:
            return None
        end_s = self.times_s[-1] - skip_s
        times_s = [each for each in self.times_s if end_s - span_s <= each <= end_s]
        if len(times_s) < 2:
            return self.tok_s(s)
        part = [each for each in self.looks[s] if times_s[0] <= each.time_s <= times_s[-1]]
        known = [each for each in part if _counts(each)]
        if not known:
            return None if part else 0.0
        # Pages between two others that count tokens hide none.
        blind_s = known[0].time_s - part[0].time_s + part[-1].time_s - known[-1].time_s
        own_s = times_s[-1] - times_s[0] - blind_s
        return grown(known, "prompt", "generated") / own_s if own_s > 0.0 else None

    def sampled(self, s: int, since_s: float) -> Sampled:
        """Return a server's requests since `since_s`; none if its pages do not count tokens and first tokens."""
        own = [each for each in self.looks[s] if each.time_s >= since_s]
        keys = ("ttfts", "prompt", "generated", "prefix_queries", "prefix_hits")
        count, prompt, output, queries, hits = (grown(own, key) for key in keys)
        if not count or not prompt or not output:
            return Sampled(0.0, 0.0, 0.0)
        # The planned shares count as `PRIOR` scrapes in the shares of the adapters, too.
        looks = PRIOR + sum(1.0 for each in own if each.adapters)
        return Sampled(count, prompt / count, output / count, hits / queries if queries else None, looks)

    def requests(self) -> float:
        """Return the number of first tokens of all servers on their pages."""
        return sum(grown(own, "ttfts") for own in self.looks)

    def _phases(self, s: int) -> Iterator[tuple[Mapping[str, float], float, int, Counter[str]]]:
        """Yield for successive pages with the same planned loads: these, the sum of requests in flight whose adapters
        are named, the number of pages with such requests, and how many of them name each adapter."""
        for planned, pairs in groupby(zip(self.looks[s], self.planned[s], strict=True), itemgetter(1)):
            pages = [page for page, _ in pairs if page.named]
            names = Counter(name for page in pages for name in page.adapters or ())
            yield planned, sum(page.named for page in pages), len(pages), names

    def factors(self, unlisted: Collection[str] = ()) -> dict[str, float]:
        """Return each adapter's load / its planned load, up to a common factor, by how often pages name it. `unlisted`:
        names that no page has, those of the base model.

        By the plan, m requests of an adapter are in flight on average, so that a page names it with the probability
        1 - exp(-m) (an M/G/∞ queue). The factor has its largest posterior density, with a gamma prior.
        """
        expected, pages, named = defaultdict[str, float](float), Counter[str](), Counter[str]()
        for s in range(len(self.looks)):
            for planned, requests, number, names in self._phases(s):
                total = sum(planned.values())
                for name, load in planned.items() if number and total > 0.0 else ():
                    expected[name] += requests * load / total
                    pages[name] += number
                    named[name] += names[name]
        means = {name: expected[name] / number for name, number in pages.items() if name not in unlisted}
        return {name: _in_flight(m, pages[name], named[name]) / m for name, m in means.items() if m > 0.0}

    def shares(self, s: int, planned: Mapping[str, float], factors: Mapping[str, float]) -> dict[str, float]:
        """Return each adapter's share of a server's tokens; shares sum to 1. `planned`: its planned load there now;
        `factors`: see there. An adapter that a page names, but that has no planned load there, has one request."""
        found = defaultdict[str, float](float)

        def split(requests: float, loads: Mapping[str, float]) -> None:
            own = {name: load * factors.get(name, 1.0) for name, load in loads.items()}
            total = sum(own.values())
            for name, load in own.items() if total > 0.0 else ():
                found[name] += requests * load / total

        for then, requests, _, names in self._phases(s):
            strange = {name: number for name, number in names.items() if not then.get(name)}
            for name, number in strange.items():
                found[name] += number
            split(max(0.0, requests - sum(strange.values())), then)
        if not any(found.values()):
            split(1.0, planned)
        whole = sum(found.values())
        return {name: part / whole for name, part in found.items()} if whole > 0 else {}

    def mean_ms(self, s: int, what: str) -> float | None:
        """Return the mean "ttft" or "itl" of a server over its pages, ms; None with fewer than 50 values."""
        own = self.looks[s]
        count = grown(own, f"{what}s")
        return 1e3 * grown(own, f"{what}_s") / count if count >= 50 else None


def _counts(page: Page) -> bool:
    """Whether a page counts all tokens."""
    return "prompt" in page.figures and "generated" in page.figures


def _in_flight(planned: float, pages: int, named: int) -> float:
    """Mean number of an adapter's requests in flight, of which the plan expects `planned`: the root of (PRIOR + pages)
    m - PRIOR planned - named m / (1 - exp(-m)), a concave function, from a smaller number on."""
    m = (PRIOR * planned + named) / (PRIOR + pages)
    for _ in range(STEPS if named else 0):
        absent = -math.expm1(-m)
        less = (PRIOR + pages) * m - PRIOR * planned - named * m / absent
        m -= less / (PRIOR + pages - named * (1.0 - m * (1.0 - absent) / absent) / absent)
    return m
