"""vLLM's adapter slots in plain Python, from its source (0.32.0), to compare with what a server logs.

`Slots` is one worker's registry and slots (vllm/lora/worker_manager.py, vllm/lora/model_manager.py). `replay`
feeds it the walks that a server logged; `predict` simulates the server from its requests and a law for the time of a
step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from packer.arrival import RequestTrace


@dataclass
class Slots:
    """Least-recently-used registry of `host` adapters in CPU memory and `slots` adapters in GPU memory.

    `sparing` evicts only adapters that are not in the batch: residents of the batch are touched first.
    """

    slots: int
    host: int
    sparing: bool = False
    registered: OrderedDict[int, None] = field(default_factory=OrderedDict)
    active: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def step(self, walk: Sequence[int]) -> tuple[list[int], list[int]]:
        """Adapters put into a slot and adapters read from disk, both in order, for one step's walk."""
        if self.sparing:
            for adapter in walk:
                for cache in (self.registered, self.active):
                    if adapter in cache:
                        cache.move_to_end(adapter)
        activated, loaded = [], []
        for adapter in walk:
            if adapter not in self.registered:
                loaded.append(adapter)
                if len(self.registered) >= self.host:
                    oldest, _ = self.registered.popitem(last=False)
                    self.active.pop(oldest, None)
            self.registered[adapter] = None
            self.registered.move_to_end(adapter)
            if adapter not in self.active:
                activated.append(adapter)
                if len(self.active) >= self.slots:
                    self.active.popitem(last=False)
            self.active[adapter] = None
            self.active.move_to_end(adapter)
        return activated, loaded


@dataclass(frozen=True)
class Walk:
    """One step as the plug-in `walk_log` writes it: start on the monotonic clock and adapter ids."""

    start_s: float
    order: tuple[int, ...]
    activated: tuple[int, ...]
    loaded: tuple[int, ...]


def read_walks(path: Path) -> list[Walk]:
    """Read the log; a last line cut short is dropped."""
    walks = []
    for line in path.read_text().splitlines():
        start, *lists = line.split(";")
        if len(lists) == 3:
            walks.append(Walk(float(start), *(tuple(map(int, ids.split())) for ids in lists)))
    return walks


class _Named:
    """An adapter with a hash drawn at random, as that of its name in a Python process."""

    def __init__(self, adapter: int, value: int) -> None:
        self.adapter, self.value = adapter, value

    def __hash__(self) -> int:
        return self.value


class SetOrder:
    """Order in which vLLM walks a batch: that of a set made of its adapters in the order in which they entered it.

    `InputBatch.make_lora_inputs` (vllm/v1/worker/gpu_input_batch.py) makes that set anew each step. An adapter that
    enters is put into the set last and behind those with which it collides.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._known: dict[int, _Named] = {}
        self._batch: dict[int, _Named] = {}

    def walk(self, adapters: Iterable[int]) -> list[int]:
        """The walk over the adapters of the next step; new ones enter the batch in the order given."""
        now = dict.fromkeys(adapters)
        self._batch = {a: named for a, named in self._batch.items() if a in now}
        for adapter in now:
            if adapter not in self._known:
                self._known[adapter] = _Named(adapter, int(self._rng.integers(2**61)))
            self._batch[adapter] = self._known[adapter]
        return [named.adapter for named in set(self._batch.values())]


def in_set_order(walks: Iterable[Walk], seed: int) -> list[Walk]:
    """The logged batches, walked in the order of another process."""
    order = SetOrder(seed)
    return [replace(walk, order=tuple(order.walk(walk.order))) for walk in walks]


def in_fixed_order(walks: Iterable[Walk], seed: int) -> list[Walk]:
    """The logged batches, walked in one random order of all adapters."""
    rng, place = np.random.default_rng(seed), {}
    found = []
    for walk in walks:
        for adapter in walk.order:
            place.setdefault(adapter, rng.random())
        found.append(replace(walk, order=tuple(sorted(walk.order, key=place.__getitem__))))
    return found


def replay(walks: Iterable[Walk], slots: Slots) -> list[tuple[int, int]]:
    """(put into a slot, read from disk) of every walk by the rule of `slots`."""
    return [(len(activated), len(loaded)) for activated, loaded in (slots.step(walk.order) for walk in walks)]


@dataclass(frozen=True)
class StepLaw:
    """Time of a step, ms: base + token_ms·tokens + adapter_ms·adapters + load_ms·loads + disk_ms·loads from disk."""

    base_ms: float
    token_ms: float
    adapter_ms: float
    load_ms: float
    disk_ms: float

    def __call__(self, tokens: int, adapters: int, loads: int, disk_loads: int) -> float:
        """The step's time, ms."""
        return (
            self.base_ms
            + self.token_ms * tokens
            + self.adapter_ms * adapters
            + self.load_ms * loads
            + self.disk_ms * disk_loads
        )


