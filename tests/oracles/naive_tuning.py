"""The slow oracle of training beside inference, from the mechanisms as USENIX ATC 2025 ("Resource Multiplexing in
Tuning and Serving Large Language Models") describes them, on top of the slow oracle of the engine.

Work is a list of pieces that are done one after the other; the planner is an exhaustive search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from naive_twin import NaiveTwin, Server

TOLERANCE = 1e-9


def best_plan(
    layers: int, left: int, decode_ms: float, beside_ms: float, tasklet_ms: float, slo_ms: float
) -> tuple[int, int]:
    """The largest N_p with its smallest N_d, by trying every pair."""
    best = (0, 0)
    for beside in range(layers + 1):
        if beside * beside_ms + (layers - beside) * decode_ms > slo_ms * (1 + TOLERANCE):
            continue
        for tasklets in range(left + 1):
            fits = tasklets * tasklet_ms <= beside * beside_ms * (1 + TOLERANCE)
            if fits and tasklets > best[1]:
                best = (beside, tasklets)
    return best


@dataclass
class Job:
    """What is trained and how; `policy` by name, `p`: its parameters."""

    policy: str
    p: dict[str, float]
    lengths: Sequence[int]
    batch: int
    samples: float
    layers: int
    weights_ms: float
    token_ms: float
    backward_ratio: float
    done: int = 0
    tokens_done: int = 0
    steps_beside: int = 0
    tokens: int = 0
    pieces: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._source = cycle(self.lengths)
        self._begin()

    def _pass_ms(self, kind: str, tokens: float) -> float:
        return (self.weights_ms + tokens * self.token_ms) * (1.0 if kind == "forward" else self.backward_ratio)

    def _begin(self) -> None:
        """Pieces of the next batch, which ends with the last sample: (pass, ms with the GPU to itself)."""
        self.samples_now = int(min(self.batch, self.samples - self.done))
        self.tokens = sum(next(self._source) for _ in range(self.samples_now))
        both = ("forward", "backward")
        if self.policy == "llmstation":
            self.pieces = [
                (kind, self._pass_ms(kind, self.tokens) / self.layers) for kind in both for _ in range(self.layers)
            ]
        elif self.policy == "chunked":
            size = int(self.p["chunk_tokens"])
            chunks = [min(size, self.tokens - at) for at in range(0, self.tokens, size)]
            self.pieces = [(kind, self._pass_ms(kind, chunk)) for kind in both for chunk in chunks]
        else:
            self.pieces = [("both", sum(self._pass_ms(kind, self.tokens) for kind in both))]

    @property
    def has_work(self) -> bool:
        """Whether samples are left."""
        return self.done < self.samples

    def finish(self, pieces: int) -> None:
        """The next pieces are done."""
        for _ in range(pieces):
            self.pieces.pop(0)
            if not self.pieces:
                self.done += self.samples_now
                self.tokens_done += self.tokens
                self._begin()

    def progress(self, ms: float) -> None:
        """So much work, as with the GPU to itself, is done (spatial sharing: pieces can be divided)."""
        while self.has_work and ms > 0.0:
            kind, left = self.pieces[0]
            if left > ms:
                self.pieces[0] = (kind, left - ms)
                return
            ms -= left
            self.finish(1)


class NaiveTuning(NaiveTwin):
    """One server that trains a job."""

    def __init__(self, server: Server, duration_s: float, bin_s: float, job: Job) -> None:
        super().__init__(server, duration_s, bin_s)
        self.job = job
        self._after: list[Any] = []

    def run(self, times: Sequence[float], marks: Sequence[tuple[int, int, int]], *, marks_wait: bool) -> NaiveTuning:
        """Simulate; see `NaiveTwin.run`."""
        self.arrivals.extend(times)
        self.marks.extend(marks)
        self.marks_wait = marks_wait
        while True:
            if not self.running and not self.waiting:
                self._idle()
            self.now = min(self.now, self.duration_s)
            self._arrive(math.inf)
            if self.now >= self.duration_s:
                return self
            if self.running or self.waiting:
                self._one_step()

    def _idle(self) -> None:
        """Nothing to infer until the next request: train, and let the request wait for what has begun."""
        job = self.job
        arrival_s = self.arrivals[0] if self.arrivals else math.inf
        if job.policy == "spatial":
            end_s = min(arrival_s, self.duration_s)
            job.progress(max(0.0, end_s - self.now) * 1e3 * job.p["share"])
        else:
            while job.has_work:
                if self.now >= min(arrival_s + job.p.get("defer_ms", 0.0) * 1e-3, self.duration_s):
                    return
                self.now += job.pieces[0][1] * 1e-3
                if self.now <= self.duration_s:
                    job.finish(1)
        self.now = max(self.now, min(arrival_s, self.duration_s))

    def _step_ms(self, b: int, p: int, context: int) -> float:
        job = self.job
        alone = super()._step_ms(b, p, context)
        self._after = []
        if not job.has_work or job.policy == "temporal" or (p > 0 and job.policy != "spatial"):
            return alone
        if job.policy == "spatial":
            share = job.p["share"]
            decode = super()._step_ms(b, 0, context)
            ms = decode * (1.0 + job.p["interference_decode"] * share) + (alone - decode) / (1.0 - share)
            self._after = [lambda: job.progress(ms * share / (1.0 + job.p["interference_tuning"]))]
            return ms
        kind, piece_ms = job.pieces[0]
        if job.policy == "chunked":
            if alone + piece_ms > job.p["slo_decode_ms"]:
                return alone
            self._after = [lambda: job.finish(1)]
            return alone + piece_ms
        layers = job.layers
        left = sum(other == kind for other, _ in job.pieces)
        if kind == "forward":
            beside = tasklet = super()._step_ms(b, job.tokens, context) / layers
        else:
            beside = alone / layers * (1.0 + job.p["kappa_decode"])
            tasklet = piece_ms * (1.0 + job.p["kappa_tuning"]) * (1.0 + job.p["suspend_overhead"])
        n, tasklets = best_plan(layers, left, alone / layers, beside, tasklet, job.p["slo_decode_ms"])
        if tasklets == 0:
            return alone
        self._after = [lambda: job.finish(tasklets)]
        return alone + n * (beside - alone / layers)

    def _record(self, dt: float, load_ms: float, prefill_tokens: int, decodes: int, preempted: int) -> None:
        super()._record(dt, load_ms, prefill_tokens, decodes, preempted)
        if self._after and self.now + dt <= self.duration_s:
            self.job.steps_beside += 1
            self._after[0]()
