"""Campaigns on the fake server: every fault ends in a clear report, and nothing is measured twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packer.errors import FileFormatError, LiveError, ValidationError
from packer.live import calibration, environment
from packer.live.calibration import calibrate, calibrate_url, in_a_row, sessions
from packer.live.campaign import Campaign, check_adapters
from packer.live.client import run_load
from packer.live.environment import diagnose_url
from packer.live.launch import Emulation, Launch
from packer.live.load import LoadJob
from packer.live.results import LoadResult, write_result
from packer.live.server import LiveServer, ServerOptions
from packer.live.task import Endpoint, Outcome, Session, Task
from packer.profile import Profile
from packer.settings import Settings
from packer.workload import Workload


@pytest.fixture
def session(fleet: Workload) -> Session:
    """Two short loads on one server."""
    slots = ServerOptions(tuple((name, "x") for name in fleet.names), Settings(4, 8))
    return Session("s", slots, (Task("one", fleet, 0.5, seed=1), Task("two", fleet, 0.5, seed=2)))


def run(launch: Launch, session: Session, folder: Path) -> list[Outcome]:
    return Campaign(launch, folder).run([session])


def test_a_campaign_measures_and_resumes(launch: Launch, session: Session, tmp_path: Path) -> None:
    """The second run with the same folder starts no server and returns the same figures."""
    first = run(launch, session, tmp_path)
    assert [o.complete for o in first] == [True, True]
    assert first[0].kv_cache_tokens == (129 - 1) * 32
    assert first[0].metrics is not None
    assert first[0].metrics.mean_kv_usage == 0.25
    log = (tmp_path / "s" / "server.log").stat().st_mtime_ns
    again = run(launch, session, tmp_path)
    assert (tmp_path / "s" / "server.log").stat().st_mtime_ns == log
    assert [o.load.summary() for o in again if o.load] == [o.load.summary() for o in first if o.load]
    assert [o.reused for o in (*first, *again)] == [False, False, True, True]


def test_results_of_another_server_are_refused(launch: Launch, session: Session, tmp_path: Path) -> None:
    """Another launch file or URL needs another folder; what changes no measurement does not. No variable is written."""

    def begin(changed: Launch, url: str | None = None) -> None:
        endpoint = None if url is None else Endpoint(url)
        key = "launched" if url is None else "url"
        Campaign(changed, tmp_path, endpoint=endpoint).run([replace(session, key=key, tasks=())])

    begin(replace(launch, environment={"TOKEN": "hidden"}))
    begin(replace(launch, name="other", startup_timeout_s=1.0, environment={"TOKEN": "hidden"}))
    visible = {"TOKEN": "hidden", "CUDA_VISIBLE_DEVICES": "3"}
    begin(replace(launch, environment=visible))
    with pytest.raises(ValidationError, match=r"launched: .*other values of model, environment; give another"):
        begin(replace(launch, model="other"))
    begin(launch, "http://127.0.0.1:1")
    with pytest.raises(ValidationError, match="other values of url"):
        begin(launch, "http://127.0.0.1:2")
    assert all("hidden" not in path.read_text() for path in tmp_path.rglob("server.json"))


def test_other_settings_or_adapters_are_measured_anew(
    launch: Launch, session: Session, fleet: Workload, tmp_path: Path
) -> None:
    """A memory error of other slots is no result for these, nor are requests to other adapters."""
    full = replace(session, options=replace(session.options, kv_cache_bytes=0))
    run(launch, full, tmp_path)
    campaign = Campaign(launch, tmp_path)
    assert [o.reused for o in campaign.run([full])] == [True, True]
    renamed = replace(fleet, adapters=tuple(replace(a, name=f"b{a.name}") for a in fleet.adapters))
    for other in (
        replace(full, options=replace(full.options, settings=Settings(5, 8))),
        replace(full, tasks=tuple(replace(task, workload=renamed) for task in full.tasks)),
    ):
        assert [o.reused for o in campaign.run([other])] == [False, False]


def test_results_of_an_unknown_server_are_kept(launch: Launch, session: Session, tmp_path: Path) -> None:
    """Hours of measurements are neither deleted nor used again where nothing says which server they are of."""
    full = replace(session, options=replace(session.options, kv_cache_bytes=0))
    run(launch, full, tmp_path)
    (tmp_path / "s" / "server.json").unlink()
    with pytest.raises(ValidationError, match=r"Expected server\.json, .* got none; give another folder"):
        run(launch, full, tmp_path)
    assert len(list((tmp_path / "s").glob("*/failure.json"))) == 2


def test_other_requests_are_measured_anew(launch: Launch, session: Session, tmp_path: Path) -> None:
    """A result on disk counts only for the very same requests."""
    short = replace(session, tasks=session.tasks[:1])
    run(launch, short, tmp_path)
    other = replace(short, tasks=(replace(short.tasks[0], seed=9),))
    assert Campaign(launch, tmp_path).load(other, other.tasks[0]) is None


def test_a_server_that_dies_is_reported_and_restarted(
    with_fault: Callable[..., Launch], session: Session, tmp_path: Path
) -> None:
    """Each load keeps what completed before the death, is marked, and names the exit status."""
    outcomes = run(with_fault("die:5"), session, tmp_path)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert outcome.load is not None
        assert outcome.failure is not None
        assert outcome.failure.kind == "exited"
        assert "status 3" in outcome.failure.message
        assert outcome.load.ended == "the server died" or outcome.load.errors
        assert not outcome.complete
        assert len(outcome.load.done) >= 1
    assert not (tmp_path / "s" / "one" / "done.json").exists()


def test_a_hang_ends_within_its_limit(with_fault: Callable[..., Launch], session: Session, tmp_path: Path) -> None:
    """The load is cut short by the stall limit and says so; the server is stopped all the same."""
    launch = replace(with_fault("hang:3"), stall_timeout_s=0.3)
    long = replace(session, tasks=(replace(session.tasks[0], duration_s=30.0),))
    (outcome,) = run(launch, long, tmp_path)
    assert outcome.load is not None
    assert "hangs" in outcome.load.ended
    assert len(outcome.load.done) >= 3
    assert not outcome.complete


@pytest.mark.parametrize("fault", ["no-metrics", "renamed"])
def test_metrics_may_be_missing(
    fault: str, with_fault: Callable[..., Launch], session: Session, tmp_path: Path
) -> None:
    """The client's figures stand; the server's are None."""
    short = replace(session, tasks=session.tasks[:1])
    (outcome,) = run(with_fault(fault), short, tmp_path)
    assert outcome.complete
    assert outcome.metrics is not None
    assert outcome.metrics.mean_running is None
    assert outcome.kv_cache_tokens is None


def test_a_memory_error_is_a_result_for_every_load(
    with_fault: Callable[..., Launch], session: Session, tmp_path: Path
) -> None:
    """Both loads get it, it is kept on disk, and it is not tried again."""
    outcomes = run(with_fault("memory"), session, tmp_path)
    assert [o.memory_error for o in outcomes] == [True, True]
    (tmp_path / "s" / "server.log").unlink()
    assert all(o.memory_error for o in run(with_fault("memory"), session, tmp_path))
    kept = next(tmp_path.rglob("failure.json"))
    for damaged in ("{", '{"kind": "odd", "message": "x"}', '{"kind": "port"}'):
        kept.write_text(damaged)
        with pytest.raises(FileFormatError, match=r"failure\.json"):
            run(with_fault("memory"), session, tmp_path)
    assert not (tmp_path / "s" / "server.log").exists()


def test_emulated_slots_that_leave_nothing_start_no_server(launch: Launch, session: Session, tmp_path: Path) -> None:
    """The emulated budget is spent: a memory error without a start."""
    full = replace(session, options=replace(session.options, kv_cache_bytes=0))
    outcomes = run(launch, full, tmp_path)
    assert all(o.memory_error for o in outcomes)
    assert "emulated" in (outcomes[0].failure.message if outcomes[0].failure else "")


def test_the_budget_stops_the_plan(launch: Launch, session: Session, tmp_path: Path) -> None:
    """No task begins after the budget; the campaign says that it was cut short."""
    campaign = Campaign(launch, tmp_path, budget_s=0.0)
    assert campaign.run([session]) == []
    assert campaign.out_of_time


def test_an_absent_adapter_is_found_before_the_start(tmp_path: Path) -> None:
    """vLLM would need a minute to say it."""
    with pytest.raises(ValidationError, match="adapter 'a' at"):
        check_adapters(ServerOptions((("a", str(tmp_path / "none")),), Settings(1, 8)))


def test_long_requests_are_cut_as_vllm_would(fleet: Workload) -> None:
    """Prompts leave room for one token; outputs get what is left."""
    requests = Task("t", fleet, 5.0).requests(20)
    assert int((requests.input_tokens + requests.output_tokens).max()) <= 20
    assert int(requests.input_tokens.max()) <= 19


@pytest.mark.parametrize(("duration_s", "interval_s"), [(5.0, 1.0), (120.0, 2.0), (3600.0, 60.0)])
def test_long_runs_do_not_look_at_the_metrics_more_often(
    duration_s: float, interval_s: float, launch: Launch, fleet: Workload, tmp_path: Path
) -> None:
    """Rendering /metrics stops a server's output: a run has 60 looks, and at most one a second."""
    task = Task("t", fleet, duration_s)
    job = Campaign(launch, tmp_path).job(Endpoint("http://x"), task)
    assert job.metrics_interval_s == interval_s
    assert np.array_equal(job.requests.time_s, task.requests(launch.engine.max_model_len).time_s)


