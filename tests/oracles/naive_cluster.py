"""The cluster twin's slow oracle: naive servers, one list of arrivals, routers in words.

Written from vLLM's scheduler (`naive_twin`) and the published rules of the routers, one request at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from naive_twin import NaiveTwin, Request
from naive_twin import Server as Settings


class NaiveServer(NaiveTwin):
    """A server that can be looked at between the beginning and the end of a step."""

    def __init__(self, settings: Settings, duration_s: float, bin_s: float) -> None:
        super().__init__(settings, duration_s, bin_s)
        self.inbox: deque[Request] = deque()
        self.end_s: float | None = None
        self.tokens_out: tuple[Any, ...] | None = None

    def _emit(self, *tokens_out: Any) -> None:
        self.tokens_out = tokens_out

    def _begin(self) -> None:
        while self.inbox and self.inbox[0].sent_s <= self.now:
            request = self.inbox.popleft()
            self.front_end.accept(request.sent_s, request.adapter)
            self.waiting.append(request)
        start, self.tokens_out = self.now, None
        self._one_step()
        self.end_s, self.now = self.now, start
        self.step -= 1

    def _finish(self) -> None:
        assert self.end_s is not None
        self.now, self.end_s = self.end_s, None
        if self.tokens_out is not None:
            super()._emit(*self.tokens_out)
        self.step += 1

    def run_until(self, until_s: float) -> None:
        """Execute the steps that start before `until_s`."""
        while True:
            if self.end_s is not None:
                if self.end_s > until_s:
                    return
                self._finish()
            if not self.running and not self.waiting:
                if not self.inbox or self.inbox[0].sent_s >= until_s:
                    return
                self.now = max(self.now, self.inbox[0].sent_s)
            if self.now >= until_s:
                return
            self._begin()

    def holds(self, request: Request) -> bool:
        """Whether nothing needs to be loaded for a request: its adapter is in a slot, or it has none."""
        return self._lora_of(request) is None or request.adapter in self.lora.active

    @property
    def outstanding(self) -> int:
        """Requests that were given to the server and are not finished."""
        return len(self.running) + len(self.waiting) + len(self.inbox)

    def queued_prompt(self) -> int:
        """Prompt tokens of the requests that are not in the batch."""
        return sum(request.prompt for request in [*self.waiting, *self.inbox])

    def free_tokens(self) -> int:
        """Tokens that fit into free KV blocks, those of prompts outside the batch taken off."""
        free = (self.server.kv_blocks - self._used()) * self.server.block_size
        return free - self.queued_prompt()

    def has_room(self, request: Request, max_batch: int, mean_output: float) -> bool:
        """An idle server, or one with a place in its batch and KV cache for the request."""
        if self.outstanding == 0:
            return True
        return self.outstanding < max_batch and self.free_tokens() >= request.prompt + mean_output


Rule = Callable[[Sequence[NaiveServer], Sequence[int], Request, float], int | None]
"""(servers, candidates in turn, request, mean output tokens) → server, None: hold."""


def most_idle(servers: Sequence[NaiveServer], turn: Sequence[int], request: Request, mean: float) -> int:
    """The first in turn of those with the fewest requests."""
    return min(turn, key=lambda s: servers[s].outstanding)


def first_fit(servers: Sequence[NaiveServer], turn: Sequence[int], request: Request, mean: float) -> int:
    """The first by number with room; none has room: the most idle."""
    fitting = [s for s in sorted(turn) if servers[s].has_room(request, 32, mean)]
    return fitting[0] if fitting else most_idle(servers, turn, request, mean)


def punica(servers: Sequence[NaiveServer], turn: Sequence[int], request: Request, mean: float) -> int | None:
    """The one with the most requests among those with room; none has room: wait."""
    fitting = [s for s in turn if servers[s].has_room(request, 32, mean)]
    return max(fitting, key=lambda s: servers[s].outstanding) if fitting else None


def affinity(servers: Sequence[NaiveServer], turn: Sequence[int], request: Request, mean: float) -> int:
    """The most idle, where a missing adapter counts as four requests."""
    return min(turn, key=lambda s: servers[s].outstanding + 4 * (not servers[s].holds(request)))


def matching_score(servers: Sequence[NaiveServer], turn: Sequence[int], request: Request, mean: float) -> int:
    """The most points: 0.4 for a cached adapter, 0.2 × the free share of the places."""

    def points(s: int) -> float:
        free = 1 - servers[s].outstanding / servers[s].server.max_seqs
        return 0.2 * free + (0.4 if servers[s].holds(request) else 0)

    return max(turn, key=points)


def _law(server: NaiveServer, decodes: float, prefill: float, adapters: set[int], requests: Sequence[int]) -> float:
    """A step by the linear law with the terms of the random clusters, ms; nothing of the KV cache.

    `requests`: rank of each request in the step.
    """
    c = server.server.coefficients
    ms = c["base_ms"] + c["per_decode_ms"] * decodes + c["per_prefill_token_ms"] * prefill
    ms += c["per_request_rank_ms"] * sum(requests)
    ms += c["per_padded_rank_ms"] * len(requests) * max(requests, default=0)
    return ms + c["per_adapter_ms"] * len(adapters)


def _ranks(server: NaiveServer, requests: Sequence[Request]) -> list[int]:
    return [server.server.ranks[request.adapter] for request in requests]


def _joined(server: NaiveServer, request: Request) -> set[int]:
    """Adapters of the batch with the request's, as far as there are slots."""
    active = server._active()
    if server._lora_of(request) is None:
        return active
    return active if len(active) >= server.server.slots else active | {request.adapter}


