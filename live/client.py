"""An open-loop load generator for vLLM: requests are sent on schedule, however slow the answers are.

Runs in a process of its own, pinned to its own cores, so that neither packer nor the server slows it down:

    python -m packer.live.client RESULT.npz < JOB

SIGTERM or SIGINT end the run early; its results so far are written and marked as interrupted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import pickle
import resource
import signal
import sys
import time
from array import array
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import numpy as np

from packer.errors import shown
from packer.io.web import Address
from packer.lengths import MAX_TOKENS
from packer.live import results
from packer.live.load import KEY, STOPPING, LoadJob, Said, import_aiohttp
from packer.live.metrics import MAX_PAGE_BYTES, kept, thinned
from packer.live.results import LoadResult

ERROR_TEXT = 160  # Characters of a server's error message that are kept.
ERROR_BYTES, ERROR_S = 4096, 2.0  # Limits on reading a server's error message: bytes, and seconds.
SILENT_SHARE = 0.5  # The server hangs if no token came in this last share of a run, with requests outstanding.
KEEP_ALIVE_S = 4.0
"""Idle connections are closed after this time, before vLLM's front end closes them after 5 s (vllm/envs.py,
`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`): a request that is sent just then would fail."""
OPEN_MAX = 10_240  # Most open files that macOS allows for certain; it refuses its own hard limit (setrlimit(2)).
LOOK_LIMIT_S = 5.0  # Time limit of a scrape of /metrics.
EXTRA_CHUNKS = 16  # A stream with more chunks than requested tokens plus this number fails.
END_S = 5.0  # A stream that is still open this many seconds after its last token fails.


class _Run:
    """The state of one run: what happened to each request."""

    def __init__(self, job: LoadJob) -> None:
        n = len(job.requests)
        self.job = job
        self.sent = np.full(n, math.nan)
        self.first = np.full(n, math.nan)
        self.finish = np.full(n, math.nan)
        self.received = np.zeros(n, dtype=np.int64)
        self.state = np.full(n, results.NOT_SENT, dtype=np.int64)
        self.gaps = array("d")  # not lists: the garbage collector would scan them
        self.owners = array("q")
        self.errors: Counter[str] = Counter()
        self.metrics: list[tuple[float, str]] = []
        self.outstanding = 0
        self.failures_in_row = 0
        self.heard = 0.0
        self.ended = ""
        self.start = 0.0
        self.start_unix = 0.0
        self.said = Said(job)
        self.where = Address(job.url, os.environ.pop(KEY, ""))
        self.last = np.full(n, math.nan)

    def now(self) -> float:
        return time.monotonic() - self.start

    def end(self, why: str) -> None:
        self.ended = self.ended or why

    def result(self, duration_s: float) -> LoadResult:
        trace = self.job.requests
        return LoadResult(
            trace.time_s, trace.adapter, trace.input_tokens, trace.output_tokens, self.sent, self.first,
            self.finish, self.received, self.state, np.array(self.gaps, dtype=np.float64),
            np.array(self.owners, dtype=np.int64), duration_s, self.start, self.start_unix,
            dict(self.errors.most_common(20)), self.ended or "complete", tuple(self.metrics),
        )  # fmt: skip


async def run_load(job: LoadJob) -> LoadResult:
    """Send all requests on schedule and return the results; faults of the server never raise."""
    aiohttp = import_aiohttp()
    run = _Run(job)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def interrupt() -> None:
        run.end("interrupted")
        stop.set()

    for number in STOPPING:
        loop.add_signal_handler(number, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # blocked by run_job
    gc.collect()
    gc.freeze()  # the thousands of request bodies that exist now are not scanned in the run
    try:
        head = {"Accept-Encoding": "identity", **run.where.headers}
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=head, auto_decompress=False
        ) as session:
            await _unless(stop, _look(run, session))
            run.start, run.start_unix = time.monotonic(), time.time()
            # The page that was read just before the start counts as its beginning.
            run.metrics = [(0.0, text) for _t, text in run.metrics]
            duration = await _drive(run, session, stop)
            if run.ended != "interrupted":
                await _unless(stop, _look(run, session))
            return run.result(duration)
    finally:
        gc.unfreeze()
        for number in STOPPING:
            loop.remove_signal_handler(number)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await `work` until it is done or `stop` is set."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _drive(run: _Run, session: Any, stop: asyncio.Event) -> float:
    """Send, watch and drain; returns the run's duration."""
    job = run.job
    tasks: set[asyncio.Task[None]] = set()
    watchers = [asyncio.create_task(_watch(run, stop))]
    if job.metrics_interval_s > 0:
        watchers.append(asyncio.create_task(_scrape(run, session)))
    try:
        await _send_all(run, session, stop, tasks)
        await _sleep_until(run, job.duration_s, stop)
        duration = run.now() if run.ended else job.duration_s
        if job.drain_s > 0 and not run.ended and tasks:
            await asyncio.wait(tasks, timeout=job.drain_s)
            finished = run.finish[np.isfinite(run.finish)]
            duration = max(duration, float(finished.max(initial=0.0))) if not tasks else run.now()
        for i in np.flatnonzero((run.state == results.UNFINISHED) & (run.now() - run.last > END_S)).tolist():
            if run.received[i] >= run.job.requests.output_tokens[i]:
                _failed(run, i, "the answer does not end after its last token")
        silence_s = run.now() - run.heard
        if run.outstanding and silence_s > SILENT_SHARE * duration:
            run.end(f"the server hangs: {run.outstanding} requests outstanding, no token for {silence_s:.3g} s")
        return duration
    finally:
        for task in (*tasks, *watchers):
            task.cancel()
        await asyncio.gather(*tasks, *watchers, return_exceptions=True)


