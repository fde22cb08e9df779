"""An evaluation by arithmetic, and a real browser."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
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


def fetch(url: str, body: bytes | None = None, method: str | None = None) -> Any:
    """Value of a WebDriver answer."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


class Browser:
    """A headless Chromium behind chromedriver (W3C WebDriver over HTTP)."""

    def __init__(self, url: str) -> None:
        self.url = url
        options = {"args": list(FLAGS), "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = self._post("/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return fetch(f"{self.url}{path}", json.dumps(body).encode())

    def command(self, name: str, **body: Any) -> Any:
        """A WebDriver command of the session."""
        return self._post(f"/session/{self.session}/{name}", body)

    def script(self, source: str) -> Any:
        """Value of a script run in the page."""
        return self.command("execute/sync", script=source, args=[])

    def open(self, path: Path, *, scheme: str = "light", media: str = "screen") -> None:
        """Show a file under a colour scheme, as on a screen or in print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        emulated = {"media": media, "features": features}
        self.command("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params=emulated)
        self.command("url", url=path.as_uri())

    def messages(self) -> list[str]:
        """What the page wrote to the console since the last call."""
        return [entry["message"] for entry in self.command("se/log", type="browser")]

    def close(self) -> None:
        """End the session."""
        fetch(f"{self.url}/session/{self.session}", method="DELETE")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser, or a skip where it is not installed."""
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("Chromium is not installed (Debian: chromium and chromium-driver)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("browser") / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen([driver, f"--port={port}"], stdout=out, stderr=out) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(urllib.error.URLError):
                    if fetch(f"{url}/status")["ready"]:
                        break
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            found = Browser(url)
            yield found
            found.close()
        finally:
            process.terminate()
