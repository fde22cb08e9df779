"""Sessions: turns follow each other in time and content, and find in the KV cache what was said before."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts, RequestTrace
from packer.blocks import Blocks
from packer.cluster import Cluster
from packer.errors import IncompatibleError
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.sessions import Sessions
from packer.twin.arrivals import draw_requests
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.simulate import simulate
from packer.workload import Workload

FLEET = Workload(
    [Adapter(f"a{i}", 8, rate) for i, rate in enumerate((0.2, 1.0, 3.0))],
    Lengths.gamma(223.0, 1.1),
    Lengths.lognormal(195.0, 1.0),
)
SLOW = Workload([Adapter(f"a{i}", 8, 0.05) for i in range(3)], Lengths.gamma(80, 1.0), Lengths.gamma(40, 1.0), -0.2)
SESSIONS = Sessions(turns=5, think_s=8.0, turn_tokens=40)


def test_turns_grow_by_what_was_said_and_follow_in_time() -> None:
    """A turn's prompt is the one before it, its output and at least one token; it comes after the expected answer."""
    trace = draw_requests(replace(FLEET, sessions=SESSIONS), 400.0, 3)
    assert trace.sessions is not None
    assert np.all(np.diff(trace.time_s) >= 0.0)
    pairs = 0
    for session in np.unique(trace.sessions).tolist():
        rows = np.flatnonzero(trace.sessions == session)
        assert len(set(trace.adapter[rows].tolist())) == 1
        for before, after in itertools.pairwise(rows.tolist()):
            said = trace.input_tokens[before] + trace.output_tokens[before]
            assert trace.input_tokens[after] > said
            expected_s = 0.5 + 0.03 * trace.output_tokens[before]
            assert trace.time_s[after] >= trace.time_s[before] + expected_s - 1e-9
            pairs += 1
    assert pairs > 100


def test_blocks_of_a_session_are_a_chain_and_no_other_sessions() -> None:
    """A turn has the ids of the turn before it, then its own; sessions share those of the adapter's prefix alone."""
    adapters = tuple(replace(each, shared_prefix_tokens=64) for each in FLEET.adapters)
    trace = draw_requests(replace(FLEET, adapters=adapters, sessions=SESSIONS), 300.0, 1)
    blocks = trace.blocks
    assert blocks is not None
    assert trace.sessions is not None
    Blocks(blocks.starts, blocks.ids, blocks.tokens)  # the chain holds
    longest: dict[int, list[int]] = {}
    users: dict[int, set[tuple[str, int]]] = {}
    for k in range(len(trace)):
        ids = blocks.ids[blocks.starts[k] : blocks.starts[k + 1]].tolist()
        assert len(ids) == (trace.input_tokens[k] + trace.output_tokens[k]) // blocks.tokens
        session, adapter = int(trace.sessions[k]), int(trace.adapter[k])
        before = longest.get(session, [])
        assert ids[: len(before)] == before
        longest[session] = ids
        for place, each in enumerate(ids):
            users.setdefault(each, set()).add(("session", session) if place >= 4 else ("adapter", adapter))
    assert all(len({number for kind, number in who if kind == "session"}) <= 1 for who in users.values())


@pytest.mark.parametrize(
    "arrivals",
    [
        Arrivals(),
        Arrivals("lognormal", cv=2.0),
        Arrivals("piecewise", period_s=100.0, factors=(0.5, 1.5)),
        Arrivals("bursty", common=Bursts(0.5, ((20.0, 1.0),))),
    ],
)
def test_sessions_keep_rates_and_mean_prompts(arrivals: Arrivals) -> None:
    """Requests of all turns come at the adapters' rates from the first second on, with the prompts that are said."""
    fleet = replace(FLEET.with_arrivals(arrivals), sessions=SESSIONS)
    runs = [draw_requests(fleet, 1000.0, seed) for seed in range(12)]
    counts = np.mean([np.bincount(run.adapter, minlength=len(fleet)) for run in runs], axis=0)
    assert counts == pytest.approx(1000.0 * fleet.rates, rel=0.08)
    early = np.mean([np.searchsorted(run.time_s, 200.0) for run in runs])
    assert early == pytest.approx(200.0 * fleet.rate, rel=0.15)
    prompts = np.concatenate([run.input_tokens for run in runs])
    expected = float(fleet.rates @ fleet.mean_input_tokens) / fleet.rate
    assert prompts.mean() == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("arrivals", [Arrivals(), Arrivals("piecewise", period_s=100.0, factors=(0.5, 1.5))])
