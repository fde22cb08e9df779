"""The twin's slow oracle: vLLM V1's scheduler, request by request, with nothing clever.

Follows vllm/v1/core/sched/scheduler.py (`Scheduler.schedule`) line by line: a list of running requests in the
order of their admission, a deque of waiting ones that is scanned from the front, blocks counted for each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from naive_front_end import CHUNK_OUTPUTS, NaiveFrontEnd
from naive_law import step_ms
from naive_lora import NaiveLora

MIN_STEP_S = MIN_GAP_S = 5e-5


@dataclass(frozen=True)
class Server:
    """What the twin gets from a profile and its caller; `adapter_blocks` all 0 unless memory is unified."""

    ranks: Sequence[int]
    adapter_blocks: Sequence[int]
    coefficients: Mapping[str, float]
    form: str
    graph_max: int
    host_ms: tuple[float, float]
    disk_ms: tuple[float, float]
    cold_start: bool
    slots: int
    slot_rank: int
    kv_blocks: int
    block_size: int
    token_budget: int
    max_seqs: int
    max_outstanding: float
    max_cpu_loras: float
    hashes: Sequence[int]
    spares_batch: bool
    prefills_first: bool
    series_of_lists: bool
    scrape_interval_s: float | None
    front_end_s: tuple[float, float, float, float, float, float]
    graphs_without_lora: bool = False
    concurrency: float = math.inf
    ridge: float = 0.0
    expert_share: float = 0.0
    whole_sequence: bool = False
    skipped_first: bool = False
    skipped_reversed: bool = False
    warm_start: bool = False


class Named:
    """An adapter's `LoRARequest`: its hash is that of its name, random for each process."""

    def __init__(self, adapter: int, value: int) -> None:
        self.adapter, self.value = adapter, value

    def __hash__(self) -> int:
        return self.value


