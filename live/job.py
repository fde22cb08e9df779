"""What the load generator sends."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from packer.arrays import IntArray
from packer.arrival import RequestTrace


@dataclass(frozen=True)
class LoadJob:
    """What to send.

    `url`: of the server, without a path and without a key.
    `models`: model name in the request, for each adapter index of the trace.
    `requests`: when, which adapter, how long.
    `duration_s`: the run ends then, and unfinished requests are dropped.
    `drain_s`: seconds to wait after `duration_s` for unfinished requests; the run's duration grows accordingly.
    `token_ids`: prompts are random token ids in [low, high[; those of blocks with one id are the same. Turns of a
    session repeat the answers that the server gave before them (`Said`).
    `max_outstanding`: requests beyond it are refused by the client.
    `stall_s`: nothing came for so long while requests were outstanding: the server hangs, the run ends.
    `failures_to_stop`: so many failed requests in a row, none completed in between: the run ends.
    `metrics_interval_s`: time between looks at /metrics; 0 looks at the start and the end only.
    `cores`: CPU cores to run on; empty means any.
    """

    url: str
    models: tuple[str, ...]
    requests: RequestTrace
    duration_s: float
    drain_s: float = 0.0
    token_ids: tuple[int, int] = (1000, 9000)
    seed: int = 0
    max_outstanding: int = 1_000_000
    stall_s: float = 60.0
    failures_to_stop: int = 50
    metrics_interval_s: float = 1.0
    cores: tuple[int, ...] = ()


def prompts_of(job: LoadJob) -> list[IntArray]:
    """Token ids of every prompt."""
    rng = np.random.default_rng(job.seed)
    low, high = job.token_ids
    trace = job.requests
    prompts = []
    for k, n_in in enumerate(trace.input_tokens.tolist()):
        prompt = rng.integers(low, high, n_in)
        if (blocks := trace.blocks) is not None:
            for place, i in enumerate(blocks.ids[blocks.starts[k] : blocks.starts[k + 1]].tolist()):
                here = prompt[place * blocks.tokens :][: blocks.tokens]  # the same wherever this id is
                here[:] = np.random.default_rng((job.seed, i)).integers(low, high, blocks.tokens)[: len(here)]
        prompts.append(prompt)
    return prompts


def body_of(job: LoadJob, k: int, prompt: IntArray) -> bytes:
    """The JSON of a request."""
    body = {
        "model": job.models[int(job.requests.adapter[k])],
        "prompt": prompt.tolist(),
        "max_tokens": int(job.requests.output_tokens[k]),
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if job.requests.sessions is not None:
        body["return_token_ids"] = True
    return json.dumps(body, separators=(",", ":")).encode()


class Said:
    """What is sent and answered: JSON made before the run, so that sending costs little, and that of later turns when
    they are sent: they begin with what was said in their session, as far as it has been answered.
    """

    def __init__(self, job: LoadJob) -> None:
        sessions = job.requests.sessions
        self._job, self._sessions = job, None if sessions is None else sessions.tolist()
        self._prompts = prompts_of(job)
        self._bodies = [body_of(job, k, prompt) for k, prompt in enumerate(self._prompts)]
        if self._sessions is None:
            self._prompts = []
        self._so_far: dict[int, IntArray] = {}
        self._answers: dict[int, list[int]] = {}

    def body(self, k: int) -> bytes:
        """The JSON of request `k`, which is sent now."""
        if self._sessions is None:
            return self._bodies[k]
        prompt, before = self._prompts[k], self._so_far.get(self._sessions[k])
        if before is None:
            return self._bodies[k]
        count = min(len(before), len(prompt))
        prompt[:count] = before[:count]
        return body_of(self._job, k, prompt)

    def hear(self, k: int, line: bytes) -> None:
        """An event of the answer to request `k` came, with its new tokens if the server tells them."""
        if self._sessions is not None:
            for choice in json.loads(line[5:]).get("choices", ()):
                self._answers.setdefault(k, []).extend(choice.get("token_ids") or ())

    def end(self, k: int) -> None:
        """Request `k` is answered."""
        answer = self._answers.pop(k, None)
        if self._sessions and answer and len(answer) == self._job.requests.output_tokens[k]:
            self._so_far[self._sessions[k]] = np.concatenate([self._prompts[k], answer])
