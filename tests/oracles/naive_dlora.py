"""The slow oracle of dLoRA's engine: its artifact's scheduler with lists and dictionaries.

Follows github.com/LLMServe/dLoRA-artifact, vllm/core/scheduler.py: `_strict_fcfs_schedule`, `_credit_schedule`,
`_adjust_credit`, `_adjust_merge_threshold`, `_prepare_scheduleroutputs`. Like the engine it swaps out the last to
arrive first, and takes the first request by arrival where a step could run nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_STEP_S = 5e-5
LOAD = Callable[[int], float]


@dataclass(frozen=True)
class Settings:
    """A server. `law(decodes, prefill_tokens, adapters of the batch's requests, context, waiting, merged)` in ms."""

    blocks: int
    block_size: int
    models: int
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_capacity: int
    credits: float
    merge_ms: float
    unmerge_ms: float
    switch_ms: float
    swap_ms: float
    law: Callable[[int, int, list[int], int, int, bool], float]
    load_ms: LOAD


@dataclass(eq=False)
class Job:
    """One request and where it stands."""

    number: int
    sent_s: float
    adapter: int
    prompt: int
    output: int
    generated: int = 0
    status: str = "waiting"
    blocks: int = 0
    first_s: float = math.nan
    finish_s: float = math.nan

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self.prompt + self.generated


class NaiveDLora:
    """One server; `run` simulates it."""

    def __init__(self, settings: Settings, duration_s: float) -> None:
        self.s, self.duration_s = settings, duration_s
        self.now, self.queue = 0.0, list[Job]()
        self.credit: dict[int, float] = {}  # less credits × (models - 1); adapters in the order in which they came
        self.previous: list[int] = []
        self.merged: int | None = None
        self.right, self.left = 1.0, settings.merge_ms / settings.unmerge_ms
        self.num_iters = self.merge_batch_cnt = self.unmerge_batch_cnt = self.virtual_switch_cnt = 0
        self.max_model: int | None = None
        self.in_gpu: list[int] = []
        self.loads = self.swaps = self.merges = self.credited = 0

    def _of(self, adapter: int) -> list[Job]:
        return [job for job in self.queue if job.adapter == adapter]

    def _free(self) -> int:
        return self.s.blocks - sum(job.blocks for job in self.queue if job.status == "ready")

    def _adjust_threshold(self) -> None:
        if self.num_iters == 0:
            return
        t_merge, t_unmerge = self.s.merge_ms * self.num_iters, self.s.unmerge_ms * self.num_iters
        if self.merged is not None:
            t_merge += self.s.switch_ms
        else:
            t_unmerge += self.s.switch_ms
            t_merge += self.s.switch_ms * self.virtual_switch_cnt
        merge, unmerge = self.merge_batch_cnt / t_merge, self.unmerge_batch_cnt / t_unmerge
        if self.merged is not None:
            if merge > unmerge and self.right - 0.05 > self.left:
                self.right -= 0.05
            elif merge < unmerge:
                self.right *= 1.1
        elif unmerge > merge and self.left + 0.05 < self.right:
            self.left += 0.05
        elif unmerge < merge:
            self.left /= 1.1
        self.merge_batch_cnt = self.unmerge_batch_cnt = self.virtual_switch_cnt = 0
        self.max_model = None

    def _adjust_credit(self, fcfs: list[Job], scheduled: list[Job], cost: float) -> None:
        scheduled = sorted(scheduled, key=lambda job: job in fcfs, reverse=True)
        if len(fcfs) == len(scheduled):
            for job, other in zip(scheduled, fcfs, strict=True):
                if job not in fcfs:
                    self.credit[job.adapter] -= cost
                    self.credit[other.adapter] += cost
        else:
            for job in fcfs:
                if job not in scheduled:
                    self.credit[scheduled[0].adapter] -= cost / 2
                    self.credit[job.adapter] += cost / 2

    def _schedule(self) -> tuple[list[Job], int | None]:
        """The requests to run, in order, and the adapter to merge."""
        most, fcfs = self.s.max_num_seqs, self.queue[: self.s.max_num_seqs]
        if self.s.policy == "fcfs":
            models = list(dict.fromkeys(job.adapter for job in self.queue))[: self.s.gpu_capacity]
            return list(itertools.takewhile(lambda job: job.adapter in models, self.queue)), None
        if self.s.policy == "merge":
            return self._of(self.queue[0].adapter), self.queue[0].adapter
        by_credit: list[Job] = []
        chosen: list[int] = []
        for a in sorted(self.credit, key=lambda a: -self.credit[a]):
            if self.credit[a] < self.s.credits / 2:
                break
            if self.credit[a] >= self.s.credits or a in self.previous:
                by_credit += self._of(a)[: most - len(by_credit)]
                chosen.append(a)
                if len(by_credit) == most:
                    break
        self.previous = chosen
        if by_credit:
            self.credited += 1
            scheduled = by_credit + [job for job in fcfs if job not in by_credit][: most - len(by_credit)]
            self._adjust_credit(fcfs, scheduled, 1.0 / most)
            return scheduled, None
        ratio = self.s.merge_ms / self.s.unmerge_ms
        open_ = {a: self._of(a) for a in self.credit if self.credit[a] >= -self.s.credits * (self.s.models - 1)}
        max_model = max(open_, key=lambda a: len(open_[a]), default=None)
        open_[max_model] = open_.get(max_model, [])
        if self.merged in open_ and len(open_[self.merged]) >= self.left * len(fcfs):
            self.num_iters += 1
            merge, scheduled = self.merged, open_[self.merged]
            self._adjust_credit(fcfs, scheduled, 1.0 / (ratio * most))
        elif len(open_[max_model]) >= self.right * len(fcfs):
            self._adjust_threshold()
            self.num_iters = 1
            merge, scheduled = max_model, open_[max_model][:most]
            self._adjust_credit(fcfs, scheduled, 1.0 / (ratio * most))
        else:
            if self.max_model != max_model:
                self.virtual_switch_cnt += 1
                self.max_model = max_model
            merge, scheduled = None, fcfs
        counted = len(open_[max_model if merge is None else merge])
        self.merge_batch_cnt += min(counted, most)
        self.unmerge_batch_cnt += len(fcfs)
        return scheduled, merge

    def _swap_out(self, job: Job) -> float:
        job.status = "swapped"
        self.swaps += 1
        return job.blocks * self.s.swap_ms

    def _run_in(self, job: Job, batch: list[Job]) -> float:
        """The request gets its blocks and runs; time to swap it in, ms."""
        ms = job.blocks * self.s.swap_ms if job.status == "swapped" else 0.0
        job.status, job.blocks = "ready", -(-job.tokens // self.s.block_size)
        batch.append(job)
        return ms

    def _prepare(self, scheduled: list[Job]) -> tuple[list[Job], list[Job], float]:
        """The batch, those of it that prefill, and the time for swapping, ms."""
        batch, prefills = list[Job](), list[Job]()
        swap_ms, swapped_out = 0.0, False
        for job in scheduled:
            if len(batch) == self.s.max_num_seqs:
                break
            needed = -(-job.tokens // self.s.block_size)
            if job.status == "ready":
                others = [each for each in self.queue if each.status == "ready" and each is not job]
                others = [each for each in others if each not in batch]
                while self._free() < 1:
                    victim = others.pop() if others else job
                    swap_ms += self._swap_out(victim)
                    swapped_out = True
                    if victim is job:
                        break
                if job.status == "ready":
                    swap_ms += self._run_in(job, batch)
            elif job.status == "swapped":
                if not swapped_out and self._free() - job.blocks - 1 >= int(0.01 * self.s.blocks):
                    swap_ms += self._run_in(job, batch)
            else:
                tokens = sum(each.tokens for each in prefills) + len(batch) - len(prefills)
                fits = not batch or tokens + job.tokens <= self.s.max_num_batched_tokens
                if fits and self._free() - needed >= int(0.01 * self.s.blocks):
                    prefills.append(job)
                    self._run_in(job, batch)
        return batch, prefills, swap_ms

    def _forced(self) -> tuple[list[Job], list[Job], float]:
        job, ms = self.queue[0], 0.0
        needed = {"ready": 1, "swapped": job.blocks + 1}.get(job.status, -(-job.tokens // self.s.block_size))
        others = [each for each in self.queue if each.status == "ready" and each is not job]
        while self._free() < needed and others:
            ms += self._swap_out(others.pop())
        prefills = [job] if job.status == "waiting" else []
        batch: list[Job] = []
        ms += self._run_in(job, batch)
        return batch, prefills, ms

    def _bring(self, adapters: list[int]) -> float:
        ms = 0.0
        for a in dict.fromkeys(adapters):
            if a not in self.in_gpu:
                if len(self.in_gpu) >= self.s.gpu_capacity:
                    order = list(self.credit)
                    idle = [x for x in self.in_gpu if x not in adapters]
                    self.in_gpu.remove(min(idle, key=lambda x: (len(self._of(x)), order.index(x))))
                self.in_gpu.append(a)
                self.loads += 1
                ms += self.s.load_ms(a)
        return ms

    def _step(self) -> None:
        scheduled, merge = self._schedule()
        if merge is None:
            if self.merged is not None:
                self._adjust_threshold()
                self.num_iters = 1
            else:
                self.num_iters += 1
            models: list[int] = []
            kept = []
            for job in scheduled:
                if job.adapter not in models and len(models) < self.s.gpu_capacity:
                    models.append(job.adapter)
                if job.adapter in models:
                    kept.append(job)
            scheduled = kept
        batch, prefills, extra_ms = self._prepare(scheduled)
        if not batch:
            found, prefills, more_ms = self._forced()
            batch, extra_ms, merge = found, extra_ms + more_ms, None
        if merge != self.merged:
            extra_ms += self.s.switch_ms
            self.merges += merge is not None
        self.merged = merge
        adapters = [job.adapter for job in batch]
        load_ms = self._bring(adapters)
        decodes = [job for job in batch if job not in prefills]
        ms = self.s.law(
            len(decodes), sum(job.tokens for job in prefills), adapters, sum(job.tokens for job in decodes),
            sum(job.status != "ready" for job in self.queue), merge is not None,
        )  # fmt: skip
        self.now += max((ms + load_ms + extra_ms) * 1e-3, MIN_STEP_S)
        if self.now > self.duration_s:
            return
        for job in batch:
            if job.generated == 0:
                job.first_s = self.now
            job.generated += 1
            if job.generated == job.output:
                job.finish_s = self.now
                self.queue.remove(job)

    def run(self, jobs: Sequence[Job]) -> NaiveDLora:
        """Serve these, in order of arrival."""
        coming = list(jobs)
        while True:
            if not self.queue:
                if not coming:
                    break
                self.now = max(self.now, coming[0].sent_s)
            if self.now >= self.duration_s:
                break
            while coming and coming[0].sent_s <= self.now:
                self.queue.append(coming.pop(0))
                self.credit.setdefault(self.queue[-1].adapter, 0.0)
            self._step()
        return self