@dataclass(eq=False)
class Request:
    """One request and where it stands."""

    number: int
    sent_s: float
    adapter: int
    prompt: int
    output: int
    generated: int = 0  # tokens that came out
    computed: int = 0  # tokens in the KV cache
    blocks: int = 0
    reached_s: float = math.nan
    engine_first_s: float = math.nan
    engine_finish_s: float = math.nan
    first_s: float = math.nan  # as the client sees it
    seen_s: float = math.nan
    last_s: float = math.nan
    finish_s: float = math.nan
    prefill_step: int = -1  # step in which its last prefill ended
    admission: int = -1
    gaps_s: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that must be in the KV cache before the next one comes out."""
        return self.prompt + self.generated

    @property
    def decoding(self) -> bool:
        """Whether one token is all that is missing."""
        return self.prefill_step >= 0


class NaiveTwin:
    """One server; `run` simulates it."""

    def __init__(self, server: Server, duration_s: float, bin_s: float) -> None:
        self.server, self.duration_s, self.bin_s = server, duration_s, bin_s
        self.running: list[Request] = []
        self.batch: dict[int, Named] = {}  # `InputBatch.lora_id_to_lora_request`
        self.waiting: deque[Request] = deque()
        self.passed = 0  # the first of them, which stand in `skipped_waiting`, where that comes before `waiting`
        self.accepted: list[Request] = []
        self.arrivals: deque[float] = deque()
        self.marks: deque[tuple[int, int, int]] = deque()
        self.marks_wait = False
        self.pending: list[Request] = []  # accepted by the front end, not yet in the engine
        tokenizers = max(server.slots, server.max_seqs)
        front_end = (server.scrape_interval_s, server.front_end_s, server.series_of_lists, tokenizers)
        self.front_end = NaiveFrontEnd(*front_end)
        host = max(server.max_cpu_loras, server.slots)  # vLLM refuses fewer host places than slots
        self.lora = NaiveLora(host, server.slots)
        self.adapters = [adapter for adapter, rank in enumerate(server.ranks) if rank > 0]
        if server.warm_start:
            self.front_end.used = self.adapters[-tokenizers:]
        if not server.cold_start and host >= len(self.adapters):
            self.lora.registered.update(dict.fromkeys(self.adapters))
        elif not server.cold_start:
            self._load_all()
        self.now, self.step, self.admissions = 0.0, 0, 0
        self.sent = self.refused = self.preemptions = 0
        self.peak_blocks = self.peak_running = self.merged = 0
        self.busy_s = self.load_s = 0.0
        self.timeline = [[0.0] * 8 for _ in range(math.ceil(duration_s / bin_s))]

    def run(self, times: Sequence[float], marks: Sequence[tuple[int, int, int]], *, marks_wait: bool) -> NaiveTwin:
        """Simulate. `marks_wait`: a refused arrival leaves (adapter, prompt, output) to the next one."""
        self.arrivals, self.marks, self.marks_wait = deque(times), deque(marks), marks_wait
        while True:
            if not self.running and not self.waiting:
                due = [*self._next_sent(), *(request.reached_s for request in self.pending[:1])]
                if not due:
                    break
                self.now = max(self.now, min(due))
            self.now = min(self.now, self.duration_s)
            self._arrive(math.inf)
            if self.now >= self.duration_s:
                break
            if self.running or self.waiting:
                self._one_step()
        return self

    def _next_sent(self) -> list[float]:
        """When the client sends its next request, if that is known: it holds a semaphore for each that is open."""
        if not self.arrivals:
            return []
        sent_s = self.arrivals[0]
        to_end = len(self.accepted) + 1 - self.server.concurrency  # others that must end before
        if to_end > 0:
            seen_s = sorted(each.finish_s for each in self.accepted if not math.isnan(each.finish_s))
            if to_end > len(seen_s):
                return []
            sent_s = max(sent_s, seen_s[int(to_end) - 1])
        return [sent_s] if sent_s < self.duration_s else []

    def _arrive(self, before_s: float) -> None:
        """What was sent up to now, and before `before_s`, comes to the front end, and what is ready to the engine."""
        while (due := self._next_sent()) and due[0] <= self.now and due[0] < before_s:
            sent_s = due[0]
            self.arrivals.popleft()
            self.sent += 1
            if len(self.running) + len(self.waiting) + len(self.pending) >= self.server.max_outstanding:
                self.refused += 1
                if not self.marks_wait:
                    self.marks.popleft()
                continue
            request = Request(len(self.accepted), sent_s, *self.marks.popleft())
            request.reached_s = self.front_end.accept(sent_s, self._lora_of(request))
            self.accepted.append(request)
            self.pending.append(request)
        while self.pending and self.pending[0].reached_s <= self.now and self.pending[0].reached_s < before_s:
            self.waiting.append(self.pending.pop(0))

    def _load_all(self) -> None:
        """Every adapter is loaded once before the first request; in unified memory they leave the GPU again."""
        for adapter in self.adapters:
            self.lora.add_adapter(adapter)
        if any(self.server.adapter_blocks):
            self.lora.active.clear()
        self.lora.loads = self.lora.disk_loads = 0

    # ---- helpers
    def _lora_of(self, request: Request) -> int | None:
        """`request.lora_request`: the adapter; None for a request to the base model, of rank 0."""
        return request.adapter if self.server.ranks[request.adapter] > 0 else None

    def _blocks(self, tokens: int) -> int:
        return math.ceil(tokens / self.server.block_size)

    def _used(self) -> int:
        held = sum(request.blocks for request in self.running)
        return held + sum(self.server.adapter_blocks[a] for a in self.lora.active)

    def _active(self) -> set[int]:
        return {request.adapter for request in self.running if self._lora_of(request) is not None}

    def _left(self, adapter: int) -> None:
        """A request of the adapter left the batch: with the last one `InputBatch.remove_request` forgets it."""
        if adapter in self.batch and adapter not in self._active():
            del self.batch[adapter]

    def _evict_idle(self, but: int = -1) -> bool:
        """Throw out the least recently used adapter to make room for KV blocks (unified memory only)."""
        for adapter in self.lora.active:
            idle = adapter not in self._active() and adapter != but
            if idle and self.server.adapter_blocks[adapter] > 0:
                self.lora.deactivate(adapter)
                return True
        return False

    # ---- one engine step
    def _one_step(self) -> None:
        scheduled: dict[Request, int] = {}
        preempted = self._schedule_running(scheduled)
        before = set(self.batch)
        decodes = [request for request in scheduled if request.decoding]
        context = sum(request.computed + 1 for request in decodes)
        load_ms = 0.0
        if not preempted:
            load_ms = self._schedule_waiting(scheduled)
        if self.server.prefills_first:  # they joined in a step of their own
            load_ms += sum(self._touch(adapter) for adapter in self.batch if adapter not in before)
        # `InputBatch.make_lora_inputs` makes a set of the dict's values.
        load_ms += sum(self._touch(named.adapter) for named in set(self.batch.values()))
        prefill_tokens = sum(n for request, n in scheduled.items() if not request.decoding)
        self.attended = sum(
            n * (2 * request.computed + n) // 2 for request, n in scheduled.items() if not request.decoding
        )
        dt = (self._step_ms(len(decodes), prefill_tokens, context) + load_ms) * 1e-3
        dt = max(dt, MIN_STEP_S)
        self._record(dt, load_ms, prefill_tokens, len(decodes), len(preempted))
        self.now += dt
        if self.now <= self.duration_s:
            self._arrive(self.now)
            self._emit(scheduled)
            self.front_end.stepped()
        self.step += 1

    def _schedule_running(self, scheduled: dict[Request, int]) -> list[Request]:
        budget = self.server.token_budget
        preempted: list[Request] = []
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            new = min(request.tokens - request.computed, budget)
            while True:
                more = self._blocks(request.computed + new) - request.blocks
                if self._used() + more <= self.server.kv_blocks:
                    break
                if self._evict_idle():
                    continue
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    return preempted
            request.blocks = self._blocks(request.computed + new)
            scheduled[request] = new
            budget -= new
            i += 1
        return preempted

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        request.blocks = request.computed = 0
        request.prefill_step = -1
        self._left(request.adapter)
        self.waiting.insert(self.passed, request)

    def _schedule_waiting(self, scheduled: dict[Request, int]) -> float:
        budget = self.server.token_budget - sum(scheduled.values())
        load_ms = 0.0
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.server.max_seqs:
            request = self.waiting[0]
            active, lora = self._active(), self._lora_of(request)
            if lora is not None and lora not in active and len(active) == self.server.slots:
                skipped.append(self._pop_waiting())
                continue
            new = min(request.tokens, budget)
            need = self._blocks(new)
            if lora is not None and lora not in self.lora.active:
                need += self.server.adapter_blocks[request.adapter]
            while self._used() + need > self.server.kv_blocks and self._evict_idle(but=request.adapter):
                pass
            if self._used() + need > self.server.kv_blocks:
                break
            if self.server.whole_sequence:  # `full_sequence_must_fit`: a check that allocates nothing
                need += self._blocks(request.tokens) - self._blocks(new)
                while self._used() + need > self.server.kv_blocks and self._evict_idle(but=request.adapter):
                    pass
                if self._used() + need > self.server.kv_blocks:
                    break
            self._pop_waiting()
            if self.server.spares_batch and lora is not None:
                load_ms += self._touch(request.adapter)
            request.blocks = self._blocks(new)
            request.admission = self.admissions
            self.admissions += 1
            self.running.append(request)
            if lora is not None:
                self.batch.setdefault(lora, Named(lora, self.server.hashes[lora]))
            scheduled[request] = new
            budget -= new
        self.waiting.extendleft(skipped if self.server.skipped_reversed else reversed(skipped))
        self.passed += len(skipped) if self.server.skipped_first else 0
        return load_ms

    def _pop_waiting(self) -> Request:
        self.passed = max(self.passed - 1, 0)
        return self.waiting.popleft()

    def _touch(self, adapter: int) -> float:
        """`_apply_adapters` comes to an adapter; returns the time of what it loads, ms."""
        server, rank = self.server, self.server.ranks[adapter]
        into_slot, from_disk = self.lora.add_adapter(adapter, self._active() if server.spares_batch else ())
        ms = server.host_ms[0] + server.host_ms[1] * rank if into_slot else 0.0
        return ms + (server.disk_ms[0] + server.disk_ms[1] * rank if from_disk else 0.0)

    def _step_ms(self, b: int, p: int, context: int) -> float:
        return step_ms(self, b, p, context)

    def _record(self, dt: float, load_ms: float, prefill_tokens: int, decodes: int, preempted: int) -> None:
        row = self.timeline[int(self.now / self.bin_s)]
        used = self._used()
        values = (
            dt, dt * len(self.running), dt * len(self.waiting), dt * used, dt * len(self._active()),
            prefill_tokens, decodes, preempted,
        )  # fmt: skip
        for k, value in enumerate(values):
            row[k] += value
        self.busy_s += dt
        self.load_s += load_ms * 1e-3
        self.peak_blocks = max(self.peak_blocks, used)
        self.peak_running = max(self.peak_running, len(self.running))

    def _emit(self, scheduled: Mapping[Request, int]) -> None:
        """Tokens come out of the requests whose prompt is whole; finished ones leave."""
        outputs = [request for request, new in scheduled.items() if request.computed + new >= request.tokens]
        seen_s = self.front_end.stream(self.now, len(outputs))
        last_of_slice = _last_of_slices(outputs)
        for request, new in scheduled.items():
            request.computed += new
            if request not in outputs:
                continue
            if request.generated == 0:
                request.engine_first_s, request.first_s = self.now, seen_s
                if self._lora_of(request) is not None:
                    self.front_end.began(request.adapter)
            elif not request.decoding:
                request.gaps_s.append(self.now - request.last_s)
            elif seen_s > request.seen_s or len(outputs) > CHUNK_OUTPUTS:
                request.gaps_s.append(max(seen_s - request.seen_s, MIN_GAP_S))
            else:
                self.merged += 1
            if not request.decoding:
                request.prefill_step = self.step
            request.generated += 1
            request.last_s, request.seen_s = self.now, seen_s
            if request.generated == request.output:
                request.engine_finish_s, request.finish_s = self.now, seen_s
                self.running.remove(request)
                self._left(request.adapter)
                if self._lora_of(request) is not None:
                    self.front_end.finished(request.adapter)
            if request in last_of_slice:
                self.front_end.sliced()
        if not outputs:
            self.front_end.sliced()


def _last_of_slices(outputs: list[Request]) -> list[Request]:
    if len(outputs) <= CHUNK_OUTPUTS:
        return outputs[-1:]
    slices = np.array_split(np.arange(len(outputs)), math.ceil(len(outputs) / CHUNK_OUTPUTS))
    return [outputs[part[-1]] for part in slices]
