"""The slow reference of vLLM's API server: one worker that takes its jobs in the order in which they come.

Jobs are scrapes of /metrics, requests to be accepted, tokens to be streamed. Follows vllm/v1/metrics/loggers.py (a time
series of `vllm:lora_requests_info` for each pair of label values, never dropped) and vllm/v1/metrics/stats.py
(`LoRARequestStates`: an adapter waits from the arrival of a request until its first output, and the labels of a step
are united over the slices in which `AsyncLLM.output_handler` processes its outputs; in 0.32 both labels list the
adapters of requests that have a token and are not finished, in order of entry).

Outputs that fall into a stop of the loop leave in one chunk: `process_outputs_socket` (vllm/v1/engine/core_client.py)
awaits messages that are there already, which does not give way, `output_handler` (async_llm.py) takes all of them from
its queue likewise, and `RequestOutputCollector.put` (output_processor.py) merges them. `output_handler` gives way
between slices only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

CHUNK_OUTPUTS = 128


@dataclass(eq=False)
class NaiveFrontEnd:
    """`costs_s`: of a scrape, a time series, a name in its labels, a request, an adapter's first one, an output."""

    interval_s: float | None
    costs_s: tuple[float, float, float, float, float, float]
    lists: bool = False
    tokenizers: float = math.inf  # capacity of `TokenizerGroup.lora_tokenizers`
    free_s: float = 0.0
    seen_s: float = 0.0
    waiting: list[int] = field(default_factory=list)  # adapters of requests, as often as there are requests
    running: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)  # adapters with tokenizers, least recently used first
    in_flight: dict[int, int] = field(default_factory=dict)  # requests by adapter
    states: list[tuple[frozenset[int], frozenset[int]]] = field(default_factory=list)  # after each step
    labels: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    series: set[tuple[frozenset[int] | tuple[int, ...], ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.next_scrape_s = self.interval_s

    def scrape(self, until_s: float) -> None:
        """All scrapes that are due by then."""
        while self.next_scrape_s is not None and self.next_scrape_s <= until_s:
            names = sum(len(running) + len(waiting) for running, waiting in self.series)
            took_s = self.costs_s[0] + self.costs_s[1] * len(self.series) + self.costs_s[2] * names
            self.free_s = max(self.next_scrape_s, self.free_s) + took_s
            self.next_scrape_s = self.free_s + self.interval_s

    def accept(self, sent_s: float, adapter: int | None) -> float:
        """A request is sent, without an adapter perhaps; returns when the engine gets it."""
        self.scrape(sent_s)
        first = adapter is not None and adapter not in self.used
        took_s = self.costs_s[3] + (self.costs_s[4] if first else 0.0)
        if adapter is not None:
            if adapter in self.used:
                self.used.remove(adapter)
            elif len(self.used) >= self.tokenizers:
                self.used.pop(0)
            self.used.append(adapter)
            self.waiting.append(adapter)
        self.free_s = max(sent_s, self.free_s) + took_s
        return self.free_s

    def began(self, adapter: int) -> None:
        """The first token of a request came out, and with it the event that it was scheduled."""
        self.waiting.remove(adapter)
        self.running.append(adapter)
        self.in_flight[adapter] = self.in_flight.get(adapter, 0) + 1

    def finished(self, adapter: int) -> None:
        """A request has ended."""
        self.running.remove(adapter)
        self.in_flight[adapter] -= 1
        if not self.in_flight[adapter]:
            del self.in_flight[adapter]

    def stream(self, now: float, outputs: int) -> float:
        """When the client sees what the engine hands over now, if it can with what it has not seen yet."""
        self.scrape(now)
        work_s = outputs * self.costs_s[5]
        if outputs > CHUNK_OUTPUTS or now + work_s > self.seen_s:
            self.free_s = self.seen_s = max(now, self.free_s) + work_s
        return self.seen_s

    def sliced(self) -> None:
        """A slice of a step's outputs was processed: `update_iteration_stats` adds to the labels of the step."""
        for names, now in zip(self.labels, (self.running, self.waiting), strict=True):
            names.update(now)

    def stepped(self) -> None:
        """A step has ended: its labels are recorded."""
        listed = tuple(self.in_flight)
        self.states.append((frozenset(self.running), frozenset(self.waiting)))
        labels = (listed, listed) if self.lists else tuple(frozenset(names) for names in self.labels)
        self.labels = (set(), set())
        if self.interval_s is not None and any(labels):
            self.series.add(labels)
