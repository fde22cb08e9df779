"""Start, watch and stop one real vLLM server."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from packer.errors import LiveError
from packer.export.quoting import json_text, words
from packer.export.servers import engine_flags
from packer.io.web import Address, ask
from packer.live import inside
from packer.live.launch import Launch
from packer.live.metrics import MAX_PAGE_BYTES, thinned
from packer.settings import Settings

HOST = "127.0.0.1"
STOP_GRACE_S = 3.0  # Time for a server to end before it is killed, so that packer's commands end within 10 s.
PORT_TRIES = 3
TAIL_LINES = 25
POLL_S = 0.2

_MEMORY_PATTERNS = re.compile(
    r"No available memory for the cache blocks"
    r"|is larger than the (?:maximum number of tokens|available KV cache memory)"
    r"|KV cache is needed, which is larger than"
    r"|Free memory on device .* is less than desired"
    r"|CUDA out of memory|OutOfMemoryError|not enough memory",
    re.IGNORECASE,
)
_PORT_PATTERN = re.compile(r"address already in use", re.IGNORECASE)
FailureKind = Literal["memory_error", "port", "exited", "timeout", "interrupted"]


@dataclass(frozen=True)
class Failure:
    """Why a server did not start or died; `tail` is the end of its log."""

    kind: FailureKind
    message: str
    tail: str = ""


@dataclass(frozen=True)
class ServerOptions:
    """Options that differ between servers of one launch file; adapters are (name, folder)."""

    adapters: tuple[tuple[str, str], ...]
    settings: Settings
    kv_cache_bytes: int | None = None


def command_line(launch: Launch, options: ServerOptions, port: int) -> list[str]:
    """The server's command line."""
    engine, slots = launch.engine, options.settings.max_loras
    # vLLM requires max_cpu_loras >= max_loras, and by default gives as many as there are slots.
    host_adapters = engine.max_cpu_loras if engine.max_cpu_loras is not None else len(options.adapters)
    flags: dict[str, object] = {
        "model": launch.model,
        "served-model-name": "base",
        "host": HOST,
        "port": port,
        **engine_flags(engine),
        "block-size": engine.block_size,  # vLLM's default is not 16 on every device
    }
    if options.adapters:
        flags |= {"enable-lora": True, "max-loras": slots, "max-lora-rank": options.settings.max_lora_rank}
        flags["max-cpu-loras"] = max(host_adapters, slots)
        flags["lora-modules"] = [json_text({"name": name, "path": path}) for name, path in options.adapters]
    if options.kv_cache_bytes is not None:
        flags["kv-cache-memory-bytes"] = options.kv_cache_bytes
    if launch.step_log:
        flags["worker-cls"] = "packer_step_worker.StepWorker"
    return [*launch.program(), *words(flags), *launch.arguments]


