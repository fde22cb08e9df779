"""`start.sh all` under a real shell, with commands that stand in for vLLM."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packer.export.formats import export_plan
from packer.plan import Plan

SERVES = 'echo $$ > "$FOLDER/pid.$CUDA_VISIBLE_DEVICES"\nexec sleep 300\n'
"""A server that runs until a signal; the shell that wrote its process id becomes it."""
RESET = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""A test run in the background ignores some signals, and a shell can't trap what was ignored at its start."""
LAUNCHER = """
trap 'exit 77' TERM
"$0" "$FOLDER/start.sh" all &
echo $! > "$FOLDER/script"
wait $!
echo $? > "$FOLDER/status"
"""


class Script:
    """A start script of three servers in a folder, and the process that it was started as."""

    def __init__(self, folder: Path, shell: str, text: str) -> None:
        self.folder, self.shell = folder, shell
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "start.sh").write_text(text.replace("sleep 1", "sleep 0.3"))

    def start(self, vllm: str, *, launcher: str = 'exec "$0" "$FOLDER/start.sh" all') -> subprocess.Popen[bytes]:
        """Run the script, with what runs as `vllm` there, in a process group of its own."""
        (self.folder / "vllm").write_text(f"#!/bin/sh\n{vllm}")
        (self.folder / "vllm").chmod(0o755)
        with (self.folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", RESET, self.shell, "-c", launcher, self.shell],
                env={"PATH": f"{self.folder}:{os.environ['PATH']}", "FOLDER": str(self.folder)},
                stderr=err,
                start_new_session=True,
            )
        return self.process

    def errors(self) -> str:
        """Standard error so far."""
        return (self.folder / "err").read_text()

    def servers(self) -> list[int]:
        """Process ids of the servers that run or ran."""
        written = [path.read_text() for path in self.folder.glob("pid.*")]
        return [int(text) for text in written if text]

    def end(self) -> None:
        """Leave nothing behind, whatever went wrong."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def until(done: Callable[[], bool]) -> None:
    """Wait for something that happens soon."""
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(params=["sh", "bash"])
def script(request: pytest.FixtureRequest, hostile_plan: Plan, tmp_path: Path) -> Iterator[Script]:
    """The exported script for a shell."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"{request.param} is not installed")
    made = Script(tmp_path, shell, export_plan(hostile_plan, "vllm")["start.sh"])
    yield made
    made.end()


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_stops_every_server(script: Script, name: str, status: int) -> None:
    """A signal to the script ends all servers, and then the script with the usual status for that signal."""
    process = script.start(SERVES)
    until(lambda: len(script.servers()) == 3)
    process.send_signal(signal.Signals[name])
    assert process.wait(timeout=20) == status
    assert [pid for pid in script.servers() if alive(pid)] == []
    assert "ended with" not in script.errors()


def test_a_signal_during_the_start_is_not_lost(script: Script) -> None:
    """A server that gets a signal to end before it is more than a copy of the shell ends all the same."""
    process = script.start(SERVES)
    until(lambda: len(script.servers()) > 0)
    process.terminate()
    assert process.wait(timeout=20) == 143
    assert [pid for pid in script.servers() if alive(pid)] == []


def test_the_launcher_is_left_alone(script: Script) -> None:
    """The script signals its servers, not the process group that it shares with whoever started it."""
    process = script.start(SERVES, launcher=LAUNCHER)
    until(lambda: len(script.servers()) == 3)
    os.kill(int((script.folder / "script").read_text()), signal.SIGTERM)
    assert process.wait(timeout=20) == 0
    assert (script.folder / "status").read_text() == "143\n"
    assert [pid for pid in script.servers() if alive(pid)] == []


def test_a_server_that_dies_is_named_at_once(script: Script) -> None:
    """A dead server does not take the others down, and which one died is said while they run on."""
    process = script.start(f'if [ "$CUDA_VISIBLE_DEVICES" = 1 ]; then exit 3; fi\n{SERVES}')
    until(lambda: "server 1 ended with status 3" in script.errors())
    until(lambda: len(script.servers()) == 2)
    assert process.poll() is None
    assert all(alive(pid) for pid in script.servers())
    process.terminate()
    assert process.wait(timeout=20) == 143


def test_the_worst_status_is_the_scripts(script: Script) -> None:
    """When all servers have ended, the script fails if one of them did, and has named each."""
    process = script.start('case "$CUDA_VISIBLE_DEVICES" in 0) exit 0 ;; 1) exit 9 ;; *) kill -9 $$ ;; esac\n')
    assert process.wait(timeout=20) == 137
    for number, status in enumerate((0, 9, 137)):
        assert f"server {number} ended with status {status}" in script.errors()


def test_servers_of_a_period_keep_their_numbers(toy_plan: Callable[..., Plan]) -> None:
    """The script starts the servers by the numbers that a schedule gives them, all of which it knows."""
    text = export_plan(toy_plan(("a", "b")), "vllm", numbers=[3, 5])["start.sh"]
    done = subprocess.run(["sh", "-s", "0"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2, "start.sh: expected one of the servers 3 5, or all\n",
    )  # fmt: skip
    assert 'servers="3 5"' in text
