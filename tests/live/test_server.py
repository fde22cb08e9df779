"""Starting and stopping: every way of failing is reported as such, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packer.engine_spec import EngineSpec
from packer.live.launch import Launch
from packer.live.server import LiveServer, ServerOptions, command_line, environment, healthy, split_cores
from packer.settings import Settings

OPTIONS = ServerOptions((("a0", "x"), ("a1", "x")), Settings(2, 8))


def test_a_server_starts_answers_and_is_gone_after_the_block(launch: Launch, tmp_path: Path) -> None:
    """Inside the block the server is healthy; after it no process listens."""
    with LiveServer(launch, OPTIONS, tmp_path) as server:
        assert server.start() is None
        assert server.alive
        assert healthy(server.url)
        url = server.url
    assert not healthy(url, 0.5)


def test_a_server_is_stopped_when_the_block_raises(launch: Launch, tmp_path: Path) -> None:
    """An error in the block goes through, and the server is gone all the same."""
    urls = []

    def fail() -> None:
        with LiveServer(launch, OPTIONS, tmp_path) as server:
            assert server.start() is None
            urls.append(server.url)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not healthy(urls[0], 0.5)


def test_too_little_memory_is_a_result(with_fault: Callable[..., Launch], tmp_path: Path) -> None:
    """vLLM's message about the KV cache is recognised as a memory error and quoted."""
    with LiveServer(with_fault("memory"), OPTIONS, tmp_path) as server:
        failure = server.start()
    assert failure is not None
    assert failure.kind == "memory_error"
    assert "No available memory" in failure.message


def test_a_taken_port_is_tried_again(with_fault: Callable[..., Launch], tmp_path: Path) -> None:
    """A lost race for a port costs a restart with another one, not the run."""
    with LiveServer(with_fault("port", FAKE_PORT_FAILURES="1"), OPTIONS, tmp_path) as server:
        assert server.start() is None
        assert healthy(server.url)


def test_ports_that_are_always_taken_end_the_tries(with_fault: Callable[..., Launch], tmp_path: Path) -> None:
    """After three lost races the failure says so."""
    with LiveServer(with_fault("port", FAKE_PORT_FAILURES="9"), OPTIONS, tmp_path) as server:
        failure = server.start()
    assert failure is not None
    assert failure.kind == "port"
    assert (tmp_path / "counter").read_text() == "3"


def test_a_server_that_never_gets_healthy_times_out(with_fault: Callable[..., Launch], tmp_path: Path) -> None:
    """The limit holds, and the failure names it."""
    launch = replace(with_fault("slow-start"), startup_timeout_s=0.5)
    with LiveServer(launch, OPTIONS, tmp_path) as server:
        failure = server.start()
        assert failure is not None
        assert failure.kind == "timeout"
        assert "0.5 s" in failure.message
        assert not server.alive


def test_a_server_that_ends_at_start_shows_its_log(launch: Launch, tmp_path: Path) -> None:
    """The failure has the exit status and the tail of the log."""
    broken = replace(launch, command=("{python}", "-c", "import sys; print('no such model'); sys.exit(7)"))
    with LiveServer(broken, OPTIONS, tmp_path) as server:
        failure = server.start()
    assert failure is not None
    assert failure.kind == "exited"
    assert "status 7" in failure.message
    assert "no such model" in failure.tail


def test_children_that_ignore_sigterm_are_killed(
    with_fault: Callable[..., Launch], tmp_path: Path, gone: Callable[[int], bool]
) -> None:
    """The whole process group is stopped, the stubborn ones by SIGKILL."""
    with LiveServer(with_fault("children"), OPTIONS, tmp_path) as server:
        assert server.start() is None
        child = int((tmp_path / "counter").read_text())
    assert gone(child)


def test_a_killed_packer_leaves_no_server(launch: Launch, tmp_path: Path, gone: Callable[[int], bool]) -> None:
    """SIGKILL gives packer no chance to clean up; the guard does it."""
    script = (
        "import sys, time, pathlib\n"
        "from packer.live.server import LiveServer, ServerOptions\n"
        "from packer.live import server as module\n"
        "from packer.settings import Settings\n"
        "from packer.live.launch import Launch\n"
        "from packer.profile import EngineSpec, GpuSpec, ModelSpec\n"
        f"launch = Launch('x', 'm', 'x', EngineSpec('vllm', '0', 256, 512, 64), ModelSpec('m', 1, 1, 1),"
        f" GpuSpec('g', 1), python=sys.executable, command={launch.command!r}, step_log=False)\n"
        f"server = LiveServer(launch, ServerOptions((), Settings(1, 8)), pathlib.Path({str(tmp_path)!r}))\n"
        "assert server.start() is None\n"
        "print(server._guard.pid, server.port, flush=True)\n"
        "time.sleep(600)\n"
    )
    packer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert packer.stdout is not None
    guard, port = map(int, packer.stdout.readline().split())
    assert healthy(f"http://127.0.0.1:{port}")
    packer.send_signal(signal.SIGKILL)
    packer.wait()
    packer.stdout.close()
    assert gone(guard)
    assert not healthy(f"http://127.0.0.1:{port}", 0.5)


def test_stop_is_heard_while_the_server_starts(with_fault: Callable[..., Launch], tmp_path: Path) -> None:
    """An interrupt from another thread ends the wait long before the limit."""
    start = time.monotonic()
    with LiveServer(with_fault("slow-start"), OPTIONS, tmp_path) as server:
        failure = server.start(lambda: time.monotonic() - start > 0.5)
    assert failure is not None
    assert "interrupted" in failure.message


def test_the_command_line_has_the_settings(launch: Launch) -> None:
    """Engine settings, slots, adapters and emulated memory arrive as vLLM's flags."""
    line = command_line(replace(launch, step_log=True), replace(OPTIONS, kv_cache_bytes=123), 81)
    text = " ".join(line)
    assert "--max-loras 2 --max-lora-rank 8" in text
    assert "--max-num-seqs 64" in text
    assert "--kv-cache-memory-bytes 123" in text
    assert """--lora-modules {"name": "a0", "path": "x"} {"name": "a1", "path": "x"}""" in text
    assert "--worker-cls packer_step_worker.StepWorker" in text


def test_host_adapters_are_at_least_the_slots(launch: Launch) -> None:
    """vLLM refuses max_cpu_loras < max_loras, so the flag never has that."""
    engine = EngineSpec("vllm", "0", 256, 512, 64, max_cpu_loras=1, data_parallel_size=2)
    line = command_line(replace(launch, engine=engine), replace(OPTIONS, settings=Settings(4, 8)), 81)
    assert line[line.index("--max-cpu-loras") + 1] == "4"
    assert line[line.index("--data-parallel-size") + 1] == "2"


def test_the_environment_is_offline_and_has_the_step_log(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM may compile its modules, queries no hub and finds our worker."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    variables = environment(launch, tmp_path / "steps.csv")
    assert "PYTHONDONTWRITEBYTECODE" not in variables
    assert variables["HF_HUB_OFFLINE"] == "1"
    worker = Path(variables["PYTHONPATH"].split(os.pathsep)[0]) / "packer_step_worker.py"
    assert worker.exists()


@pytest.mark.parametrize(
    ("cores", "n", "shares"), [((0, 1, 2, 3), 2, [(0, 2), (1, 3)]), ((0,), 2, [(0,), (0,)]), ((), 2, [(), ()])]
)
def test_cores_are_shared_out(cores: tuple[int, ...], n: int, shares: list[tuple[int, ...]]) -> None:
    """Each server gets its own cores where there are enough, else all share them."""
    assert split_cores(cores, n) == shares