@dataclass
class _Request:
    adapter: int
    prompt: int
    output: int
    tokens: int


@dataclass(frozen=True)
class Prediction:
    """A simulated run: loads into slots and from disk, completed requests and their tokens, adapters per step."""

    loads: int
    disk_loads: int
    completed: int
    tokens: int
    steps: int
    mean_adapters: float


def predict(
    requests: RequestTrace,
    slots: Slots,
    law: Callable[[int, int, int, int], float],
    *,
    duration_s: float,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    slowdown: Sequence[float] = (1.0,),
    seed: int = 0,
) -> Prediction:
    """Serve `requests` as vLLM's scheduler does, step by step, without a limit of the KV cache.

    A step that begins in second k of the run takes slowdown[k] times as long as `law` says (the last value from then
    on): what else ran on the machine.
    """
    order = SetOrder(seed)
    arrivals = deque(
        zip(
            requests.time_s.tolist(),
            requests.adapter.tolist(),
            requests.input_tokens.tolist(),
            requests.output_tokens.tolist(),
            strict=True,
        )
    )
    waiting: deque[_Request] = deque()
    running: list[_Request] = []
    done_tokens = completed = loads = disk_loads = steps = adapters = 0
    now_s = 0.0
    while now_s < duration_s:
        while arrivals and arrivals[0][0] <= now_s:
            _, adapter, n_in, n_out = arrivals.popleft()
            waiting.append(_Request(adapter, n_in, n_out, n_in + n_out))
        tokens = _schedule(waiting, running, slots.slots, max_num_seqs, max_num_batched_tokens)
        if not running:
            if not arrivals:
                break
            now_s = arrivals[0][0]
            continue
        batch = order.walk(request.adapter for request in running)
        activated, loaded = slots.step(batch)
        step_ms = law(tokens, len(batch), len(activated), len(loaded))
        now_s += step_ms * slowdown[min(int(now_s), len(slowdown) - 1)] / 1e3
        loads, disk_loads = loads + len(activated), disk_loads + len(loaded)
        steps, adapters = steps + 1, adapters + len(batch)
        for request in [r for r in running if r.prompt == 0]:
            request.output -= 1
            if request.output == 0:
                running.remove(request)
                completed += 1
                done_tokens += request.tokens
    return Prediction(loads, disk_loads, completed, done_tokens, steps, adapters / max(steps, 1))


def _schedule(waiting: deque[_Request], running: list[_Request], slots: int, max_num_seqs: int, budget: int) -> int:
    """Give tokens to the running requests, then admit waiting ones in order; returns the step's tokens."""
    left = budget
    for request in running:
        chunk = min(request.prompt, left) if request.prompt else 1
        request.prompt -= chunk if request.prompt else 0
        left -= chunk
    adapters = {request.adapter for request in running}
    skipped: deque[_Request] = deque()
    while waiting and left > 0 and len(running) < max_num_seqs:
        request = waiting.popleft()
        if len(adapters) == slots and request.adapter not in adapters:
            skipped.append(request)
            continue
        adapters.add(request.adapter)
        chunk = min(request.prompt, left)
        request.prompt -= chunk
        left -= chunk
        running.append(request)
    waiting.extendleft(reversed(skipped))
    return budget - left
