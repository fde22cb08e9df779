"""The load generator: open loop, correct counts, files that other tools read."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packer.arrival import RequestTrace
from packer.errors import FileFormatError
from packer.live import client, results
from packer.live.client import run_load
from packer.live.launch import Launch
from packer.live.load import LoadJob, run_job
from packer.live.metrics import summarise
from packer.live.results import LoadResult, read_result, write_result
from packer.live.server import LiveServer
from packer.workload import Workload
from tests.live.loads import SLOTS, job


def test_every_request_is_served_and_counted(url: str, fleet: Workload) -> None:
    """With time to drain, all that was sent completes with all its tokens, and the figures add up."""
    result = asyncio.run(run_load(replace(job(url, fleet), drain_s=10.0)))
    assert result.complete
    assert len(result.done) == len(result.state) > 20
    assert np.array_equal(result.received_tokens, result.output_tokens)
    assert len(result.gaps_s) == int((result.output_tokens - 1).sum())
    assert np.all(result.sent_s >= result.scheduled_s)
    assert result.total_token_throughput == pytest.approx(
        (result.input_tokens.sum() + result.output_tokens.sum()) / result.duration_s
    )
    assert any("vllm:num_requests_running" in text for _t, text in result.metrics)


def test_the_load_is_open_loop(with_fault: Callable[..., Launch], fleet: Workload, tmp_path: Path) -> None:
    """A server that never answers doesn't delay a single request; all count as unfinished."""
    with LiveServer(with_fault("hang:0"), SLOTS, tmp_path) as server:
        assert server.start() is None
        result = asyncio.run(run_load(replace(job(server.url, fleet, 0.5), duration_s=1.2)))
    assert np.all(result.state == results.UNFINISHED)
    assert np.all(np.isfinite(result.sent_s))
    assert not len(result.done)
    assert result.summary()["mean_ttft_ms"] is None


