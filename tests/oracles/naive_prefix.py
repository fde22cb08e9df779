"""The slow oracle of prefix caching and asynchronous scheduling: vLLM's scheduler with each block and each token.

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
    outputs: int = 0
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
        full = tokens // self.settings.block_size
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
        return hits

    def allocate_slots(self, request: Request, new: int, hits: list[Block], whole: bool) -> bool:
        """`KVCacheManager.allocate_slots`: whether there was room."""
        size = self.settings.block_size
        computed = request.computed + len(hits) * size
        idle = sum(block.refs == 0 for block in hits)
        held = len(request.blocks) + len(hits)
        for tokens in (request.num_tokens if whole else 0, computed + new):
            if max(-(-tokens // size) - held, 0) + idle > len(self.free):
                return False
        if hits:
            self.touch(hits)
            request.blocks, request.cached = list(hits), len(hits)
        request.blocks += self.get_new_blocks(max(-(-(computed + new) // size) - len(request.blocks), 0))
        self.cache_full_blocks(request, min(computed + new, request.num_tokens))
        return True


class NaiveScheduler:
    """One server; `run` simulates it."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.pool = settings, BlockPool(settings)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0

    def schedule(self) -> dict[Request, int]:
        """`Scheduler.schedule`: tokens of each request in the next step."""
        scheduled: dict[Request, int] = {}
        budget, preempted, i = self.settings.max_num_batched_tokens, False, 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            ends = request.computed + 2 - request.placeholders >= request.prompt + request.max_tokens
            new = min(request.num_tokens + request.placeholders - request.computed, budget)
            if (request.placeholders > 0 and ends) or new == 0:
                i += 1
                continue
            while not (fits := self.pool.allocate_slots(request, new, [], False)):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if not fits:
                break
            scheduled[request] = new
            budget -= new
            i += 1
        loras = {
            request.adapter for request in (self.running if self.settings.slots_of_running else scheduled)
        }
        skipped: list[Request] = []
        while not preempted and self.waiting and budget > 0:
            if len(self.running) == self.settings.max_num_seqs:
                break
            request = self.waiting[0]
            if request.stale or (request.adapter not in loras and len(loras) == self.settings.max_loras):
                skipped.append(self.waiting.popleft())
                continue
            hits = self.pool.get_computed_blocks(request)
            cached = len(hits) * self.settings.block_size
            new = min(request.num_tokens - cached, budget)
            if not self.pool.allocate_slots(request, new, hits, self.settings.reserve_full_isl):
                break
            self.running.append(self.waiting.popleft())
            if request.found < 0:
                request.found = cached
            request.computed, request.preempted = cached, False
            loras.add(request.adapter)
            scheduled[request] = new
            budget -= new
        self.waiting.extendleft(reversed(skipped))
        for request, new in scheduled.items():  # `_update_after_schedule`
            request.computed += new
            request.in_flight += new
            whole = request.computed >= request.num_tokens + request.placeholders
            request.placeholders += self.settings.async_scheduling and whole
        return scheduled

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.pool.free_blocks(request.blocks[::-1])
        request.blocks, request.cached, request.computed, request.placeholders = [], 0, 0, 0
        request.stale, request.preempted = request.in_flight, True
        self.waiting.appendleft(request)

    def update_from_output(self, scheduled: dict[Request, int], sampled: list[Request], now_s: float) -> None:
        """The tokens of a step are there."""
        for request, new in scheduled.items():
            request.in_flight -= new
            stale = request.stale > 0
            request.stale -= new if stale else 0
            if request not in sampled:
                continue
            request.outputs += 1
            if request.first_s < 0:
                request.first_s = now_s
            if self.settings.async_scheduling and not stale:
                request.placeholders -= 1
            if self.settings.async_scheduling and not request.preempted:
                self.pool.cache_full_blocks(request, request.computed - request.placeholders)
            if request.outputs == request.max_tokens:
                request.finish_s = now_s
                self.pool.free_blocks(request.blocks[::-1])
                request.blocks = []
                (self.waiting if request.preempted else self.running).remove(request)

    def run(self, requests: list[Request]) -> NaiveScheduler:
        """`EngineCore.step`, or `step_with_batch_queue`: a step is scheduled while the one before it is executed."""
        due, now_s = deque(requests), 0.0
        queue: deque[tuple[dict[Request, int], list[Request]]] = deque()
        while due or self.waiting or self.running:
            if not queue and not self.waiting and not self.running:
                now_s = max(now_s, due[0].time_s)
            self._arrive(due, now_s)
            while len(queue) < 1 + self.settings.async_scheduling and (self.waiting or self.running):
                before = {request: request.placeholders for request in self.running}
                before |= dict.fromkeys(self.waiting, 0)
                scheduled = self.schedule()
                if not scheduled:
                    break
                ahead = self.settings.async_scheduling
                queue.append((scheduled, [
                    request for request in scheduled
                    if (request.placeholders > before[request] if ahead else request.computed >= request.num_tokens)
                ]))  # fmt: skip
            scheduled, sampled = queue.popleft()
            now_s += self.settings.base_s + self.settings.token_s * sum(scheduled.values())
            if not self.settings.async_scheduling:
                self._arrive(due, now_s)
            self.update_from_output(scheduled, sampled, now_s)
        return self

    def _arrive(self, due: deque[Request], now_s: float) -> None:
        while due and due[0].time_s <= now_s:
            self.waiting.append(due.popleft())