def rank_aware(servers: Sequence[NaiveServer], turn: Sequence[int], request: Request, mean: float) -> int:
    """CaraServe's Algorithm 1: rise of prefill per output token and of a decode step, times the requests."""

    def cost(s: int) -> float:
        server, n = servers[s], servers[s].outstanding
        joined, queue = _joined(server, request), server.queued_prompt()
        queued = [*server.waiting, *server.inbox]
        everyone = [*server.running, *queued]
        own = server.server.ranks[request.adapter]
        # The padded kernel's rank is the largest on the server, wherever its request is.
        padded = max([own, *_ranks(server, everyone)])
        c = server.server.coefficients["per_padded_rank_ms"]
        missing = padded - max([own, *_ranks(server, queued)])
        prefill = _law(server, 0, queue + request.prompt, joined, [*_ranks(server, queued), own])
        prefill += c * (len(queued) + 1) * missing
        if queue > 0:
            prefill -= _law(server, 0, queue, joined, _ranks(server, queued))
            largest = max(_ranks(server, everyone), default=0)
            prefill -= c * len(queued) * (largest - max(_ranks(server, queued)))
        after = _law(server, n + 1, 0, joined, [*_ranks(server, everyone), own])
        before = _law(server, n, 0, server._active(), _ranks(server, everyone))
        penalty = 1000.0 if after > 100.0 else 0.0
        return (prefill / mean + after - before + penalty) * n

    return min(turn, key=cost)


def predicted(servers: Sequence[NaiveServer], turn: Sequence[int], request: Request, mean: float) -> int:
    """The shortest time for the queue's prompts and the request's own, its adapter's load and its decode steps."""

    def latency(s: int) -> float:
        server = servers[s]
        joined = _joined(server, request)
        decodes = sum(r.decoding for r in server.running)
        tokens = server.queued_prompt() + request.prompt
        steps = math.ceil(tokens / max(1, server.server.token_budget - decodes))
        queued = [*server.waiting, *server.inbox]
        own, everyone = server.server.ranks[request.adapter], [*server.running, *queued]
        padded = max([own, *_ranks(server, everyone)])
        beside = [*_ranks(server, everyone if decodes else queued), own]
        ms = _law(server, decodes, tokens / steps, joined, beside)
        ms += server.server.coefficients["per_padded_rank_ms"] * len(beside) * (padded - max(beside))
        ms *= steps
        if not server.holds(request):
            base, per_rank = server.server.host_ms
            ms += base + per_rank * server.server.ranks[request.adapter]
        all_ranks = [*_ranks(server, everyone), own]
        return ms + (mean - 1) * _law(server, server.outstanding + 1, 0, joined, all_ranks)

    return min(turn, key=latency)


RULES: Mapping[str, Rule] = {
    "most-idle": most_idle,
    "first-fit": first_fit,
    "punica": punica,
    "affinity": affinity,
    "matching-score": matching_score,
    "predicted": predicted,
    "rank-aware": rank_aware,
}


def run_cluster(
    servers: Sequence[NaiveServer],
    requests: Sequence[Request],
    prompts: Sequence[int],
    rule: Rule,
    candidates: Callable[[int], Sequence[int]],
    mean_output: float,
    duration_s: float,
) -> list[int | None]:
    """Route the requests, in order of arrival, and run to the end; the server of each.

    `prompts`: tokens that the router sees; a server cuts a request that is too long for it.
    """
    route: list[int | None] = [None] * len(requests)
    now = 0.0
    for request in requests:
        now = max(now, request.sent_s)
        for server in servers:
            server.run_until(now)
        own = candidates(request.adapter)
        turn = [own[(request.number + k) % len(own)] for k in range(len(own))]
        cut, request.prompt = request.prompt, prompts[request.number]
        chosen = rule(servers, turn, request, mean_output)
        while chosen is None:  # wait for the end of the next step of any server
            for server in servers:
                if server.end_s is None:
                    server.run_until(now + 1e-12)
            now = min(server.end_s for server in servers if server.end_s is not None)
            if now >= duration_s:
                break
            for server in servers:
                server.run_until(now)
            chosen = rule(servers, turn, request, mean_output)
        request.prompt = cut
        if chosen is None:
            break
        route[request.number] = chosen
        request.sent_s = now
        servers[chosen].inbox.append(request)
    for server in servers:
        server.run_until(duration_s)
    return route