def test_the_twin_replays_what_was_sent(fleet: Workload) -> None:
    """The replayed workload holds exactly the task's requests."""
    task = Task("t", fleet, 5.0, seed=4)
    trace = task.replayed(256).arrivals.trace
    assert trace is not None
    assert np.array_equal(trace.time_s, task.requests(256).time_s)


def test_calibration_is_planned_by_the_grid(launch: Launch) -> None:
    """One session a server; its slots, ranks and emulated bytes are the grid's; adapters fit the slots."""
    emulated = replace(launch, emulation=Emulation(2e7, 17408.0), step_log=True)
    planned = sessions(emulated, (Settings(8, 16), Settings(2, 64)))
    assert [s.key for s in planned] == ["slots-8-rank-16", "slots-2-rank-64"]
    assert planned[0].options.kv_cache_bytes == 20_000_000 - 8 * 16 * 17408
    assert {t.key for t in planned[0].tasks} == {"probes", "mixed-light", "mixed-busy", "mixed-starved"}
    assert len(planned[0].options.adapters) == 16


def test_tasks_in_a_row_keep_their_requests(launch: Launch) -> None:
    """Merged bursts are the same requests of the same adapters, one burst after another."""
    parts = [t for t in sessions(launch, (Settings(4, 8),))[0].tasks if t.key.startswith("decode-")]
    whole = in_a_row("all", parts, 1.0)
    trace = whole.workload.arrivals.trace
    assert trace is not None
    assert len(trace) == sum(len(t.requests(256)) for t in parts)
    assert len(np.unique(trace.time_s)) == len(parts)
    names = {whole.workload.names[i] for i in trace.adapter.tolist()}
    assert names == {name for t in parts for name in t.workload.names}


