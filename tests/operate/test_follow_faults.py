"""What `packer live follow` does about servers that fail or change, other hands, clocks and files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import packer
from packer.change import Change
from packer.errors import FileFormatError
from packer.live.act import Acting
from packer.live.fleet_file import Host, LiveFleet
from packer.operate.follow import Following
from packer.operate.keeper import Decision
from packer.plan import Plan
from packer.report.metrics import live_metrics, rows_of
from tests.live.stand_in import StandIn
from tests.operate.test_follow import FAST, _short, following, plan, routes, servers  # noqa: F401 - fixtures


def look(
    loop: Following,
    fleet: Callable[[], packer.Workload] | None,
    after: Callable[[list[Decision]], None] = lambda _made: None,
    turns: int = 1,
) -> None:
    """So many turns of the loop, a minute each, while the machine's clock goes back an hour in each."""
    clock = SimpleNamespace(now=0.0)

    def sleep(_s: float) -> None:
        clock.now += 60.0
        if clock.now >= 60.0 * turns:
            raise KeyboardInterrupt

    own = SimpleNamespace(time=lambda: 1e6 - 60.0 * clock.now, monotonic=lambda: clock.now, sleep=sleep)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("packer.operate.follow.time", own)
        with pytest.raises(KeyboardInterrupt):
            loop._loop(after, fleet)


def patient(made: Callable[..., Following]) -> Following:
    """A loop after its first look, which would wait a minute for the requests of an adapter that leaves."""
    loop = made()
    loop.acting.fleet = replace(loop.acting.fleet, limits=replace(FAST, drain_s=60.0))
    loop.step(0.0)
    return loop


def test_a_clock_that_jumps_delays_no_look(
    following: Callable[..., Following],  # noqa: F811
) -> None:
    """Looks are as far apart as asked for, and loads are measured over the time that passed."""
    loop = following()
    look(loop, None, turns=3)
    assert np.diff(loop.traffic.times_s).tolist() == [60.0, 60.0]


def test_metrics_say_that_a_look_failed(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    tmp_path: Path,
) -> None:
    """Where the state can't be written, what the metrics say is not that of the last look that went well."""
    loop = following()
    said: list[str] = []
    servers[1].close()
    (tmp_path / "state.json").unlink()
    (tmp_path / "state.json").mkdir()
    look(loop, None, lambda _made: said.append(live_metrics(loop, rows_of(loop))))
    assert "state.json" in loop.last_error
    assert "packer_live_error 1.0" in said[-1]
    assert 'packer_live_server_ready{server="gpu-1"} 0.0' in said[-1]
    loop.last_error, loop.acting.stopping = "", {1: 0.0}
    for _ in range(2):
        loop._stop(0.0)
    assert len(loop._going_on) == 1, "a server that can't be stopped is said once"


