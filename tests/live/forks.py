"""Clients of the load generator as copies of a process that has imported them, which takes a third of a second."""

from __future__ import annotations

import base64
import json
import os
import pickle
import select
import signal
import subprocess
import sys
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from packer.live.load import LoadJob

PROGRAM = """
import base64, io, json, os, signal, sys, traceback
from types import SimpleNamespace
import aiohttp
from packer.live import client
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    job, result, log, key = json.loads(line)
    if (child := os.fork()) == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, client.STOPPING)
            os.setsid()
            for number in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            os.environ[client.KEY] = key
            sys.stdin = SimpleNamespace(buffer=io.BytesIO(base64.b64decode(job)))
            client.main([result])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    print(child, flush=True)
"""


class Client:
    """A client with the methods of `subprocess.Popen` that `run_job` calls."""

    def __init__(self, pid: int) -> None:
        self._file = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return 0 once the process has ended."""
        return 0 if select.select([self._file], [], [], 0.0)[0] else None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the process to end."""
        if not select.select([self._file], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("client", timeout or 0.0)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        signal.pidfd_send_signal(self._file, number)

    def kill(self) -> None:
        """End the process."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._file)


class Clients:
    """The process that is copied; `start` stands for `packer.live.load._started`."""

    def __enter__(self) -> Self:
        self._lock = Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, _kind: type | None, _error: BaseException | None, _where: TracebackType | None) -> None:
        self._process.communicate()

    def start(self, job: LoadJob, result: Path, log_path: Path, authorization: str) -> Client:
        """Start a client."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps([base64.b64encode(pickle.dumps(job)).decode(), str(result), str(log_path), authorization])
        with self._lock:
            print(line, file=self._process.stdin, flush=True)
            return Client(int(self._process.stdout.readline()))