def environment(launch: Launch, step_log: Path | None) -> dict[str, str]:
    """The server's environment variables: this process's, vLLM's switches, then the launch file's."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    variables |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1"}
    if step_log is not None:
        folder = str(Path(inside.__file__).parent)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
        variables["PACKER_STEP_LOG"] = str(step_log)
    return variables | dict(launch.environment)


class LiveServer:
    """One server as a context manager, which always ends the server's processes on exit. `start` returns None, or a
    `Failure`: a server that does not start is a result, not an exception."""

    def __init__(self, launch: Launch, options: ServerOptions, folder: Path, *, cores: Sequence[int] = ()) -> None:
        self.launch, self.options, self.folder = launch, options, folder
        self.cores = tuple(cores) or launch.server_cores
        self.port = 0
        self.log_path = folder / "server.log"
        self.step_log = folder / "steps.csv" if launch.step_log else None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{HOST}:{self.port}"

    def start(self, stop: Callable[[], bool] = lambda: False) -> Failure | None:
        """Start and wait until healthy; if another process took the port, try another port. `stop` is called while
        waiting: True ends the attempt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        failure: Failure | None = None
        for _ in range(PORT_TRIES):
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                # Another process may take the port once the probe is closed: then the next try takes another.
                self.port = probe.getsockname()[1]
            self._spawn()
            failure = self._wait(stop)
            if failure is None:
                self._pin_front()
                return None
            self.stop()
            if failure.kind != "port":
                return failure
        return failure

    def _spawn(self) -> None:
        command = command_line(self.launch, self.options, self.port)
        guard = [sys.executable, str(Path(__file__).with_name("guard.py")), str(STOP_GRACE_S), *command]
        if self.cores:
            guard = [*guard[:3], "taskset", "-c", ",".join(map(str, self.cores)), *guard[3:]]
        with self.log_path.open("wb") as log:
            self._guard = subprocess.Popen(
                guard,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.launch, self.step_log),
                start_new_session=True,  # Ctrl-C goes to packer, which then stops the server
            )

    def _wait(self, stop: Callable[[], bool]) -> Failure | None:
        deadline = time.monotonic() + self.launch.startup_timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                return self.failure()
            if stop():
                return Failure("interrupted", "interrupted while the server started", self._tail())
            if healthy(self.url):
                return None
            time.sleep(POLL_S)
        limit = f"{self.launch.startup_timeout_s:g} s"
        return Failure("timeout", f"the server was not healthy within {limit}", self._tail())

    def _pin_front(self) -> None:
        """Move the process that serves HTTP to `api_cores`; the engine's cores do not change."""
        if not self.launch.api_cores or self._guard is None:
            return
        guard = self._guard.pid
        leader = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        for thread in Path(f"/proc/{leader[0]}/task").iterdir() if leader else ():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), self.launch.api_cores)

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._guard is not None and self._guard.poll() is None

    def failure(self) -> Failure:
        """Return why the server is no longer alive, from its log."""
        tail, text = self._tail(), self._log()
        found = _MEMORY_PATTERNS.search(text)
        if found:
            line = next((x for x in reversed(text.splitlines()) if found.group(0) in x), found.group(0))
            return Failure("memory_error", line.strip()[-300:], tail)
        if _PORT_PATTERN.search(text):
            return Failure("port", f"port {self.port} was taken by another process", tail)
        status = None if self._guard is None else self._guard.poll()  # 128 + n for the signal n
        return Failure("exited", f"the server ended with status {status}", tail)

    def _log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _tail(self) -> str:
        return "\n".join(self._log().splitlines()[-TAIL_LINES:])

    def stop(self) -> None:
        """Stop every process of the server; waits until they are gone."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        with contextlib.suppress(OSError):
            guard.stdin.close()
        try:
            guard.wait(STOP_GRACE_S + 10.0)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()
            raise LiveError(f"The server on port {self.port} could not be stopped; see {self.log_path}.") from None


def healthy(where: Address | str, timeout_s: float = 2.0) -> bool:
    """Whether /health answers 200."""
    return get(where, "/health", timeout_s)[0] == 200


def get(where: Address | str, path: str, timeout_s: float = 5.0, body: bytes | None = None) -> tuple[int, str]:
    """GET a page, or POST a JSON `body`; return status and text of the answer. Status 0 and the reason: no answer of up
    to `MAX_PAGE_BYTES` came in time. Of /metrics only the lines that `page_of` reads are returned."""
    address = Address(where.rstrip("/")) if isinstance(where, str) else where
    about: dict[str, Any] = {"limit_bytes": MAX_PAGE_BYTES, "content_type": "application/json"}
    about |= {"thin": thinned} if path == "/metrics" else {}
    try:
        status, data = ask(address, path, body=body, total_s=timeout_s, **about)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, str(error) or type(error).__name__
    return status, data.decode(errors="replace")


def split_cores(cores: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """Divide cores among n servers that run at once; with fewer cores than servers, each gets all cores."""
    if not cores or len(cores) < n:
        return [tuple(cores)] * n
    return [tuple(cores[i::n]) for i in range(n)]