async def _send_all(run: _Run, session: Any, stop: asyncio.Event, tasks: set[asyncio.Task[None]]) -> None:
    for i, due in enumerate(run.job.requests.time_s.tolist()):
        if due >= run.job.duration_s:
            return
        await _sleep_until(run, due, stop)
        if run.ended:
            return
        run.outstanding += 1
        task = asyncio.create_task(_request(run, session, i))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if i % 8 == 7:
            await asyncio.sleep(0)  # lets answers be read even when behind schedule


async def _sleep_until(run: _Run, due: float, stop: asyncio.Event) -> None:
    """Sleep until a time of the schedule, or until the run is ended."""
    wait = due - run.now()
    if wait <= 0 or run.ended:
        return
    # So short a sleep need not end early, and `wait_for` would cost a task for each request.
    if wait < 0.05:
        await asyncio.sleep(wait)
        return
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), wait)


async def _request(run: _Run, session: Any, i: int) -> None:
    run.sent[i] = run.now()
    run.state[i] = results.UNFINISHED
    # Silence counts from the first outstanding request on; before, no answer was due.
    if run.outstanding == 1:
        run.heard = run.sent[i]
    headers = {"Content-Type": "application/json"}
    url = f"{run.job.url}/v1/completions"
    try:
        async with session.post(url, data=run.said.body(i), headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                text = await _text(response, ERROR_BYTES)
                _failed(run, i, run.where.said(response.status, text)[:ERROR_TEXT])
                return
            await _stream(run, response, i)
    except Exception as error:
        _failed(run, i, f"{type(error).__name__}: {run.where.masked(str(error))[:ERROR_TEXT]}")
    finally:
        run.outstanding -= 1


async def _text(response: Any, limit: int) -> str:
    """Return the text of an answer, as far as it arrives within `ERROR_S` and `limit` bytes."""
    data = bytearray()
    with suppress(TimeoutError):
        async with asyncio.timeout(ERROR_S):
            while len(data) < limit and (piece := await response.content.read(limit - len(data))):
                data += piece
    return data.decode(errors="replace")


async def _stream(run: _Run, response: Any, i: int) -> None:
    """Read one answer: server-sent events of one token each, or of several when the server lags behind."""
    last, chunks = math.nan, 0
    usage: Any = {}
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now, event = run.now(), line[5:].strip()
        if event == b"[DONE]":
            break
        if b'"choices":[]' in event or b'"choices": []' in event:  # the last event
            usage = json.loads(event).get("usage") or {}
            continue
        if event.startswith(b'{"error"') or b'"choices"' not in event:
            said = run.where.masked(event[:ERROR_BYTES].decode(errors="replace"))[:ERROR_TEXT]
            strange = not event.startswith(b'{"error"')
            _failed(run, i, "the stream has what is no event of a completion: " * strange + said)
            return
        run.heard = now
        run.said.hear(i, line)
        chunks += 1
        if chunks > run.job.requests.output_tokens[i] + EXTRA_CHUNKS:
            _failed(run, i, "the answer does not end: it has more tokens than max_tokens")
            return
        if math.isnan(last):
            run.first[i] = now
        else:
            run.gaps.append(now - last)
            run.owners.append(i)
        last = now
        run.last[i], run.received[i] = now, chunks
    if fault := _count_fault(run, i, chunks, usage):
        _failed(run, i, fault)
        return
    run.finish[i] = last
    run.said.end(i)
    run.state[i] = results.COMPLETED
    run.failures_in_row = 0


def _count_fault(run: _Run, i: int, chunks: int, usage: Any) -> str:
    """Return what is wrong with the token counts of a finished answer; "" if they are as requested."""
    prompt, output = int(run.job.requests.input_tokens[i]), int(run.job.requests.output_tokens[i])
    counts = usage if isinstance(usage, dict) else {"": usage}
    found, sent = counts.get("completion_tokens", chunks), counts.get("prompt_tokens", prompt)
    if counts is not usage or not (_is_count(found) and _is_count(sent)):
        return f"usage has other things than counts of tokens: {shown(usage)}"
    run.received[i] = found
    if chunks == 0 or run.received[i] < output:
        return "the answer ended before its last token"
    if run.received[i] > output:
        return f"the answer has more tokens than max_tokens: {run.received[i]} instead of {output}"
    if chunks > run.received[i]:
        return f"usage counts {run.received[i]} completion tokens, {chunks} were streamed"
    if sent != prompt:
        return f"usage counts {sent} prompt tokens, {prompt} were sent"
    return ""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS


def _failed(run: _Run, i: int, message: str) -> None:
    run.state[i] = results.FAILED
    run.heard = run.now()
    run.errors[message] += 1
    run.failures_in_row += 1


async def _watch(run: _Run, stop: asyncio.Event) -> None:
    """End the run when the server hangs or fails every request."""
    while not run.ended:
        await asyncio.sleep(0.25)
        if run.outstanding and run.now() - run.heard > run.job.stall_s:
            run.end(f"the server hangs: {run.outstanding} requests outstanding, no token for {run.job.stall_s:g} s")
        if run.failures_in_row >= run.job.failures_to_stop:
            worst = run.errors.most_common(1)[0][0]
            run.end(f"the server fails: {run.failures_in_row} requests in a row, mostly {worst}")
    stop.set()


async def _scrape(run: _Run, session: Any) -> None:
    while True:
        await asyncio.sleep(run.job.metrics_interval_s)
        await _look(run, session)


async def _look(run: _Run, session: Any) -> None:
    """Store the figures of /metrics, which are parsed after the run; a missing page is stored as an empty text."""
    aiohttp = import_aiohttp()
    text = ""
    timeout = aiohttp.ClientTimeout(total=LOOK_LIMIT_S)
    with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
        async with session.get(f"{run.job.url}/metrics", timeout=timeout, allow_redirects=False) as response:
            data = bytearray()
            while len(data) <= MAX_PAGE_BYTES and (piece := await response.content.read(1 << 16)):
                data += piece
                if len(data) > MAX_PAGE_BYTES // 2:
                    data[:] = thinned(bytes(data))
            if response.status == 200 and len(data) <= MAX_PAGE_BYTES:
                text = kept(data.decode(errors="replace"))
    run.metrics.append((run.now() if run.start else 0.0, text))


def main(arguments: list[str]) -> None:
    """Run the job that packer wrote to standard input and write the result file."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each outstanding request has a connection
    for most in (hard, OPEN_MAX):
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            break
    job: LoadJob = pickle.load(sys.stdin.buffer)
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    results.write_result(asyncio.run(run_load(job)), arguments[0])


if __name__ == "__main__":
    main(sys.argv[1:])