def test_a_running_server_is_calibrated_from_outside(
    launch: Launch, profile: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a step log the fake server's 2 ms a step come back, whatever the batch, and its KV capacity."""
    from packer.live import calibration, campaign
    from packer.profile import Profile

    def in_this_process(job: LoadJob, place: Path, **_others: object) -> LoadResult:
        result = asyncio.run(run_load(job))
        write_result(result, place / "load.npz")
        return result

    assert isinstance(profile, Profile)
    monkeypatch.setattr(calibration, "BURST_BATCHES", (1, 8))
    monkeypatch.setattr(calibration, "MIXED_S", 0.3)
    monkeypatch.setattr(calibration, "PREFILL_PAUSE_S", 0.05)
    monkeypatch.setattr(campaign, "run_job", in_this_process)
    slots = ServerOptions(tuple((f"a{i}", "x") for i in range(4)), Settings(4, 8))
    with LiveServer(launch, slots, tmp_path / "server") as server:
        assert server.start() is None
        known = replace(profile, engine=replace(profile.engine, block_size=16))
        fitted, outcomes, late = calibrate_url(server.url, known, tmp_path / "run", settings=Settings(4, 8))
    assert not late
    assert all(o.complete for o in outcomes)
    assert fitted.memory.measured == ((4, 8, 128 * 32),)  # by the page's block size: the profile's is another
    assert fitted.calibrated
    assert fitted.latency.coefficients["base_ms"] > 1.0


def test_a_calibration_without_a_server_says_why(
    with_fault: Callable[..., Launch], profile: Profile, tmp_path: Path
) -> None:
    """No profile comes from nothing; the message has the server's reason, or says that the budget ended."""
    with pytest.raises(LiveError, match="No available memory"):
        calibrate(with_fault("memory"), tmp_path, servers=(Settings(8, 16),))
    with pytest.raises(LiveError, match=r"too short\. The budget ended .* the same command goes on from here\."):
        calibrate(with_fault(""), tmp_path / "late", servers=(Settings(8, 16),), budget_s=0.0)
    with pytest.raises(LiveError, match=r"http://127\.0\.0\.1:9 can't be reached: .*refused"):
        calibrate_url("http://127.0.0.1:9", profile, tmp_path / "off", settings=Settings(8, 16))


def test_the_doctor_looks_at_a_running_server(launch: Launch, tmp_path: Path) -> None:
    """Health, version, adapters and metrics of a URL; a dead one is reported with the remedy."""
    slots = ServerOptions((("a0", "x"),), Settings(4, 8))
    with LiveServer(launch, slots, tmp_path) as server:
        assert server.start() is None
        checks = {c.name: c for c in diagnose_url(server.url)}
        url = server.url
    assert checks["version"].detail == "vLLM 0.32.0+fake"
    assert checks["adapters"].ok
    assert "4128 tokens" in checks["metrics"].detail
    health = next(c for c in diagnose_url(url) if c.name == "health")
    assert not health.ok


@pytest.mark.parametrize(
    "models", ["[" * 5000, '{"data": {"a": 1}}', '{"data": [1]}', '{"data": 5}', "\x00", '{"data": []}']
)
def test_a_damaged_list_of_models_is_none(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor says that adapters are missing, whatever the server sends."""
    monkeypatch.setattr(environment, "get", lambda _where, _path: (200, models))
    checks = {check.name: check for check in diagnose_url("http://127.0.0.1:9")}
    assert checks["health"].ok
    assert not any(checks[name].ok for name in ("version", "adapters", "metrics"))


@pytest.mark.parametrize(("status", "words"), [(0, "can't be reached: gone"), (401, "answers 401")])
def test_a_list_of_models_that_does_not_come_has_a_reason(
    status: int, words: str, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor goes on and says it, a calibration ends with it."""
    page = "/v1/models"
    monkeypatch.setattr(environment, "get", lambda _, path: (status, "gone") if path == page else (200, "{}"))
    checks = {check.name: check for check in diagnose_url("http://127.0.0.1:9")}
    assert not checks["adapters"].ok
    assert checks["adapters"].detail.endswith(words)
    with pytest.raises(LiveError, match=words):
        calibrate_url("http://127.0.0.1:9", profile, tmp_path, settings=Settings(8, 16))


def test_a_server_that_fails_every_request_gives_no_profile(
    with_fault: Callable[..., Launch], profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the server's words."""
    monkeypatch.setattr(calibration, "BURST_BATCHES", (1,))
    monkeypatch.setattr(calibration, "MIXED_S", 0.3)
    monkeypatch.setattr(calibration, "PREFILL_PAUSE_S", 0.05)
    slots = ServerOptions(tuple((f"a{i}", "x") for i in range(4)), Settings(4, 8))
    with LiveServer(with_fault("http500"), slots, tmp_path / "server") as server:
        assert server.start() is None
        with pytest.raises(LiveError, match=r"No server could be measured: .* failed.*HTTP 500"):
            calibrate_url(server.url, profile, tmp_path / "run", settings=Settings(4, 8), budget_s=5.0)
