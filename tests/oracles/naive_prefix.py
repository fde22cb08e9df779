"""The slow oracle of vLLM's scheduler with each block and each token: prefix caching, priorities, drafts, both loops.

Written from vLLM 0.32's v1/core/sched/scheduler.py, async_scheduler.py, kv_cache_manager.py, block_pool.py and
single_type_kv_cache_manager.py, with their names. Adapters load at once and there is no front end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

Hash = tuple[int, ...]


@dataclass(frozen=True)
class Settings:
    """A server: a step takes `base_s` and `token_s` for each of its tokens."""

    block_size: int
    blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    prefix_caching: bool
    async_scheduling: bool
    base_s: float
    token_s: float
    reserve_full_isl: bool = True
    unhashed_first: bool = True
    slots_of_running: bool = False
    priority: bool = False
    drafts: int = 0
    draft_slots: int = 0
    eagle: bool = False
    max_model_len: int = 10**9
    passes_itself: bool = False
    caches_verified: bool = False
    lookahead: int = 0


@dataclass(eq=False)
class Block:
    """A block of the KV cache."""

    hash: Hash | None = None
    refs: int = 0


@dataclass(eq=False)
class Request:
    """A request, its tokens counted as vLLM does."""

    number: int
    time_s: float
    adapter: int
    prompt: int
    max_tokens: int
    ids: list[int]
    priority: int = 0
    chance: float = 0.0
    outputs: int = 0
    spec: int = 0
    chunk: bool = False
    computed: int = 0
    placeholders: int = 0
    in_flight: int = 0
    stale: int = 0
    preempted: bool = False
    blocks: list[Block] = field(default_factory=list)
    cached: int = 0
    found: int = -1
    first_s: float = -1.0
    finish_s: float = -1.0

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return self.prompt + self.outputs

    def hash(self, place: int) -> Hash:
        """Of a block: an id stands for all that comes before it; what has none is like nothing else."""
        if place < len(self.ids):
            return self.adapter, self.ids[place]
        return self.adapter, self.number, place


@dataclass(eq=False)
class BlockPool:
    """The free queue and the blocks that can be found."""

    settings: Settings

    def __post_init__(self) -> None:
        self.free = [Block() for _ in range(self.settings.blocks)]
        self.found: dict[Hash, list[Block]] = {}

    def get_new_blocks(self, count: int) -> list[Block]:
        """Blocks from the front of the queue, which are found no more."""
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            if block.hash is not None:
                self.found[block.hash].remove(block)
                block.hash = None
            block.refs = 1
        return taken

    def touch(self, blocks: list[Block]) -> None:
        """One more request has them."""
        for block in blocks:
            if block.refs == 0:
                self.free.remove(block)
            block.refs += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        """One request fewer has them."""
        first, last = [], []
        for block in blocks:
            block.refs -= 1
            if block.refs == 0:
                (first if block.hash is None and self.settings.unhashed_first else last).append(block)
        self.free = first + self.free + last

    def cache_full_blocks(self, request: Request, tokens: int) -> None:
        """The full blocks of these tokens can be found."""
        if not self.settings.prefix_caching:
            return
        full = min(tokens, request.num_tokens - self.settings.lookahead) // self.settings.block_size
        for place in range(request.cached, full):
            block = request.blocks[place]
            block.hash = request.hash(place)
            self.found.setdefault(block.hash, []).append(block)
        request.cached = max(request.cached, full)

    def get_computed_blocks(self, request: Request) -> list[Block]:
        """Blocks that the request begins with; the last token is computed in any case."""
        hits: list[Block] = []
        if not self.settings.prefix_caching:
            return hits
        for place in range((request.num_tokens - 1) // self.settings.block_size):
            equal = self.found.get(request.hash(place))
            if not equal:
                break
            hits.append(equal[0])
        return hits[:-1] if self.settings.eagle and not self.settings.lookahead else hits

    def allocate_slots(self, request: Request, new: int, hits: list[Block], whole: bool) -> bool:
        """`KVCacheManager.allocate_slots`: whether there was room."""
        size = self.settings.block_size
        computed = request.computed + len(hits) * size
        idle = sum(block.refs == 0 for block in hits)
        held = len(request.blocks) + len(hits)
        needed = min(computed + new + self.settings.drafts, self.settings.max_model_len)  # with `num_lookahead_tokens`
        for tokens in (request.num_tokens if whole else 0, needed):
            if max(-(-tokens // size) - held, 0) + idle > len(self.free):
                return False
        if hits:
            self.touch(hits)
            request.blocks, request.cached = list(hits), len(hits)
        request.blocks += self.get_new_blocks(max(-(-needed // size) - len(request.blocks), 0))
        self.cache_full_blocks(request, computed + new)
        return True


@dataclass
class Step:
    """What a step computes: tokens of each request; drafts of those that sample, of which some may be kept."""

    tokens: dict[Request, int] = field(default_factory=dict)
    drafts: dict[Request, int] = field(default_factory=dict)
    padded: set[Request] = field(default_factory=set)


class NaiveScheduler:
    """One server; `run` simulates it."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.pool = settings, BlockPool(settings)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0

    def _rank(self, request: Request) -> tuple[int, float, int]:
        return request.priority, request.time_s, request.number

    def _grow(self, step: Step, preempted: list[Request], budget: int, inputs: int) -> tuple[int, int, bool]:
        """The running requests get their tokens; what is left of both budgets, and whether a prefill is among them."""
        settings, spec, i, prefill = self.settings, self.settings.draft_slots, 0, False
        while i < len(self.running) and budget > 0 and inputs > spec:
            request = self.running[i]
            ends = request.computed + 2 - request.placeholders >= request.prompt + request.max_tokens
            new = min(
                request.num_tokens + request.spec + request.placeholders - request.computed, budget, inputs - spec,
                self.settings.max_model_len - request.computed - 1,
            )  # fmt: skip
            if (request.placeholders > 0 and ends) or new == 0:
                i += 1
                continue
            while not (fits := self.pool.allocate_slots(request, new, [], False)):
                victim = max(self.running, key=self._rank) if self.settings.priority else self.running[-1]
                i -= self.running.index(victim) < i
                self.running.remove(victim)
                if victim in step.tokens:
                    budget += step.tokens[victim]
                    inputs += step.tokens.pop(victim) + spec
                    step.drafts.pop(victim)
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            if not fits and settings.passes_itself and request.preempted:
                continue
            if not fits:
                break
            prefill |= request.chunk
            step.tokens[request] = new
            beyond = new + request.computed - request.num_tokens - request.placeholders
            step.drafts[request] = max(beyond, 0) if request.spec else 0
            request.spec = 0
            budget -= new
            inputs -= new + spec
            i += 1
        return budget, inputs, prefill

    def schedule(self) -> Step:
        """`Scheduler.schedule`: tokens of each request in the next step."""
        step, settings, preempted = Step(), self.settings, []
        spec = settings.draft_slots
        budget = inputs = settings.max_num_batched_tokens
        budget, inputs, prefill = self._grow(step, preempted, budget, inputs)
        grown = bool(step.tokens)
        loras = {request.adapter for request in (self.running if settings.slots_of_running else step.tokens)}
        skipped: list[Request] = []
        while not preempted and self.waiting and budget > 0 and inputs > spec:
            if len(self.running) == settings.max_num_seqs:
                break
            request = min(self.waiting, key=self._rank) if settings.priority else self.waiting[0]
            if request.stale or (request.adapter not in loras and len(loras) == settings.max_loras):
                self.waiting.remove(request)
                skipped.append(request)
                continue
            hits = self.pool.get_computed_blocks(request)
            cached, most = len(hits) * settings.block_size, min(budget, inputs - spec)
            new, whole = request.num_tokens - cached, 1 + settings.drafts
            pads = settings.drafts and new == 1 and not prefill and (grown or cached)
            if pads and cached + whole + 1 <= settings.max_model_len:
                if whole > most:
                    break
                new = whole
                step.padded.add(request)
            new = min(new, most)
            if not self.pool.allocate_slots(request, new, hits, settings.reserve_full_isl):
                step.padded.discard(request)
                break
            self.waiting.remove(request)
            self.running.append(request)
            if request.found < 0:
                request.found = cached
            request.computed, request.preempted = cached, False
            loras.add(request.adapter)
            step.tokens[request] = new
            step.drafts[request] = settings.drafts if request in step.padded else 0
            budget -= new
            inputs -= new + spec
        self.waiting[:0] = skipped
        for request, new in step.tokens.items():  # `_update_after_schedule`
            request.computed += new
            request.in_flight += new
            request.chunk = request.computed < request.num_tokens + request.placeholders
            if request.chunk:
                del step.drafts[request]
            elif settings.async_scheduling:
                request.placeholders += 1 + step.drafts[request]
                request.spec = settings.drafts
        return step

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.pool.free_blocks(request.blocks[::-1])
        request.blocks, request.cached, request.computed, request.placeholders = [], 0, 0, 0
        request.stale, request.preempted, request.spec = request.in_flight, True, 0
        self.waiting.insert(0, request)

    def update_from_output(self, step: Step, now_s: float) -> None:
        """The tokens of a step are there."""
        for request, new in step.tokens.items():
            request.in_flight -= new
            stale = request.stale > 0
            request.stale -= new if stale else 0
            if request not in step.drafts or request.outputs == request.max_tokens:
                continue
            drafts = step.drafts[request]
            kept = accepted(request.chance, request.number, request.outputs, 0 if request in step.padded else drafts)
            if not stale:
                request.computed -= drafts - kept if request.computed > 0 else 0
                request.placeholders -= drafts - kept if request.placeholders > 0 else 0
            got = min(1 + kept, request.max_tokens - request.outputs)
            request.outputs += got
            if request.first_s < 0:
                request.first_s = now_s
            ahead = request.placeholders > 0
            if self.settings.async_scheduling and not stale:
                request.placeholders -= got
            if not stale and self.settings.caches_verified:
                request.computed -= 1 + kept - got
            if not request.preempted and self.settings.caches_verified:
                if ahead or self.settings.drafts:
                    self.pool.cache_full_blocks(request, request.computed - request.in_flight)
            elif not request.preempted and self.settings.async_scheduling:
                self.pool.cache_full_blocks(request, request.computed - request.placeholders)
            if not self.settings.async_scheduling:
                request.spec = self.settings.drafts
            if request.outputs == request.max_tokens:
                request.finish_s = now_s
                self.pool.free_blocks(request.blocks[::-1])
                request.blocks = []
                (self.waiting if request.preempted else self.running).remove(request)

    def run(self, requests: list[Request]) -> NaiveScheduler:
        """`EngineCore.step`, or `step_with_batch_queue`: a step is scheduled while the one before it is executed."""
        due, now_s = deque(requests), 0.0
        queue: deque[Step] = deque()
        while due or self.waiting or self.running:
            if not queue and not self.waiting and not self.running:
                now_s = max(now_s, due[0].time_s)
            self._arrive(due, now_s)
            while len(queue) < 1 + self.settings.async_scheduling and (self.waiting or self.running):
                step = self.schedule()
                if not step.tokens:
                    break
                queue.append(step)
            if not queue:  # a request preempted itself, before others: such a step takes no time
                continue
            step = queue.popleft()
            now_s += self.settings.base_s + self.settings.token_s * sum(step.tokens.values())
            if not self.settings.async_scheduling:
                self._arrive(due, now_s)
            self.update_from_output(step, now_s)
        return self

    def _arrive(self, due: deque[Request], now_s: float) -> None:
        while due and due[0].time_s <= now_s:
            self.waiting.append(due.popleft())


def uniform(request: int, outputs: int) -> float:
    """A number in (0, 1) that stands for what request number `request` says after so many outputs."""
    prime = 2**31 - 1
    x = ((request + 1) * 48271 + (outputs + 1) * 40692) % prime
    for factor in (1103515245, 69621, 48271):
        x = ((x ^ x >> 15) + 1) * factor % prime
    return (x + 0.5) / prime


def accepted(chance: float, request: int, outputs: int, drafts: int) -> int:
    """Drafts that are kept: each with this chance, if those before it are."""
    u, count, product = uniform(request, outputs), 0, chance
    while count < drafts and u < product:
        count, product = count + 1, product * chance
    return count
