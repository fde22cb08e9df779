"""The slow oracle of LightLLM's engine: S-LoRA's router loop and pool, with lists and sets.

Follows S-LoRA's public router (`slora/server/router`: `manager.py`, `req_queue.py`, `cluster_req_queue.py`,
`abort_req_queue.py`) and, for CPU-assisted and asynchronous loading, CaraServe (arXiv 2401.11240) and Punica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_STEP_S = 5e-5


@dataclass(frozen=True)
class Settings:
    """A server. `law(decodes, prompt_tokens, ranks of the requests, adapters of the requests, context)` in ms."""

    cells: int
    adapter_cells: Sequence[int]
    ranks: Sequence[int]
    law: Callable[[int, int, list[int], list[int], int], float]
    load_ms: Callable[[int], float]
    loading: str
    rule: str
    cores: int
    core_tokens: int
    token_rank_ms: float
    sync_ms: float
    max_wait_tokens: int
    batch_max_tokens: int
    running_max_req_size: int
    batch_num_adapters: float
    abort_after_s: float
    slots: float


@dataclass(eq=False)
class Job:
    """One request and where it stands."""

    sent_s: float
    adapter: int
    prompt: int
    output: int
    generated: int = 0
    first_s: float = math.nan
    finish_s: float = math.nan
    aborted: bool = False

    @property
    def held(self) -> int:
        """Cells of the request: its prompt, and one for each token that came out or is about to."""
        return self.prompt + max(self.generated, 1)

    @property
    def remaining(self) -> int:
        """Tokens that are still to come once the prefill is done."""
        return self.output - max(self.generated, 1)


def peak(batch: Sequence[Job]) -> int:
    """Sort by remaining output, descending; the largest of cumulative held + k × remaining."""
    held, most = 0, 0
    for k, job in enumerate(sorted(batch, key=lambda job: -job.remaining), start=1):
        held += job.held
        most = max(most, held + k * job.remaining)
    return most


class NaiveLightLlm:
    """One server; `run` simulates it."""

    def __init__(self, settings: Settings, duration_s: float) -> None:
        self.settings, self.duration_s = settings, duration_s
        self.now = 0.0
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.coming: list[Job] = []
        self.idle: list[int] = []  # on the GPU without a running request, least recently used first
        self.uses = [0] * len(settings.ranks)
        self.tags: dict[int, int] = {}
        self.tag = 0
        self.link: list[int] = []  # adapters that are being loaded, in order
        self.load_end_s = math.inf
        self.loads = self.unawaited = self.aborted = self.most_used = self.steps = 0
        self.since = 0
        self.arrivals = self.admissions = 1.0
        self.left = 0

    # ---- memory
    def _active(self) -> set[int]:
        return {job.adapter for job in self.running}

    def _cells(self, adapters: set[int]) -> int:
        return sum(self.settings.adapter_cells[a] for a in adapters)

    def used(self) -> int:
        """Cells in use."""
        return sum(job.held for job in self.running) + self._cells(self._active() | set(self.idle) | set(self.link))

    def _make_room(self, cells: int, spare: int = -1, slots: int = 0) -> None:
        while (
            self.used() + cells > self.settings.cells
            or len(self._active() | set(self.idle) | set(self.link)) + slots > self.settings.slots
        ):
            wanted = {job.adapter for job in self.waiting} if self.settings.loading == "async" else set()
            idle = [a for a in self.idle if a != spare]
            uses = (lambda a: self.uses[a]) if self.settings.rule == "lfu" else (lambda a: 0)
            self.idle.remove(min(idle, key=lambda a: (a in wanted, uses(a))))

    def _tidy(self, tag: int) -> None:
        if self.settings.rule in ("drop", "none"):
            wanted = {job.adapter for job in self.waiting} if self.settings.loading == "async" else set()
            self.idle = [a for a in self.idle if a in wanted or (tag > 0 and self.tags.get(a) == tag)]

    # ---- loads beside the work
    def _fetch(self, a: int) -> bool:
        cells = self.settings.adapter_cells[a]
        if peak(self.running) + self._cells(self._active() | set(self.link)) + cells >= self.settings.cells:
            return False
        occupied = len(self._active() | set(self.link)) + 1
        if occupied > self.settings.slots:
            return False
        self._make_room(cells, slots=1)
        self.loads += 1
        if not self.link:
            self.load_end_s = self.now + self.settings.load_ms(a) * 1e-3
        self.link.append(a)
        return True

    def _finish_loads(self, until_s: float) -> None:
        while self.load_end_s <= until_s:
            self.idle.append(self.link.pop(0))
            following = self.settings.load_ms(self.link[0]) * 1e-3 if self.link else math.inf
            self.load_end_s += following

    def _arrive(self, until_s: float) -> None:
        while self.coming and self.coming[0].sent_s <= until_s:
            job = self.coming.pop(0)
            self.waiting.append(job)
            here = self._active() | set(self.idle) | set(self.link)
            if self.settings.loading == "async" and job.adapter not in here:
                self._fetch(job.adapter)

    # ---- admission
    def _try(self, job: Job, new: list[Job]) -> str:
        settings, a = self.settings, job.adapter
        if settings.loading == "async" and a not in self._active() and a not in self.idle:
            return "passed over" if a in self.link or self._fetch(a) else "refused"
        adapters = self._active() | {a}
        if (
            len(self.running) + 1 > settings.running_max_req_size
            or sum(each.prompt for each in new) + job.prompt > settings.batch_max_tokens
            or len(adapters) > settings.slots
            or peak([*self.running, job]) >= settings.cells - self._cells(adapters | set(self.link))
        ):
            return "refused"
        self.waiting.remove(job)
        return "admitted"

    def _look(self) -> bool:
        """Early abort, before the queue is walked; whether the newest are served first."""
        if self.settings.abort_after_s == math.inf:
            return False
        self.arrivals = 0.7 * (len(self.waiting) - self.left) + (1.0 - 0.7) * self.arrivals
        for job in list(self.waiting):
            if self.now - job.sent_s + 0.5 > self.settings.abort_after_s:
                self.waiting.remove(job)
                job.aborted = True
                self.aborted += 1
        return self.arrivals >= self.admissions

    def _join(self, job: Job, loaded: set[int]) -> float:
        """The request joins the batch; the time of the load that it needs."""
        a, ms = job.adapter, 0.0
        if a in self.idle:
            self.idle.remove(a)
        elif a not in self._active() or self.settings.rule == "none":
            if a not in self._active():
                self._make_room(self.settings.adapter_cells[a], slots=1)
                loaded.add(a)
            self.loads += 1
            ms = self.settings.load_ms(a)
        self.uses[a] += 1
        self.running.append(job)
        self._make_room(0)
        return ms

    def _admit(self) -> tuple[list[Job], list[float], set[int]]:
        """New requests, the time of the load of each, and the adapters that had to be loaded."""
        new: list[Job] = []
        loaded: set[int] = set()
        loads: list[float] = []
        newest_first = self._look()
        clustered = len(self._active()) >= self.settings.batch_num_adapters
        for only_batch in (True, False) if clustered else (False,):
            for job in self.waiting[::-1] if newest_first else list(self.waiting):
                if only_batch and job.adapter not in self._active():
                    continue
                outcome = self._try(job, new)
                if outcome == "refused":
                    break
                if outcome == "admitted":
                    loads.append(self._join(job, loaded))
                    new.append(job)
        if new:
            self.admissions = 0.7 * len(new) + (1.0 - 0.7) * self.admissions
        self.left = len(self.waiting)
        return new, loads, loaded

    def _prefetch(self) -> None:
        self.tag += 1
        tokens = 0
        for job in self.waiting:
            tokens += job.prompt
            a = job.adapter
            here = self._active() | set(self.idle)
            full = self.used() + self.settings.adapter_cells[a] > self.settings.cells
            full = full or len(here) >= self.settings.slots
            if tokens > self.settings.batch_max_tokens or (a not in here and full):
                return
            if a not in here:
                self.idle.append(a)
                self.loads += 1
                self.unawaited += 1
            self.tags[a] = self.tag

    # ---- the loop
    def run(self, jobs: Sequence[Job]) -> NaiveLightLlm:
        """Serve these, in order of arrival."""
        self.coming = list(jobs)
        blocked = False
        while True:
            if blocked or not (self.running or self.waiting):
                soonest = min(
                    self.coming[0].sent_s if self.coming else math.inf, self.load_end_s if self.waiting else math.inf
                )
                if soonest >= self.duration_s:
                    break
                self.now = max(self.now, soonest)
            if self.now >= self.duration_s:
                break
            self._finish_loads(self.now)
            self._arrive(self.now)
            blocked = False
            if not (self.running or self.waiting):
                continue
            blocked = not self._step()
        return self

    def _step(self) -> bool:
        new: list[Job] = []
        if self.waiting and (not self.running or self.since >= self.settings.max_wait_tokens):
            new, loads, loaded = self._admit()
        if new:
            self.since = 0
            self._prefill(new, loads, loaded)
        elif not self.running:
            return not self.waiting
        else:
            wait = self.settings.max_wait_tokens
            looks = (wait // 2, wait - 3)
            if self.settings.loading == "prefetch" and self.since < wait and self.since in looks:
                self._prefetch()
            self._decode()
            self.since = min(self.since + 1, wait)
        return True

    def _assisted(self, new: list[Job], loads: list[float], loaded: set[int], ms: float) -> float:
        """CaraServe's prefill, load by load: GPU and CPU work on the same layers until the adapters are there."""
        settings, left, now_ms = self.settings, 1.0, 0.0
        for i, load_ms in enumerate(loads):
            on_cpu = [job for job in new[i:] if job.adapter in loaded]
            needed = [math.ceil(job.prompt / settings.core_tokens) for job in on_cpu]
            parts = [
                math.ceil(job.prompt / n) * settings.token_rank_ms * settings.ranks[job.adapter]
                for job, n in zip(on_cpu, needed, strict=True)
            ]
            cpu_ms = math.ceil(sum(needed) / settings.cores) * max(parts, default=0.0)
            left -= load_ms / max(ms, cpu_ms)
            now_ms += load_ms
        return now_ms + max(left, 0.0) * ms + settings.sync_ms

    def _prefill(self, new: list[Job], loads: list[float], loaded: set[int]) -> None:
        settings = self.settings
        tokens = sum(job.prompt for job in new)
        ms = settings.law(0, tokens, [settings.ranks[job.adapter] for job in new], [job.adapter for job in new], 0)
        if settings.loading == "cpu-assist" and loaded:
            total = self._assisted(new, loads, loaded, ms)
        else:
            total = ms + sum(loads)
        self._spend(total)
        if self.now <= self.duration_s:
            for job in new:
                job.generated = 1
                job.first_s = self.now
            self._leave()

    def _decode(self) -> None:
        settings, batch = self.settings, self.running
        context = sum(job.held for job in batch)
        for job in batch:
            job.generated += 1
        self._make_room(0)
        ranks = [settings.ranks[job.adapter] for job in batch]
        self._spend(settings.law(len(batch), 0, ranks, [job.adapter for job in batch], context))
        if self.now <= self.duration_s:
            self._leave()

    def _spend(self, ms: float) -> None:
        self.most_used = max(self.most_used, self.used())
        self.now += max(ms * 1e-3, MIN_STEP_S)
        self.steps += 1

    def _leave(self) -> None:
        done = [job for job in self.running if job.generated >= job.output]
        # The kernel lets them go by the order of its batch: last admitted first among those that end together.
        for job in sorted(done, key=lambda job: self.running.index(job), reverse=True):
            job.finish_s = self.now
            self.running.remove(job)
            if job.adapter not in self._active():
                self.idle.append(job.adapter)
        if done:
            self._tidy(self.tag if self.running else 0)
