"""Run the load generator in a process of its own and watch the server meanwhile."""

from __future__ import annotations

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
from dataclasses import replace
from pathlib import Path

from packer.errors import LiveError
from packer.live.client import KEY, STOPPING, import_aiohttp
from packer.live.job import LoadJob
from packer.live.results import LoadResult, read_result

START_GRACE_S = 60.0
"""Time for the client to start and to write its result, beyond the run itself."""
WRITE_GRACE_S = 4.0
"""Time for the client to write its result when the run is ended early: a command ends within 10 s."""
POLL_S = 0.2


def run_job(
    job: LoadJob,
    folder: Path,
    *,
    alive: Callable[[], bool] = lambda: True,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[float], None] = lambda _elapsed_s: None,
    authorization: str = "",
) -> LoadResult:
    """Send a job's requests from another process; the files stay in `folder`.

    A run that the server cut short comes back as a result that says so. On KeyboardInterrupt the client is
    stopped, its result so far is on disk, and the interrupt is raised again.

    `job`, `folder`: what to send, and where `load.npz` and `client.log` go.
    `alive`: called five times a second: False (the server died) ends the run.
    `stop`: called as often: True ends the run as interrupted.
    `progress`: called with the seconds since the client was started.
    `authorization`: header that opens the server; it is written to no file.
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
    """Signals that end a run wait for the end of the block, where the client is known to whoever has to end it.

    The mask is for the client, which inherits it; here another thread may get the signal all the same.
    """
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
    """The client's process. It inherits a mask that holds signals back until it handles them: one that comes
    while it still imports ends the run with a result, too."""
    with log_path.open("wb") as log, tempfile.TemporaryFile() as asked:
        pickle.dump(job, asked)
        asked.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", "packer.live.client", str(result)],
            stdin=asked,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, KEY: authorization},
        )


def _finish(client: subprocess.Popen[bytes]) -> None:
    """Let the client write its result, then make sure that its process has ended."""
    if client.poll() is None:
        client.send_signal(signal.SIGTERM)
    try:
        client.wait(WRITE_GRACE_S)
    except subprocess.TimeoutExpired:
        client.kill()
        client.wait()
