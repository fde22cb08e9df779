"""One running vLLM server: which adapters it has, loading and unloading them, and whose requests are in flight."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from packer.errors import LiveError, shown
from packer.io.documents import parse_json
from packer.io.web import Address, masked
from packer.live.fleet_file import Host, StepLimits
from packer.live.launch import filled
from packer.live.server import get, healthy

PROBE_TOKENS = (10, 11, 12)  # A prompt of token ids that every vocabulary has.
ERROR_TEXT = 200
AT_ONCE = 16  # Maximum number of servers that are queried at the same time.
T = TypeVar("T")


@dataclass(frozen=True)
class Models:
    """Content of /v1/models: names of the base model, its longest request, and the adapters with their paths."""

    base: tuple[str, ...]
    max_model_len: int | None
    adapters: Mapping[str, str]


@dataclass(frozen=True)
class RunningServer:
    """A server at its address; every call raises `LiveError` if no valid answer comes in time."""

    host: Host
    where: Address
    limits: StepLimits

    @property
    def name(self) -> str:
        """Name of the server."""
        return self.host.name

    @property
    def healthy(self) -> bool:
        """Whether /health answers 200."""
        return healthy(self.where, self.limits.answer_s)

    def models(self) -> Models:
        """Return the base model and the adapters that the server serves now."""
        found = self._json("/v1/models", self.limits.answer_s)
        try:
            cards = [(str(card["id"]), card) for card in found["data"]]
            base = [(name, card) for name, card in cards if not card.get("parent")]
            longest = next((card.get("max_model_len") for _, card in base), None)
            own = {name: str(card.get("root", "")) for name, card in cards if card.get("parent")}
        except (KeyError, TypeError, AttributeError):
            raise LiveError(f"{self.name}: /v1/models is not a list of models.") from None
        return Models(tuple(name for name, _ in base), longest if isinstance(longest, int) else None, own)

    def load(self, name: str, path: str) -> None:
        """Load an adapter; one that is loaded already from the same path stays. Raises also unless the server then
        lists it with this path and answers a request of one token for it."""
        try:
            self._json("/v1/load_lora_adapter", self.limits.load_s, {"lora_name": name, "lora_path": path})
        except LiveError:
            if name not in self.models().adapters:
                raise
        held = self.models().adapters
        if name not in held:
            raise LiveError(f"{self.name}: /v1/models does not list {shown(name)} after its load.")
        if held[name] != path:
            raise LiveError(f"{self.name}: {shown(name)} was loaded from {shown(held[name])}, expected {shown(path)}.")
        probe = {"model": name, "prompt": list(PROBE_TOKENS), "max_tokens": 1, "temperature": 0.0}
        found = self._json("/v1/completions", self.limits.load_s, probe)
        if not (isinstance(found, dict) and found.get("choices")):
            raise LiveError(f"{self.name}: a request for {shown(name)} was answered without a token.")

    def unload(self, name: str) -> None:
        """Unload an adapter; raises only if the server still serves it."""
        try:
            self._json("/v1/unload_lora_adapter", self.limits.answer_s, {"lora_name": name})
        except LiveError:
            if name in self.models().adapters:
                raise

    def metrics(self) -> str:
        """Return the server's /metrics page."""
        return self._text("/metrics", self.limits.answer_s)

    def command(self, text: str) -> None:
        """Run a user's command for this server. Raises `LiveError`: the command fails or takes too long."""
        self.begin(text).wait(self.limits.start_s)

    def begin(self, text: str) -> ShellCommand:
        """Start a user's command for this server, with {name} and {url} as one word each; does not wait for its end."""
        own = {"name": shlex.quote(self.name), "url": shlex.quote(self.where.url)}
        return ShellCommand(filled("a command", text, **own), self.where)

    def _json(self, path: str, total_s: float, body: Any = None) -> Any:
        text = self._text(path, total_s, None if body is None else json.dumps(body).encode())
        try:
            return parse_json(text)
        except ValueError:
            return text

    def _text(self, path: str, total_s: float, body: bytes | None = None) -> str:
        status, text = get(self.where, path, total_s, body)
        if status != 200:
            said = self.where.said(status, text) if status else self.where.masked(text)
            if said == "HTTP 404: Not Found" and path.endswith("_lora_adapter"):
                said += ": it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            raise LiveError(f"{self.name}: {path}: {masked(said)[:ERROR_TEXT].strip().rstrip('.')}.")
        return text


def each_of(servers: Iterable[RunningServer], ask: Callable[[RunningServer], T]) -> list[T | str]:
    """Return what `ask` returns for each server, or the text of the `LiveError` that it raises; many at a time."""

    def one(server: RunningServer) -> T | str:
        try:
            return ask(server)
        except LiveError as error:
            return str(error)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, servers))


class ShellCommand:
    """A user's command in a shell, in a process group of its own; it starts when the object is made. `where`: whose key
    its output must not show."""

    def __init__(self, text: str, where: Address) -> None:
        self.text, self.begun_s, self._said = text, time.monotonic(), tempfile.TemporaryFile()  # noqa: SIM115
        self._where = where
        self._process = subprocess.Popen(
            text, shell=True, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said, env=os.environ,
            start_new_session=True,
        )  # fmt: skip

    def fault(self) -> str:
        """Return status and output of a command that failed; "" while it runs, and if it succeeded."""
        status = self._process.poll()
        if not status:
            return ""
        self._said.seek(0)
        said = self._where.masked(self._said.read().decode(errors="replace")).strip()[-ERROR_TEXT:]
        return f"The command {shown(self.text)} ended with status {status}{f': {said}' if said else '.'}"

    def wait(self, limit_s: float) -> None:
        """Wait for the command; raises `LiveError` if it fails or takes `limit_s`, after which it is killed."""
        try:
            self._process.wait(limit_s)
            if fault := self.fault():
                raise LiveError(fault)
        except subprocess.TimeoutExpired:
            raise LiveError(f"The command {shown(self.text)} did not end within {limit_s:g} s.") from None
        finally:
            self.end()

    def end(self) -> None:
        """Kill all processes of the command's group, unless the command has ended."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()

    def leave(self) -> None:
        """Stop watching the command, which may still run."""
        if self._process.poll() is None:
            # Without a status, Popen would warn that the process still runs.
            self._process.returncode = 0
        self._said.close()
