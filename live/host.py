"""One running vLLM server: which adapters it has, loading and unloading them, and whose requests are in flight."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from packer.errors import LiveError, shown
from packer.io.documents import parse_json
from packer.io.web import Address, ask, masked
from packer.live.fleet_file import Host, StepLimits
from packer.live.launch import filled
from packer.live.server import MAX_PAGE_BYTES, get, healthy

PROBE_TOKENS = (10, 11, 12)
"""A prompt that every vocabulary has."""
ERROR_TEXT = 200


@dataclass(frozen=True)
class Models:
    """What /v1/models says: names of the base model, its longest request, and the adapters with their paths."""

    base: tuple[str, ...]
    max_model_len: int | None
    adapters: Mapping[str, str]


@dataclass(frozen=True)
class RunningServer:
    """A server at its address; every call raises `LiveError` where no good answer comes in time."""

    host: Host
    where: Address
    limits: StepLimits

    @property
    def name(self) -> str:
        """Of the server."""
        return self.host.name

    @property
    def healthy(self) -> bool:
        """Whether /health answers 200."""
        return healthy(self.where, self.limits.answer_s)

    def models(self) -> Models:
        """The adapters that it serves now."""
        found = self._json("/v1/models", None, self.limits.answer_s)
        try:
            cards = [(str(card["id"]), card) for card in found["data"]]
            base = [(name, card) for name, card in cards if not card.get("parent")]
            longest = next((card.get("max_model_len") for _, card in base), None)
            own = {name: str(card.get("root", "")) for name, card in cards if card.get("parent")}
        except (KeyError, TypeError, AttributeError):
            raise LiveError(f"{self.name}: /v1/models is not a list of models.") from None
        return Models(tuple(name for name, _ in base), longest if isinstance(longest, int) else None, own)

    def load(self, name: str, path: str) -> None:
        """The server serves the adapter from now on; it stays if it is there already from the same path."""
        body = {"lora_name": name, "lora_path": path}
        try:
            self._json("/v1/load_lora_adapter", body, self.limits.load_s)
        except LiveError:
            held = self.models().adapters
            if held.get(name) != path:
                raise
        self.check(name, path)

    def check(self, name: str, path: str) -> None:
        """Raise unless the server lists the adapter, from this path, and answers a request of one token for it."""
        held = self.models().adapters
        if name not in held:
            raise LiveError(f"{self.name}: /v1/models does not list {shown(name)} after its load.")
        if held[name] != path:
            raise LiveError(
                f"{self.name}: {shown(name)} was loaded from {shown(held[name])}, expected {shown(path)}."
            )
        self.answers(name)

    def answers(self, name: str) -> None:
        """Raise unless a request of one token for this model is answered."""
        body = {"model": name, "prompt": list(PROBE_TOKENS), "max_tokens": 1, "temperature": 0.0}
        found = self._json("/v1/completions", body, self.limits.load_s)
        if not (isinstance(found, dict) and found.get("choices")):
            raise LiveError(f"{self.name}: a request for {shown(name)} was answered without a token.")

    def unload(self, name: str) -> None:
        """The server no longer serves the adapter."""
        try:
            self._json("/v1/unload_lora_adapter", {"lora_name": name}, self.limits.answer_s)
        except LiveError:
            if name in self.models().adapters:
                raise

    def metrics(self) -> str:
        """The page of its metrics."""
        status, text = get(self.where, "/metrics", self.limits.answer_s)
        if status != 200:
            raise LiveError(f"{self.name}: /metrics: {_status(status, text)}.")
        return text

    def command(self, text: str) -> None:
        """Run a command of the user's for this server. Raises `LiveError`: it fails or takes too long."""
        self.begin(text).wait(self.limits.start_s)

    def begin(self, text: str) -> ShellCommand:
        """Begin a command of the user's for this server, without waiting for its end."""
        return ShellCommand(filled("a command", text, name=self.name, url=self.where.url))

    def _json(self, path: str, body: Any, total_s: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        try:
            status, answer = ask(
                self.where, path, body=data, limit_bytes=MAX_PAGE_BYTES, total_s=total_s,
                content_type="application/json",
            )  # fmt: skip
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise LiveError(
                f"{self.name}: {path}: {self._said(str(error) or type(error).__name__)}."
            ) from None
        text = answer.decode(errors="replace")
        if status != 200:
            raise LiveError(f"{self.name}: {path}: {self._said(_status(status, text))}.")
        try:
            return parse_json(text)
        except ValueError:
            return text

    def _said(self, text: str) -> str:
        return masked(self.where.masked(text))[:ERROR_TEXT].strip().rstrip(".")


class ShellCommand:
    """A command of the user's in a shell, in a process group of its own, since it was made."""

    def __init__(self, text: str) -> None:
        self.text, self.begun_s, self._said = text, time.monotonic(), tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            text,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            start_new_session=True,
        )

    def fault(self) -> str:
        """What it said when it ended with a status that is not 0; "" while it runs, and where it went well."""
        status = self._process.poll()
        if not status:
            return ""
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-ERROR_TEXT:]
        return f"The command {shown(self.text)} ended with status {status}: {said}"

    def wait(self, limit_s: float) -> None:
        """Wait for its end. Raises `LiveError`: it fails, or takes longer than `limit_s`; it is ended then, as it is
        where the wait is interrupted."""
        try:
            self._process.wait(limit_s)
            if fault := self.fault():
                raise LiveError(fault)
        except subprocess.TimeoutExpired:
            raise LiveError(f"The command {shown(self.text)} did not end within {limit_s:g} s.") from None
        finally:
            self.end()

    def end(self) -> None:
        """End all processes of its group, unless it has ended itself."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()

    def leave(self) -> None:
        """Whether it has ended or not, nobody waits for it any more."""
        if self._process.poll() is None:
            self._process.returncode = 0
        self._said.close()


def _status(status: int, text: str) -> str:
    if status == 0:
        return text
    if 300 <= status < 400:
        return f"HTTP {status}: a redirect, which is not followed"
    with suppress(ValueError, KeyError, TypeError):
        text = str(parse_json(text)["error"]["message"])
    return f"HTTP {status}: {text[:ERROR_TEXT]}"
