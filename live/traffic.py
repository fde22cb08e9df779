"""What running servers have to do, from their own /metrics: tokens, adapters in flight, latency."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

from packer.errors import LiveError
from packer.live.act import AT_ONCE
from packer.live.host import Running
from packer.live.metrics import Page, grown, page_of

PRIOR = 10.0
"""The planned shares of a server's load count as so many looks at what is in flight, its planned rates as so many
requests that have come."""


@dataclass(eq=False)
class Traffic:
    """Pages of the last `span_s` of each server.

    vLLM's counters carry no adapter. Of the tokens of a server an adapter gets the share of its requests in flight,
    which are proportional to its load (Little's law); the planned shares count as `PRIOR` further looks.
    """

    servers: Sequence[Running]
    span_s: float
    looks: list[deque[Page]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.looks = [deque() for _ in self.servers]

    def scrape(self, now_s: float) -> list[str]:
        """Read every page; returns why some could not be read."""

        def one(server: Running) -> Page | str:
            try:
                return page_of(server.metrics(), now_s)
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

    @property
    def observed_s(self) -> float:
        """The longest time that the pages of a server span."""
        return max((own[-1].time_s - own[0].time_s for own in self.looks if own), default=0.0)

    def requests(self) -> float:
        """First tokens of all servers in that time."""
        return sum(grown(a, b, "ttfts") for own in self.looks for a, b in pairwise(own))

    def shares(self, s: int, planned: Mapping[str, float]) -> dict[str, float]:
        """Share of each adapter in a server's tokens; they sum to 1. `planned`: its load there, by the plan."""
        total = sum(planned.values())
        found = {name: PRIOR * load / total for name, load in planned.items()} if total > 0 else {}
        for look in self.looks[s]:
            for name in look.adapters or ():
                found[name] = found.get(name, 0.0) + 1.0 / len(look.adapters or ())
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