def test_long_sessions_are_repeated_instead_of_drawn_for_days(
    arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter with sessions of days costs no draws of days; rates hold, and each repetition is its own session."""
    monkeypatch.setattr("packer.twin.arrivals.MOST_EARLIER", 20_000)
    long = Adapter("long", 8, 0.2, sessions=Sessions(10, think_s=86_400.0))
    fleet = replace(FLEET, adapters=(long, *FLEET.adapters), sessions=SESSIONS).with_arrivals(arrivals)
    runs = [draw_requests(fleet, 1000.0, seed) for seed in range(10)]
    counts = np.mean([np.bincount(run.adapter, minlength=len(fleet)) for run in runs], axis=0)
    assert counts == pytest.approx(1000.0 * fleet.rates, rel=0.1)
    run = runs[0]
    assert run.sessions is not None
    for session in np.unique(run.sessions[run.adapter == 0]).tolist():
        rows = np.flatnonzero(run.sessions == session)
        assert np.all(np.diff(run.input_tokens[rows]) > run.output_tokens[rows[:-1]])


def test_a_longer_run_begins_with_the_same_sessions() -> None:
    """The requests of the first seconds do not depend on how long the run is."""
    fleet = replace(FLEET, sessions=SESSIONS)
    short, long = (draw_requests(fleet, duration_s, 5) for duration_s in (100.0, 300.0))
    n = len(short)
    for key in ("time_s", "adapter", "input_tokens", "output_tokens"):
        assert getattr(long, key)[:n].tolist() == getattr(short, key).tolist()


def test_one_turn_is_no_session() -> None:
    """`turns=1` draws the same bytes as a fleet without sessions."""
    plain, single = (
        draw_requests(FLEET, 200.0, 2),
        draw_requests(replace(FLEET, sessions=Sessions(1)), 200.0, 2),
    )
    assert single.sessions is None
    assert plain.time_s.tobytes() == single.time_s.tobytes()
    assert plain.input_tokens.tobytes() == single.input_tokens.tobytes()


def test_a_turn_finds_what_was_computed_for_the_turn_before_it() -> None:
    """With a large KV cache and slow users a turn hits all full blocks before the last token of the turn before it."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    profile = replace(profile, engine=replace(profile.engine, version="0.32.0", max_model_len=100_000))
    fleet = replace(SLOW, sessions=Sessions(turns=4, think_s=30.0, turn_tokens=30))
    sim = simulate(fleet, profile, max_loras=3, duration_s=2000.0)
    sent = draw_requests(fleet, 2000.0, 0)
    assert sent.sessions is not None
    assert sim.raw.found is not None
    expected, last = np.zeros(len(sent), dtype=np.int64), dict[int, int]()
    for k, session in enumerate(sent.sessions.tolist()):
        if session in last:
            said = sent.input_tokens[last[session]] + sent.output_tokens[last[session]] - 1
            expected[k] = said // 16 * 16
        last[session] = k
    done = sim.raw.finished
    assert (expected > 0).sum() > 100
    assert sim.raw.found[done].tolist() == expected[done].tolist()
    assert sim.prefix_hit_rate == pytest.approx(expected[done].sum() / sent.input_tokens[done].sum(), abs=0.01)


def test_turns_that_are_cut_begin_as_before_on_a_server_and_in_a_cluster() -> None:
    """Where a server takes the start of a prompt only, the turn still begins with what was said before."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    profile = replace(profile, engine=replace(profile.engine, version="0.32.0", max_model_len=300))
    times, zeros = np.array([0.0, 50.0]), np.zeros(2, dtype=np.int64)
    sent = RequestTrace(times, zeros, np.array([340, 860]), np.array([400, 9]), sessions=zeros)
    fleet = Workload([Adapter("a", 8, 0.1)], arrivals=Arrivals("trace", trace=sent))
    alone = simulate(fleet, profile, max_loras=1, duration_s=100.0)
    cluster = simulate_cluster(fleet, Cluster.of(profile, 1, max_loras=1), duration_s=100.0)
    assert alone.raw.found is not None
    assert alone.raw.found.tolist() == [0, 288]
    assert alone.mean_ttft_ms == cluster.mean_ttft_ms


def test_replicas_of_an_adapter_keep_sessions_together() -> None:
    """The plan's router sends a session to one server, and shares still hold; other routers scatter its turns."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    profile = replace(profile, engine=replace(profile.engine, version="0.32.0"))
    fleet = replace(SLOW.scaled(20.0), sessions=Sessions(turns=4, think_s=10.0))
    shares = [dict.fromkeys(fleet.names, share) for share in (0.25, 0.75)]
    cluster = replace(Cluster.of(profile, 2, max_loras=3), placement=tuple(shares))
    sent = draw_requests(fleet, 400.0, 0)
    assert sent.sessions is not None
    hits = {}
    for router in ("plan", "round-robin"):
        run = simulate_cluster(fleet, cluster, router=router, duration_s=400.0)
        server = run.requests["server"].to_numpy()
        alone = [len(set(server[sent.sessions == number].tolist())) == 1 for number in np.unique(sent.sessions)]
        hits[router] = run.prefix_hit_rate
        assert all(alone) == (router == "plan")
        if router == "plan":
            assert np.mean(server == 0) == pytest.approx(0.25, abs=0.05)
    assert hits["plan"] > hits["round-robin"] + 0.05


def test_turns_of_sessions_have_no_closed_loop() -> None:
    """Turns come at times of their own, which a client that sends whenever a place is free ignores."""
    fleet, profile = (
        replace(FLEET, sessions=Sessions(turns=3)),
        load_profile("h100-64gb/llama-3.1-8b-instruct"),
    )
    trace = draw_requests(fleet, 10.0, 0)
    how: dict[str, Any] = {"max_loras": 3, "duration_s": 10.0, "concurrency": 4}
    for turns in (fleet, fleet.replaying(trace)):
        with pytest.raises(IncompatibleError, match="paced beside concurrency, or no concurrency"):
            simulate(turns, profile, **how)
        assert simulate(turns, profile, **how, paced=True).sent > 0
    alone = replace(trace, sessions=np.arange(len(trace)))
    assert simulate(fleet.replaying(alone), profile, **how).sent > 0
