"""The load generator in a process of its own: its result, and that nothing is left of it however the run ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packer.live.load import STOPPING, run_job
from packer.live.results import read_result
from packer.live.server import get
from packer.workload import Workload
from tests.live.loads import job


def test_a_process_of_its_own_gives_the_same_kind_of_result(url: str, fleet: Workload, tmp_path: Path) -> None:
    """The client process reads its job, runs it and leaves a result that can be read again."""
    result = run_job(replace(job(url, fleet), drain_s=10.0), tmp_path / "run")
    assert result.complete
    assert len(result.done) == len(result.state)
    assert read_result(tmp_path / "run" / "load.npz").summary() == result.summary()


def test_stopping_keeps_a_partial_result(url: str, fleet: Workload, tmp_path: Path) -> None:
    """An interrupted run is on disk, marked, with what completed until then."""

    def answered() -> int:
        found = re.search(r"generation_tokens_total\S* (\d+)", get(url, "/metrics")[1])
        assert found is not None
        return int(found[1])

    enough = answered() + 200
    result = run_job(job(url, fleet, 60.0), tmp_path, stop=lambda: answered() > enough)
    assert result.ended == "interrupted"
    assert len(result.done) > 0
    assert result.duration_s < 60.0


def test_stopping_before_the_client_is_ready_gives_a_result(url: str, fleet: Workload, tmp_path: Path) -> None:
    """A client that is interrupted while it still imports leaves an empty result, marked."""
    result = run_job(job(url, fleet, 60.0), tmp_path, stop=lambda: True)
    assert result.ended == "interrupted"
    assert len(result.done) == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOPPING)


def test_an_interrupt_while_the_client_is_started_ends_it(
    url: str, fleet: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that comes between the start of the client and the first look at it leaves no client behind."""
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_job(job(url, fleet, 60.0), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [each.poll() is not None for each in started] == [True]