def test_more_requests_are_outstanding_than_a_shell_opens_files(
    url: str, fleet: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client takes as many connections as the system allows: a shell's usual limit is 1,024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps(job(url, fleet, 0.1)))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        client.main([str(tmp_path / "load.npz")])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_macos_refuses_to_open_as_many_files_as_its_hard_limit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the client takes the largest limit that the system allows for certain."""
    taken: list[int] = []

    def limit(_what: int, limits: tuple[int, int]) -> None:
        if limits[0] > client.OPEN_MAX:
            raise ValueError("current limit exceeds maximum limit")
        taken.append(limits[0])

    monkeypatch.setattr(resource, "getrlimit", lambda _what: (256, 2**63 - 1))
    monkeypatch.setattr(resource, "setrlimit", limit)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(EOFError):
        client.main([str(tmp_path / "load.npz")])
    assert taken == [10_240]


def test_a_hanging_server_ends_the_run(with_fault: Callable[..., Launch], fleet: Workload, tmp_path: Path) -> None:
    """No token for the stall limit: the run ends early, says why and keeps what was measured before."""
    with LiveServer(with_fault("hang:5"), SLOTS, tmp_path) as server:
        assert server.start() is None
        result = asyncio.run(run_load(replace(job(server.url, fleet, 60.0), stall_s=0.3)))
    assert "hangs" in result.ended
    assert result.duration_s < 30.0
    assert len(result.done) >= 5


def test_errors_are_counted_by_message(with_fault: Callable[..., Launch], fleet: Workload, tmp_path: Path) -> None:
    """Failed requests carry the server's words; a server that fails them all ends the run."""
    with LiveServer(with_fault("http500"), SLOTS, tmp_path) as server:
        assert server.start() is None
        result = asyncio.run(run_load(replace(job(server.url, fleet, 60.0), failures_to_stop=10)))
    assert "fails" in result.ended
    assert sum(result.errors.values()) == int((result.state == results.FAILED).sum()) >= 10
    assert next(iter(result.errors)).startswith("HTTP 500")


def test_one_refused_adapter_fails_alone(with_fault: Callable[..., Launch], fleet: Workload, tmp_path: Path) -> None:
    """Requests of an adapter that the server refuses fail; the others are served."""
    with LiveServer(with_fault("refuse:a1"), SLOTS, tmp_path) as server:
        assert server.start() is None
        result = asyncio.run(run_load(replace(job(server.url, fleet), drain_s=10.0)))
    failed = result.state == results.FAILED
    assert np.array_equal(failed, result.adapter == 1)
    assert failed.any()


def test_a_server_that_stops_answering_hangs_however_short_the_run(
    with_fault: Callable[..., Launch], fleet: Workload, tmp_path: Path
) -> None:
    """A run shorter than the stall limit that ends in silence is not complete: the server hangs."""
    with LiveServer(with_fault("hang:5"), SLOTS, tmp_path) as server:
        assert server.start() is None
        result = asyncio.run(run_load(job(server.url, fleet, 1.0)))
    assert result.duration_s == 1.0
    assert "hangs" in result.ended
    assert result.fault == result.ended


@pytest.fixture
def result() -> LoadResult:
    """Three requests: two complete, one unfinished."""
    return LoadResult(
        np.array([0.0, 1.0, 2.0]),
        np.array([0, 1, 0]),
        np.array([10, 20, 30]),
        np.array([2, 3, 4]),
        np.array([0.0, 1.001, 2.0]),
        np.array([0.5, 1.501, 2.5]),
        np.array([0.6, 1.801, np.nan]),
        np.array([2, 3, 1]),
        np.array([results.COMPLETED, results.COMPLETED, results.UNFINISHED]),
        np.array([0.1, 0.2, 0.1, 0.4]),
        np.array([0, 1, 1, 2]),
        duration_s=10.0,
    )


def test_figures_are_those_of_vllm_bench(result: LoadResult) -> None:
    """Worked by hand: completed requests only, TTFT from sending, gaps per chunk, TPOT per request."""
    summary = result.summary()
    assert summary["completed"] == 2
    assert summary["unfinished"] == 1
    assert summary["total_token_throughput"] == pytest.approx(3.5)
    assert summary["output_throughput"] == pytest.approx(0.5)
    assert summary["mean_ttft_ms"] == pytest.approx(500.0)
    assert summary["mean_tpot_ms"] == pytest.approx((100.0 + 150.0) / 2)
    assert summary["mean_itl_ms"] == pytest.approx(400.0 / 3)
    assert result.mean_gap_ms == pytest.approx(400.0 / 3)
    assert summary["offered_tok_s"] == pytest.approx(6.9)
    assert summary["send_lateness_max_ms"] == pytest.approx(1.0)


def test_the_bench_file_is_json(result: LoadResult) -> None:
    """It has what is said of the run, and the figures."""
    data = json.loads(json.dumps(result.to_bench(model_id="base")))
    assert data["model_id"] == "base"
    assert data["num_prompts"] == 3
    assert data["completed"] == 2


def test_a_result_file_round_trips(result: LoadResult, tmp_path: Path) -> None:
    """Everything comes back, gaps of unfinished requests and the pages of /metrics included."""
    full = replace(result, metrics=((0.0, "a"), (1.0, "")), errors={"x": 2}, ended="interrupted")
    write_result(full, tmp_path / "r.npz")
    read = read_result(tmp_path / "r.npz")
    assert read.metrics == full.metrics
    assert read.errors == {"x": 2}
    assert not read.complete
    assert np.array_equal(read.gap_owner, full.gap_owner)
    assert np.array_equal(read.finish_s, full.finish_s, equal_nan=True)


def test_a_damaged_result_file_is_named(tmp_path: Path) -> None:
    """Half a file is an error with its name, not a traceback."""
    (tmp_path / "r.npz").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(FileFormatError, match=r"r\.npz"):
        read_result(tmp_path / "r.npz")


@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_in_a_result_file(result: LoadResult, tmp_path: Path, seed: int) -> None:
    """A damaged archive raises almost anything in its readers: here one short error, or it is read."""
    path = tmp_path / "r.npz"
    write_result(result, path)
    data = bytearray(path.read_bytes())
    for at in np.random.default_rng(seed).integers(0, len(data), 12):
        data[at] ^= 0x5A
    path.write_bytes(bytes(data))
    try:
        read_result(path)
    except FileFormatError as error:
        assert len(str(error)) < 500 + len(str(path))  # noqa: PT017


def test_a_result_file_that_unpacks_to_gigabytes(
    result: LoadResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes in the archive are checked before anything is unpacked."""
    write_result(result, tmp_path / "r.npz")
    monkeypatch.setattr("packer.live.results.MAX_BYTES", 100)
    with pytest.raises(FileFormatError, match="more than 100 bytes"):
        read_result(tmp_path / "r.npz")


def test_few_failures_do_not_hide_what_was_served(result: LoadResult) -> None:
    """Up to 5 % of failed requests leave a run that counts; they are left out of the share that was served."""
    n = 40
    many = replace(
        result,
        **{
            name: np.resize(getattr(result, name)[:1], n)
            for name in ("scheduled_s", "adapter", "input_tokens", "output_tokens", "sent_s", "first_s",
                         "finish_s", "received_tokens", "state")
        },
    )  # fmt: skip
    failed = np.arange(n) < 2
    few = replace(many, state=np.where(failed, results.FAILED, results.COMPLETED), errors={"x": 2})
    assert few.fault is None
    assert few.served_share == 1.0
    more = replace(many, state=np.where(np.arange(n) < 3, results.FAILED, results.COMPLETED), errors={"x": 3})
    assert more.fault == "3 of 40 requests failed, mostly: x"


def test_an_empty_run_has_a_summary() -> None:
    """No requests: zero throughput and no latencies, no division by zero."""
    none, ints = np.zeros(0), np.zeros(0, dtype=np.int64)
    empty = LoadResult(none, ints, ints, ints, none, none, none, ints, ints, none, ints, duration_s=1.0)
    assert empty.summary()["total_token_throughput"] == 0.0
    assert np.isnan(empty.mean_gap_ms)


def test_the_schedule_of_the_trace_is_kept(url: str) -> None:
    """Requests leave in the trace's order and none before its time."""
    n = np.ones(20, dtype=np.int64)
    trace = RequestTrace(np.linspace(0.0, 0.5, 20), 0 * n, 5 * n, 2 * n)
    result = asyncio.run(run_load(LoadJob(url, ("a0",), trace, 0.6, drain_s=5.0, token_ids=(4, 100))))
    assert np.all(np.diff(result.sent_s) > 0)
    assert np.all(result.lateness_ms >= 0.0)


def load(launch: Launch, folder: Path, **changes: Any) -> LoadResult:
    """Three requests of two tokens to a fake server."""
    with LiveServer(launch, SLOTS, folder) as server:
        assert server.start() is None
        n = np.ones(3, dtype=np.int64)
        trace = RequestTrace(0.01 * np.arange(3), 0 * n, 5 * n, 2 * n)
        given = {"drain_s": 5.0, "metrics_interval_s": 0.1, **changes}
        job = LoadJob(server.url, ("a0",), trace, 0.5, token_ids=(4, 100), **given)
        return asyncio.run(run_load(job))


@pytest.mark.parametrize("fault", ["bad-metrics", "big-metrics", "no-metrics"])
def test_a_damaged_page_of_metrics_costs_no_request(
    fault: str, with_fault: Callable[..., Launch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are no text, damaged lines, a page without an end: what was served is kept."""
    monkeypatch.setattr(client, "LOOK_LIMIT_S", 0.5)
    result = load(with_fault(fault), tmp_path)
    assert len(result.done) == 3
    assert result.complete
    found = summarise(result.metrics)
    assert found.kv_cache is None
    assert (found.preemptions == 0.0) == (fault == "bad-metrics")


def test_counters_that_fall_are_a_restart(with_fault: Callable[..., Launch], tmp_path: Path) -> None:
    """No negative number of preemptions; the restart is counted."""
    found = summarise(load(with_fault("restart"), tmp_path).metrics)
    assert found.preemptions is not None
    assert found.preemptions >= 0
    assert found.restarts >= 1


def test_a_key_opens_the_server_and_is_in_no_file(
    with_fault: Callable[..., Launch], tmp_path: Path, fleet: Workload
) -> None:
    """The key goes to the client by its environment; a server that repeats a wrong key has it masked."""
    secret = "sk-0123456789"
    launch = with_fault("key", FAKE_KEY=f"Bearer {secret}")
    with LiveServer(launch, SLOTS, tmp_path / "server") as server:
        assert server.start() is None
        asked = job(server.url, fleet, 0.3)
        right = run_job(replace(asked, drain_s=5.0), tmp_path / "right", authorization=f"Bearer {secret}")
        wrong = run_job(asked, tmp_path / "wrong", authorization="Bearer sk-wrong")
    assert len(right.done) == len(right.state)
    assert all("HTTP 401" in message and "wrong key: ***" in message for message in wrong.errors)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert not {secret.encode(), b"sk-wrong"} & set(re.findall(rb"sk-[0-9a-z]+", path.read_bytes())), path


def test_the_client_imports_little() -> None:
    """Its process starts while the server waits: it reads no files of profiles, whose libraries take longest."""
    code = "import sys, packer.live.client; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
