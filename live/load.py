"""The requests of the load generator, and its process, which runs while the server is watched."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from packer.arrays import IntArray
from packer.arrival import RequestTrace
from packer.errors import LiveError, MissingDependencyError
from packer.live.results import LoadResult, read_result

STOPPING = (signal.SIGTERM, signal.SIGINT)  # Signals that end a run early.
KEY = "PACKER_AUTHORIZATION"  # Environment variable of the client's process with the server's authorization header.
START_GRACE_S = 60.0  # Time for the client to start and to write its result, beyond the run itself.
WRITE_GRACE_S = 4.0  # Time for the client to write its result when the run is ended early; a command ends within 10 s.
POLL_S = 0.2


@dataclass(frozen=True)
class LoadJob:
    """The requests of a run, and when it ends.

    `url`: URL of the server, without a path and without a key.
    `models`: model name in the request, for each adapter index of the trace.
    `requests`: times, adapters and lengths of the requests.
    `duration_s`: end of the run; unfinished requests are dropped.
    `drain_s`: seconds to wait after `duration_s` for unfinished requests; the run's duration grows accordingly.
    `token_ids`: prompts are random token ids in [low, high[; blocks with equal ids have equal tokens. Turns of a
    session repeat the earlier answers of the server (`Said`).
    `stall_s`: if nothing comes for this time while requests are outstanding, the server hangs and the run ends.
    `failures_to_stop`: the run ends after this number of failed requests in a row.
    `metrics_interval_s`: time between scrapes of /metrics; 0: only at the start and the end.
    `cores`: CPU cores to run on; empty means any.
    """

    url: str
    models: tuple[str, ...]
    requests: RequestTrace
    duration_s: float
    drain_s: float = 0.0
    token_ids: tuple[int, int] = (1000, 9000)
    seed: int = 0
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
                here = prompt[place * blocks.tokens :][: blocks.tokens]  # equal ids get equal tokens
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
    """Request bodies and answers of a run. Bodies are serialised before the run, so that sending costs little. Those of
    later turns are serialised when sent, because they begin with the answered part of their session."""

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
        """Return the JSON of request `k`, which is sent now."""
        if self._sessions is None:
            return self._bodies[k]
        prompt, before = self._prompts[k], self._so_far.get(self._sessions[k])
        if before is None:
            return self._bodies[k]
        count = min(len(before), len(prompt))
        prompt[:count] = before[:count]
        return body_of(self._job, k, prompt)

    def hear(self, k: int, line: bytes) -> None:
        """Record an event of the answer to request `k`, with its new tokens if the server reports their ids."""
        if self._sessions is not None:
            for choice in json.loads(line[5:]).get("choices", ()):
                self._answers.setdefault(k, []).extend(choice.get("token_ids") or ())

    def end(self, k: int) -> None:
        """Record that request `k` is answered."""
        answer = self._answers.pop(k, None)
        # The next prompt can only repeat an answer of which all tokens were reported.
        if self._sessions and answer and len(answer) == self._job.requests.output_tokens[k]:
            self._so_far[self._sessions[k]] = np.concatenate([self._prompts[k], answer])


def import_aiohttp() -> Any:
    """Import the HTTP client; raises an error with the install command if it is missing."""
    try:
        import aiohttp
    except ImportError:
        raise MissingDependencyError("Real servers need aiohttp: pip install 'adapter-packer[live]'.") from None
    return aiohttp


def run_job(
    job: LoadJob, folder: Path, *, alive: Callable[[], bool] = lambda: True,
    stop: Callable[[], bool] = lambda: False, progress: Callable[[float], None] = lambda _elapsed_s: None,
    authorization: str = "",
) -> LoadResult:  # fmt: skip
    """Send a job's requests from another process; `load.npz` and `client.log` stay in `folder`.

    If the server cuts a run short, the result says so in `ended`. On KeyboardInterrupt the client is stopped,
    its result so far is written, and the interrupt is raised again.

    `alive`, `stop`: called five times a second; a server that died ends the run, `stop` ends it as interrupted.
    `progress`: called with the seconds since the client was started.
    `authorization`: the server's authorization header; it is written to no file.
    Raises `LiveError`: the client itself failed.
    """
    import_aiohttp()
    folder.mkdir(parents=True, exist_ok=True)
    result_path, log_path = folder / "load.npz", folder / "client.log"
    result_path.unlink(missing_ok=True)
    limit = job.duration_s + job.drain_s + START_GRACE_S
    client: subprocess.Popen[bytes] | None = None
    died = False
    try:
        with _held_back():
            client = _started(job, result_path, log_path, authorization)
        start = time.monotonic()
        while client.poll() is None and time.monotonic() - start < limit:
            if not died and not alive():
                died = True
                # The client then writes its result: the loop goes on until it has ended.
                client.send_signal(signal.SIGTERM)
            if stop():
                break
            progress(time.monotonic() - start)
            time.sleep(POLL_S)
    finally:
        if client is not None:
            _finish(client)
    if not result_path.exists():
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-5:])
        raise LiveError(f"The load generator left no result. Its log ends with:\n{tail}")
    result = read_result(result_path)
    return replace(result, ended="the server died") if died else result


@contextmanager
def _held_back() -> Iterator[None]:
    """Delay signals that end a run to the end of the block, when the caller knows the client that it must stop. The
    client inherits the mask. In this process another thread may still get a signal, so handlers record it."""
    seen: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOPPING if main}
    for number in handlers:
        signal.signal(number, lambda number, _frame: seen.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in seen:
            signal.raise_signal(late)


def _started(job: LoadJob, result: Path, log_path: Path, authorization: str) -> subprocess.Popen[bytes]:
    """Start the client's process. It inherits a mask that blocks signals until it can handle them, so that a
    signal during its imports also ends the run with a result."""
    with log_path.open("wb") as log, tempfile.TemporaryFile() as asked:
        pickle.dump(job, asked)
        asked.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", "packer.live.client", str(result)], stdin=asked, stdout=log, stderr=log,
            start_new_session=True, env={**os.environ, KEY: authorization},
        )  # fmt: skip


def _finish(client: subprocess.Popen[bytes]) -> None:
    """Let the client write its result, then make sure that its process has ended."""
    if client.poll() is None:
        client.send_signal(signal.SIGTERM)
    try:
        client.wait(WRITE_GRACE_S)
    except subprocess.TimeoutExpired:
        client.kill()
        client.wait()