def test_servers_are_looked_after_while_files_cannot_be_read(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """A log or a gateway that is away, and a damaged file of the fleet, keep no adapter from another server. Which
    server does not answer is said, once."""
    loop = following()
    loop.acting.say = (said := list[str]()).append
    loop.step(0.0)
    servers[1].close()

    def away() -> packer.Workload:
        raise FileFormatError("it is away.")

    loop.read = away
    look(loop, away)
    assert set(servers[0].adapters) == {"a0", "a1", "a2", "a3"}
    assert loop.last_error.startswith("it is away.; it is away.; gpu-1: ")
    loop.step(120.0)
    assert [each[:23] for each in said if each.startswith("gpu-1")] == ["gpu-1: /v1/models: [Err"]


def test_a_server_that_is_lost_ends_the_wait_for_requests(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """While requests keep an adapter that is to leave, others are looked after: it stays for them."""
    loop = patient(following)
    servers[0].busy = {"a0"}
    servers[1].close()
    (fault,) = loop.acting.carry_out(Change(0.0, unload=((0, "a0"),)))
    assert (
        fault == "unload 'a0' from gpu-0: Requests of 'a0' did not end before another server was lost; it stays loaded."
    )


def test_routes_stay_where_no_server_could_be_reached_for_a_while(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    tmp_path: Path,
) -> None:
    """If packer's own network fails, also at its start, all servers are as they were when it is back: no copy without
    requests gets any, and shares are the same."""
    loop = following()
    servers[1].adapters["a0"], servers[0].adapters["a2"] = "/adapters/a0", "/adapters/a2"
    state = {"gpu-0": {"a0": 1.0, "a1": 1.0, "a2": 0.25}, "gpu-1": {"a0": 0.0, "a2": 0.75, "a3": 1.0}}
    loop.acting.adopt([*state.values()], "test")
    loop.step(0.0)
    before, started = (tmp_path / "router" / "routing.json").read_text(), following()
    for each in servers:
        each.faults = [("/v1/models", 0, "500")]
    with pytest.raises(SystemExit):
        started.run(lambda _made: sys.exit())
    assert started.acting.state.servers == state
    loop.step(60.0)
    for each in servers:
        each.faults = []
    assert loop.step(120.0) == []
    assert loop.acting.state.servers == state
    assert (tmp_path / "router" / "routing.json").read_text() == before


def test_what_another_hand_did_is_said_and_routed(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    tmp_path: Path,
) -> None:
    """An adapter loaded by hand gets its route at the next look; one unloaded by hand comes back if it is served. What
    was done while packer was off is said at its start."""
    loop = following()
    said: list[str] = []
    loop.acting.say = said.append
    loop.step(0.0)
    servers[0].adapters["own"] = "/adapters/own"
    loop.step(30.0)
    assert loop.last_error == "gpu-0 does not hold what packer left there: 'own' came"
    assert routes(tmp_path)["own"] == ["gpu-0"]
    servers[0].adapters["more"] = "/adapters/more"
    del servers[0].adapters["a1"]
    loop.step(60.0)
    what = "gpu-0 does not hold what packer left there: 'more' came, 'a1' left"
    assert (said.count(what), loop.last_error) == (1, what)
    assert any("a1" in each.adapters for each in servers)
    loop.step(120.0)
    assert (said.count(what), loop.last_error) == (1, "")
    del servers[0].adapters["own"]
    with pytest.raises(SystemExit):
        loop.run(lambda _made: sys.exit())
    assert "gpu-0 does not hold what packer left there: 'own' left" in said, "before the first look"


def test_no_server_stops_because_its_tokens_are_not_counted(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """Counters that a version of vLLM calls otherwise are no load of 0: the last known load stands, and it is said."""
    loop = following()
    loop.acting.say = (said := list[str]()).append
    loop._stoppable = [True, True]
    loop.keeper.capacity.of = lambda _server, _load: 1000.0  # type: ignore[method-assign]
    for minute in range(60):
        count, name = 18_000 * minute, "vllm" if minute < 5 else "vllm:new"
        for each in servers:
            each.counters = f"{name}:prompt_tokens_total {count}\n{name}:generation_tokens_total 0\n"
        assert loop.step(60.0 * minute) == []
    assert loop.load.sum() == pytest.approx(600.0, rel=0.02)
    assert loop.last_error == "gpu-0: /metrics counts no tokens.; gpu-1: /metrics counts no tokens." == "; ".join(said)


def test_what_no_start_or_stop_would_do_is_not_decided(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """A server with requests of another hand's adapter is not stopped, and one that still answers after its stop is
    not started: its start command would be left out. One that goes on answering was not stopped, which is said."""
    loop = following()
    loop.acting.say = (said := list[str]()).append
    loop._startable = loop._stoppable = [True, True]
    servers[0].adapters["own"] = "/adapters/own"
    loop.step(0.0)
    assert (loop.keeper.may_start, loop.keeper.may_stop) == ([True, True], [False, True])
    loop._leaving = {1: 90.0}
    loop.step(60.0)
    assert loop.keeper.may_start == [True, False]
    loop.step(120.0)
    assert loop.keeper.may_start == [True, True]
    assert said[-1] == loop.last_error == "gpu-1 still answers after its stop and serves again"


def test_a_server_that_comes_back_as_another_one_does_not_serve(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    tmp_path: Path,
) -> None:
    """A server that was started again with another model or other slots gets no adapters, and it is said; started as
    planned, it serves again."""
    loop = following()
    said: list[str] = []
    loop.acting.say = said.append
    loop.step(0.0)
    base, servers[1].base = servers[1].base, "another"
    loop.keeper.rooms = [2, None]
    loop.step(60.0)
    assert set(routes(tmp_path)) == {"a0", "a1"}, "none to another model"
    loop.keeper.rooms = [None, None]
    loop.step(90.0)
    assert set(servers[0].adapters) == {"a0", "a1", "a2", "a3"}
    assert routes(tmp_path)["a3"] == ["gpu-0"]
    assert said[0].startswith("Server 1 does not fit the plan: gpu-1 serves 'another', the plan is for ")
    assert said[0] in loop.last_error
    servers[1].base = base
    loop.step(120.0)
    assert (loop.keeper.serving, loop.last_error) == ([0, 1], "")
    servers[1].slots = 8
    for time_s in (130.0, 140.0):
        loop.step(time_s)
    assert (loop.keeper.serving, "max_loras 8, the plan says 4" in loop.last_error) == ([0], True)
    servers[1].slots = 4
    loop.step(180.0)
    assert (loop.keeper.serving, loop.last_error) == ([0, 1], "")


def test_a_load_that_fails_is_tried_on_another_server(
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A server whose loads fail stays the emptiest one; adapters without a server go to others at the next look."""
    broken = StandIn({}, servers[0].base)
    broken.faults = [("/v1/load_lora_adapter", 0, "500")]
    hosts = tuple(Host(each.url) for each in (*servers, broken))
    loop = Following(Acting(plan, LiveFleet(hosts, None, FAST, state=str(tmp_path / "state"))), plan.workload, 1.0)
    loop.step(0.0)
    servers[1].close()
    for time_s in (60.0, 120.0):
        loop.step(time_s)
    assert (set(servers[0].adapters), loop.pending) == ({"a0", "a1", "a2", "a3"}, 0)
    loop.step(800.0)
    assert loop.keeper.refused == set(), "it may be mended"
    broken.close()


def test_a_wait_for_requests_delays_no_look(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
) -> None:
    """Requests to an adapter that leaves may last longer than the time between looks; it is tried again after each."""
    loop = patient(following)
    servers[0].busy, loop._due_s = {"a0"}, time.monotonic() + 0.05
    (fault,) = loop.acting.carry_out(Change(0.0, unload=((0, "a0"),)))
    assert fault.endswith("Requests of 'a0' did not end before the next look; it stays loaded.")


def test_what_is_wrong_is_said_once_however_long_it_is(
    following: Callable[..., Following],  # noqa: F811
) -> None:
    """A sentence is not repeated at the next look, where `last_error` has no room for it; after a pause it is."""
    loop, said, long = following(), list[str](), "x" * 500
    loop.acting.say = said.append
    loop._say_new([long])
    loop.step(0.0)
    loop._say_new([long])
    assert said.count(long) == 1
    loop.step(60.0)
    loop.step(120.0)
    loop._say_new([long])
    assert said.count(long) == 2


def test_a_rise_within_the_window_of_a_log_is_followed_at_once(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
) -> None:
    """A log's last hour shows a load that doubles only an hour later: how it changes comes from the servers' counters,
    unless these can't be read."""
    loop = following()
    loop.read = lambda: plan.workload
    load = float(plan.workload.offered_tok_s_by_adapter.sum())
    page = "vllm:prompt_tokens_total {0}\nvllm:generation_tokens_total 0\n".format
    count = 0.0
    for minute in range(40):
        count += 30.0 * load * (2.0 if minute > 20 else 1.0)
        for each in servers:
            each.counters = page(count)
        seen = loop.observed(60.0 * minute)
    assert seen.recent_tok_s == pytest.approx(2.0 * load, rel=0.02)
    assert seen.load_tok_s.sum() == pytest.approx(load, rel=0.02)
    servers[0].faults = [("/metrics", 0, "500")]
    assert loop.observed(2400.0).recent_tok_s == pytest.approx(load)


def test_what_servers_that_are_gone_no_longer_serve_is_still_asked_for(
    following: Callable[..., Following],  # noqa: F811
    servers: list[StandIn],  # noqa: F811
    plan: Plan,  # noqa: F811
) -> None:
    """A log has the requests that come, counters have what is served: while servers are gone, the load is the log's."""
    loop = following()
    loop.read = lambda: plan.workload
    load = float(plan.workload.offered_tok_s_by_adapter.sum())
    for minute in range(40):
        for each in servers:
            each.counters = f"vllm:prompt_tokens_total {30.0 * load * minute}\nvllm:generation_tokens_total 0\n"
        if minute == 20:
            servers[0].close()
            servers[1].close()
        seen = loop.observed(60.0 * minute)
    assert not seen.ready.any()
    assert seen.recent_tok_s == pytest.approx(load)
