from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from packer.adapter import Adapter
from packer.engine_spec import EngineSpec
from packer.lengths import Lengths
from packer.live import client
from packer.live import load as load_module
from packer.live import server as server_module
from packer.live.launch import Launch
from packer.live.server import LiveServer
from packer.profile import GpuSpec, LatencySpec, MemorySpec, ModelSpec, Profile
from packer.workload import Workload
from tests.live.forks import Clients
from tests.live.loads import SLOTS

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and clients are looked at often, and servers are killed soon after they were told to stop."""
    monkeypatch.setattr(server_module, "STOP_GRACE_S", 0.5)
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    monkeypatch.setattr(load_module, "POLL_S", 0.02)
    # Here the heap is that of all tests: looking through it takes longer than a short run.
    monkeypatch.setattr(client, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))


@pytest.fixture(scope="session")
def _clients() -> Iterator[Clients]:
    with Clients() as clients:
        yield clients


@pytest.fixture(autouse=True)
def _forked_clients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of long files are copies of a process; tests/live/test_load.py starts real ones."""
    if request.path.stem in ("test_campaign", "test_validate"):
        monkeypatch.setattr(load_module, "_started", request.getfixturevalue("_clients").start)


@pytest.fixture(scope="session")
def launch() -> Launch:
    """The fake server, with the smallest settings."""
    return Launch(
        name="fake",
        model="none",
        adapter_path="{name}",
        engine=EngineSpec("vllm", "0.32.0", 256, 512, 64, block_size=32),
        model_spec=ModelSpec("tiny", 1.0, 2048.0, 17408.0),
        gpu=GpuSpec("none", 1e9),
        python=sys.executable,
        command=("{python}", str(FAKE)),
        step_log=False,
        token_ids=(4, 100),
        startup_timeout_s=20.0,
    )


@pytest.fixture(scope="module")
def url(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A fake server without faults, for all tests of a file."""
    with LiveServer(launch, SLOTS, tmp_path_factory.mktemp("server")) as server:
        assert server.start() is None
        yield server.url


@pytest.fixture
def with_fault(launch: Launch, tmp_path: Path) -> Callable[..., Launch]:
    """The fake server with a fault, and more variables of its environment."""

    def make(fault: str, **variables: str) -> Launch:
        environment = {"FAKE_FAULT": fault, "FAKE_COUNTER": str(tmp_path / "counter"), **variables}
        return replace(launch, environment=environment)

    return make


@pytest.fixture
def fleet() -> Workload:
    """Four adapters, 40 req/s in all, short requests."""
    adapters = [Adapter(f"a{i}", 8, 10.0) for i in range(4)]
    return Workload(adapters, Lengths.gamma(20, 0.5, high=60), Lengths.gamma(8, 0.5, high=20), 0.0)


@pytest.fixture
def profile(launch: Launch) -> Profile:
    """What the fake server is: 2 ms a step, whatever the batch."""
    return Profile(
        "fake",
        launch.model_spec,
        launch.gpu,
        launch.engine,
        MemorySpec(2e7, 0.0, 17408.0, 256),
        LatencySpec("linear", {"base_ms": 2.3}),
        calibrated=True,
    )


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process ends within 10 s; a zombie has ended."""
    return _gone


def _gone(pid: int, within_s: float = 10.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
