"""An evaluation by arithmetic, and a real browser."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from packer.bin import Bin
from packer.evaluation import Evaluation, Evaluations
from packer.workload import Workload

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture
def saturating() -> Callable[[Workload, Sequence[Bin]], Evaluations]:
    """Serves up to 4,000 tok/s; TTFT rises as 1 / (1 − load), as a queue's does."""

    def evaluate(fleet: Workload, bins: Sequence[Bin]) -> Evaluations:
        rows = []
        for item in bins:
            load = item.offered_tok_s(fleet)
            use = min(load / 4000.0, 0.999)
            served = min(load, 4000.0)
            starved = served < 0.9 * load
            ttft = 30.0 / (1.0 - use)
            rows.append(
                Evaluation(load, served, starved, False, ttft, ttft, 3 * ttft, 12.0, 12.0, 30.0, 2e5, float(starved))
            )
        return Evaluations.of(rows)

    return evaluate


START = """import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in zip((3, 4), ends):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from the file descriptor 3 and writes answers to 4."""


class Browser:
    """A page of a headless Chromium, by the DevTools protocol through two pipes."""

    def __init__(self, program: str, folder: Path) -> None:
        ends = *os.pipe(), *os.pipe()  # of commands, of answers
        command = [program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        started = [sys.executable, "-c", START, str(ends[0]), str(ends[3]), *command]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(started, stdout=log, stderr=log, pass_fds=(ends[0], ends[3]))
        for end in (ends[0], ends[3]):
            os.close(end)
        self._from, self._to = ends[2], ends[1]
        self._rest, self._number, self._own = b"", 0, dict[str, str]()
        self.events: list[dict[str, Any]] = []
        page = self.command("Target.createTarget", url="about:blank")["targetId"]
        found = self.command("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self._own = {"sessionId": found}
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def _read(self) -> dict[str, Any]:
        """The next answer or event."""
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], 60.0)[0], "no answer of the browser within a minute"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self.events += [found] if "method" in found else []
        return found

    def command(self, method: str, **given: Any) -> Any:
        """Result of a command of the protocol."""
        self._number += 1
        wanted = {"id": self._number, "method": method, "params": given, **self._own}
        os.write(self._to, json.dumps(wanted).encode() + b"\0")
        while (found := self._read()).get("id") != self._number:
            pass
        return found["result"]

    def script(self, source: str) -> Any:
        """Value of a script run in the page."""
        expression = f"(() => {{ {source} }})()"
        return self.command("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def open(self, path: Path, *, scheme: str = "light", media: str = "screen") -> None:
        """Show a file under a colour scheme, as on a screen or in print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", media=media, features=features)
        self.events = []
        self.command("Page.navigate", url=path.as_uri())
        while not any(each["method"] == "Page.loadEventFired" for each in self.events):
            self._read()

    def messages(self) -> list[dict[str, Any]]:
        """What the page wrote to the console since it was opened."""
        self.script("return 0")  # events so far come before its answer
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [each for each in self.events if each["method"] in said]

    def close(self) -> None:
        """End the browser."""
        os.close(self._to)
        os.close(self._from)
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser, or a skip where it is not installed."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed (Debian: chromium)")
    found = Browser(program, tmp_path_factory.mktemp("browser"))
    yield found
    found.close()
