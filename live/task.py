"""Measurements on a real server: the requests, the server, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from packer.arrival import RequestTrace
from packer.live.metrics import MetricsSummary
from packer.live.results import LoadResult
from packer.live.server import Failure, LiveServer, ServerOptions
from packer.live.step_log import Steps
from packer.twin.arrivals import draw_requests
from packer.workload import Workload

BASE = "base"  # Name of the base model on servers started here; adapters of rank 0 in a workload are requests to it.


@dataclass(frozen=True)
class Task:
    """One load on a running server. `key`: name of its folder; `drain_s`: time to wait for the last answers."""

    key: str
    workload: Workload
    duration_s: float
    seed: int = 0
    drain_s: float = 0.0

    def requests(self, max_model_len: int) -> RequestTrace:
        """Draw the requests: prompts have at most max_model_len − 1 tokens, outputs at most the rest."""
        drawn = draw_requests(self.workload, self.duration_s, self.seed)
        prompt = np.minimum(drawn.input_tokens, max_model_len - 1)
        output = np.minimum(drawn.output_tokens, max_model_len - prompt)
        blocks = drawn.blocks
        cut = prompt + output < drawn.input_tokens + drawn.output_tokens
        if blocks is not None and np.any(cut):
            blocks = blocks.cut(np.where(cut, prompt // blocks.tokens, blocks.counts))
        time_s, adapter = drawn.time_s, drawn.adapter
        return RequestTrace(time_s, adapter, prompt, output, blocks=blocks, sessions=drawn.sessions)

    def replayed(self, max_model_len: int) -> Workload:
        """The workload with exactly the requests that were sent, for the twin."""
        return self.workload.replaying(self.requests(max_model_len))


@dataclass(frozen=True)
class Session:
    """One server and its loads, in order. `key`: name of its folder."""

    key: str
    options: ServerOptions
    tasks: tuple[Task, ...]


@dataclass(frozen=True, eq=False)
class Outcome:
    """Outcome of a task: a failure to start, or a load (perhaps cut short), metrics and steps. `reused`: measured by an
    earlier campaign in the same folder."""

    session: Session
    task: Task
    failure: Failure | None = None
    load: LoadResult | None = None
    metrics: MetricsSummary | None = None
    steps: Steps | None = None
    kv_cache_tokens: int | None = None
    reused: bool = False

    @property
    def memory_error(self) -> bool:
        """Whether the server did not start for lack of memory."""
        return self.failure is not None and self.failure.kind == "memory_error"

    @property
    def interrupted(self) -> bool:
        """Whether the task was stopped while the server started, or its load was cut short."""
        starting = self.failure is not None and self.failure.kind == "interrupted"
        return starting or (self.load is not None and not self.load.complete)

    @property
    def complete(self) -> bool:
        """Whether the load ran to its end on a server that served it."""
        return self.load is not None and self.load.fault is None and self.failure is None


@dataclass(frozen=True)
class Endpoint:
    """Where requests go: a server started here, or one that was running already (`server` None). `authorization`: the
    server's authorization header."""

    url: str
    base: str = BASE
    authorization: str = field(default="", repr=False)
    server: LiveServer | None = None

    @property
    def alive(self) -> bool:
        """Whether the server runs; always True for a server that packer did not start."""
        return self.server is None or self.server.alive
