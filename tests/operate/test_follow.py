"""The loop over running servers, against stand-ins."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import packer
from packer.change import Change
from packer.errors import IncompatibleError
from packer.live import act
from packer.live.fleet_file import Host, LiveFleet, RouterFile, StepLimits
from packer.operate.follow import Following
from packer.operate.keeper import Decision
from packer.plan import Plan
from packer.predictors.twin import TwinPredictor
from packer.report.metrics import live_metrics, live_page, rows_of
from tests.live.conftest import _gone
from tests.live.stand_in import StandIn

FAST = StepLimits(load_s=0.5, drain_s=0.5, start_s=5.0, answer_s=0.5, settle_s=0.0, tries=1)
NOT_DRAWN = {"packer_live_plan_info", "packer_live_last_look_timestamp_seconds"}
"""Metrics for alerts and labels, which the dashboard does not draw."""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(act, "POLL_S", 0.01)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Four adapters on two servers of the shipped profile."""
    profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    adapters = [packer.Adapter(f"a{k}", 8, 0.2) for k in range(4)]
    lengths = packer.Lengths.gamma(200.0, 1.0), packer.Lengths.gamma(100.0, 1.0)
    fleet = packer.Workload(adapters, *lengths, 0.0, name="fleet")
    found = packer.solve(fleet, profile, with_headroom=False)
    item = replace(found.bins[0], settings=profile.settings(4, 8))
    bins = tuple(replace(item, adapters=own, shares=()) for own in ((0, 1), (2, 3)))
    figures = TwinPredictor(seed=0).evaluate(fleet, bins)
    return replace(found, bins=bins, evaluations=figures, rooms=(), headroom=(), adapters=None)


@pytest.fixture
def servers(plan: Plan) -> Iterator[list[StandIn]]:
    """Two servers that hold what the plan says."""
    base = plan.bins[0].profile.model.name
    found = [StandIn({f"a{k}": f"/adapters/a{k}" for k in own}, base) for own in ((0, 1), (2, 3))]
    yield found
    for each in found:
        each.close()


@pytest.fixture
def following(servers: list[StandIn], plan: Plan, tmp_path: Path) -> Callable[..., Following]:
    """The loop, with the router's file in a folder."""
    router, hosts = RouterFile("routing", str(tmp_path / "router")), tuple(Host(each.url) for each in servers)
    fleet = LiveFleet(hosts, router, FAST, state=str(tmp_path / "state.json"))

    def make(**given: bool) -> Following:
        acting = act.Acting(plan, fleet)
        made = Following(acting, plan.workload, 1.0, **given)  # type: ignore[arg-type]
        if not made.dry_run:
            acting.adopt(acting.placement(acting.look()), "test")
        return made

    return make


def routes(tmp_path: Path) -> dict[str, list[str]]:
    """Servers of each adapter, as the router knows them."""
    table = json.loads((tmp_path / "router" / "routing.json").read_text())["adapters"]
    return {name: [each["server"] for each in places] for name, places in table.items()}


def test_a_plan_that_holds_is_left_alone(
    following: Callable[..., Following], servers: list[StandIn], tmp_path: Path
) -> None:
    """Without load or loss nothing is done; routes are those of the plan."""
    loop = following()
    assert loop.step(0.0) == []
    assert loop.step(60.0) == []
    assert not [path for each in servers for path, _ in each.calls if "lora_adapter" in path]
    assert routes(tmp_path) == {"a0": ["gpu-0"], "a1": ["gpu-0"], "a2": ["gpu-1"], "a3": ["gpu-1"]}


def test_a_lost_server_is_replaced_within_a_look_and_found_again(
    following: Callable[..., Following], servers: list[StandIn], plan: Plan, tmp_path: Path
) -> None:
    """Its adapters are on the other server, and routed there, after one look; it may come back empty."""
    loop = following()
    loop.step(0.0)
    port = servers[1].http.server_port
    servers[1].close()
    loop.step(60.0)
    assert set(servers[0].adapters) == {"a0", "a1", "a2", "a3"}
    assert all(places == ["gpu-0"] for places in routes(tmp_path).values())
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["servers"]["gpu-0"] == dict.fromkeys(("a0", "a1", "a2", "a3"), 1.0)
    servers[1] = StandIn({}, plan.bins[0].profile.model.name, port)
    loop.step(120.0)
    assert loop.keeper.serving == [0, 1]
    assert loop.last_error == ""


def test_new_adapters_get_a_server_and_others_leave(
    following: Callable[..., Following], servers: list[StandIn], plan: Plan, tmp_path: Path
) -> None:
    """The fleet may change while it is served."""
    loop = following()
    loop.step(0.0)
    fleet = plan.workload
    adapters = (*fleet.adapters[1:], packer.Adapter("new", 8, 0.1))
    loop.serve(replace(fleet, adapters=adapters))
    loop.step(60.0)
    assert sum("new" in each.adapters for each in servers) == 1
    assert not any("a0" in each.adapters for each in servers)
    assert set(routes(tmp_path)) == {"a1", "a2", "a3", "new"}
    loop.serve(fleet)  # "new" leaves again, though it is not an adapter of the plan
    loop.step(120.0)
    assert {name for each in servers for name in each.adapters} == set(routes(tmp_path)) == set(fleet.names)


def test_adapters_without_a_server_are_named(following: Callable[..., Following], servers: list[StandIn]) -> None:
    """What no server has room for is an error on the page and in the metrics, and servers are needed for it."""
    loop = following()
    said: list[str] = []
    loop.acting.say = said.append
    loop.keeper.rooms = [2, 2]
    loop.step(0.0)
    servers[1].close()
    loop.step(60.0)
    loop.step(120.0)
    text = live_metrics(loop, rows_of(loop))
    assert "packer_live_servers_needed 1.0" in text
    assert "packer_live_error 1.0" in text
    unserved, page = "no server has room for 2 adapters: a2, a3", live_page(loop, rows_of(loop))
    assert unserved in page
    assert "1 more server needed." in page
    assert said.count(unserved) == said.count("1 more server needed") == 1


def test_a_dry_run_changes_nothing(following: Callable[..., Following], servers: list[StandIn], tmp_path: Path) -> None:
    """It says what it would do, on a page, and calls nothing that changes a server."""
    loop = following(dry_run=True)
    loop.step(0.0)
    servers[1].close()
    (made, *_) = loop.step(60.0)
    assert made.loads == 2
    assert set(servers[0].adapters) == {"a0", "a1"}
    assert not (tmp_path / "state.json").exists()
    page = live_page(loop, rows_of(loop))
    assert "what would be done" in page
    assert "1 change, 2 adapters loaded" in page
    assert "2 adapters without a server" in page
    assert loop.step(120.0) == [], "what would have been done is not said again"
    assert loop.changes == 1


def test_a_dry_run_goes_on_as_if_it_had_been_done(
    following: Callable[..., Following], servers: list[StandIn], tmp_path: Path
) -> None:
    """A server that would have been started takes load after its start-up time, and what it would hold is not asked."""
    loop = following(dry_run=True)
    loop.acting.servers[1] = replace(loop.acting.servers[1], host=replace(loop.acting.servers[1].host, start="false"))
    loop._startable = [True, True]
    loop.keeper.capacity.of = lambda _server, _load: 150.0  # type: ignore[method-assign]
    servers[1].close()
    servers[0].busy = {"a0", "a1"}

    def step(now_s: float) -> list[Decision]:
        tokens = int(120.0 * now_s)
        servers[0].counters = f"vllm:prompt_tokens_total {tokens}\nvllm:generation_tokens_total {tokens}\n"
        return loop.step(now_s)

    assert [each.change.start for each in step(0.0)] == [(), (1,)]
    assert step(60.0) == []
    assert not loop._lost()
    then = step(60.0 + loop.keeper.startup_s)
    assert {s for each in then for s, _ in each.change.load} == {1}
    assert loop.keeper.serving == [0, 1]
    assert not [path for path, _ in servers[0].calls if "lora_adapter" in path]
    assert [row.adapters for row in rows_of(loop)] == [2, 0]


def test_servers_of_another_model_are_not_followed(following: Callable[..., Following], servers: list[StandIn]) -> None:
    """A server that the plan was not made for ends the command before anything is changed."""
    loop = following()
    for each in servers:
        each.longest = 131072
    servers[1].base = "another"
    with pytest.raises(IncompatibleError, match="Server 1 does not fit"):
        loop.run(lambda _made: None)


def test_metrics_say_what_is_there(following: Callable[..., Following], servers: list[StandIn]) -> None:
    """Loads come from the servers' counters; figures that are not known are left out. Servers may have any name."""
    loop = following()
    loop.step(0.0)
    servers[0].counters = "vllm:prompt_tokens_total 60000\nvllm:generation_tokens_total 60000\n"
    servers[0].busy = {"a0"}
    loop.step(60.0)
    text = live_metrics(loop, rows_of(loop))
    assert 'packer_live_server_ready{server="gpu-0"} 1.0' in text
    assert 'packer_live_server_load_tok_s{server="gpu-1"} ' in text
    assert "packer_live_servers_needed 0.0" in text
    assert re.search(r'packer_live_plan_info\{plan="fleet",version="[0-9a-f]{12}"\} 1.0', text)
    assert "packer_live_changes_pending 0.0" in text
    assert loop.drift == pytest.approx(load_now := float(loop.load.sum()) / 240.0, rel=0.01), load_now
    assert "packer_live_server_itl_ms{" not in text
    template = files("packer.export").joinpath("templates", "dashboard.json").read_text("utf-8")
    drawn = set(re.findall(r"packer_live_\w+", template))
    served = set(re.findall(r"# TYPE (packer_live_\w+)", text))
    assert drawn == served - NOT_DRAWN
    (load,) = [line for line in text.splitlines() if line.startswith('packer_live_server_load_tok_s{server="gpu-0"')]
    assert 1500.0 < float(load.split()[-1]) < 2600.0
    named = [replace(row, name='"a" \\ {b}') for row in rows_of(loop)]
    parsed = text_string_to_metric_families(live_metrics(loop, named))
    assert '"a" \\ {b}' in {each.labels.get("server") for family in parsed for each in family.samples}


def test_measured_lengths_and_hits_enter_the_decision(
    following: Callable[..., Following], servers: list[StandIn], plan: Plan
) -> None:
    """Prompts that are longer than planned by more than chance change what the server is taken to hold; it is said."""
    said: list[str] = []
    loop = following()
    loop.acting.say = said.append
    profile = plan.bins[0].profile
    profile = replace(profile, engine=replace(profile.engine, version="0.32.0"))  # which caches prefixes
    loop.keeper.kinds = [replace(kind, profile=profile) for kind in loop.keeper.kinds]
    loop.keeper.capacity.kinds = loop.keeper.kinds

    def count(requests: int) -> str:
        names = ("time_to_first_token_seconds_count", "prompt_tokens_total", "generation_tokens_total",
                 "prefix_cache_queries_total", "prefix_cache_hits_total")  # fmt: skip
        values = (requests, 1000 * requests, 100 * requests, 1000 * requests, 500 * requests)
        return "".join(f"vllm:{name} {value}\n" for name, value in zip(names, values, strict=True))

    servers[0].counters = count(0)
    loop.step(0.0)
    before = loop.keeper.caps([0, 1]).tolist()
    loop.step(60.0)
    servers[0].counters = count(1000)
    loop.step(660.0)
    (text,) = [each for each in said if "expected" in each]
    assert re.match(r"gpu-0: prompts have 1,000 tokens, 200 were expected, ± \d", text)
    assert "50.0% of the prompts' tokens are in the prefix cache, 0.0% were expected" in text
    known = loop.keeper.workload
    assert known.mean_input_tokens == pytest.approx([1000.0, 1000.0, 200.0, 200.0], rel=0.01)
    assert known.shared_prefix_tokens[0] > 300
    assert loop.keeper.caps([0])[0] != pytest.approx(before[0], rel=0.02)
    assert loop.keeper.caps([1])[0] == pytest.approx(before[1])
    text = live_metrics(loop, rows_of(loop))
    assert 'packer_live_server_prompt_tokens{server="gpu-0"} 1000.0' in text
    assert 'packer_live_server_prefix_hit_share{server="gpu-0"} 0.5' in text
    loop.serve(replace(plan.workload, adapters=(*plan.workload.adapters, packer.Adapter("new", 8, 0.1))))
    assert loop.keeper.workload.mean_input_tokens[:4] == pytest.approx(known.mean_input_tokens)


@pytest.fixture
def startable(following: Callable[..., Following], tmp_path: Path) -> Following:
    """The loop, whose second server can be started: by a command that runs on until it is ended."""
    loop = following()
    start = f"echo begun >> {tmp_path}/log; sleep 60 & echo $! > {tmp_path}/pid; wait; echo late >> {tmp_path}/log"
    for s, each in enumerate(loop.acting.servers):
        host = replace(each.host, start=start, stop=f"echo stopped {{name}} >> {tmp_path}/log")
        loop.acting.servers[s] = replace(each, host=host)
    return loop


def begun(loop: Following, log: Path) -> None:
    """Start the second server, and wait until its command runs."""
    assert loop.acting.carry_out(Change(0.0, start=(1,))) == []
    loop.keeper.on[1], loop.keeper.starting[1] = True, 1e12
    while not (log.with_name("pid").exists() and log.with_name("pid").read_text()):
        time.sleep(0.01)


def test_an_interrupted_start_leaves_no_server(
    startable: Following, servers: list[StandIn], plan: Plan, tmp_path: Path
) -> None:
    """Ctrl-C while a server starts ends the command with all its processes, and the command that stops it is run."""
    servers[1].close()
    servers[0].longest = plan.bins[0].profile.engine.max_model_len
    begun(startable, tmp_path / "log")

    def interrupt(_made: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        startable.run(interrupt)
    assert (tmp_path / "log").read_text() == "begun\nstopped gpu-1\n"
    assert _gone(int((tmp_path / "pid").read_text()))
    assert set(servers[0].adapters) == {"a0", "a1", "a2", "a3"}


def test_a_start_does_not_keep_the_loop_from_looking(
    startable: Following, servers: list[StandIn], plan: Plan, tmp_path: Path
) -> None:
    """While a server starts, the others are looked after; when it answers, it serves, and its command is left alone."""
    startable.step(0.0)
    port = servers[1].http.server_port
    servers[1].close()
    startable.step(1.0)
    begun(startable, tmp_path / "log")
    startable.step(2.0)
    assert startable.last_error == ""
    servers[1] = StandIn({}, plan.bins[0].profile.model.name, port)
    startable.step(3.0)
    assert startable.keeper.serving == [0, 1]
    startable.acting.started()
    assert startable.acting.starting == {}
    assert (tmp_path / "log").read_text() == "begun\n"


def test_a_start_that_fails_is_said_and_given_up(startable: Following, servers: list[StandIn], tmp_path: Path) -> None:
    """A command that ends with an error, or takes too long, ends the start; the keeper may start another server."""
    servers[1].close()
    acting = startable.acting
    acting.servers[1] = replace(acting.servers[1], host=replace(acting.servers[1].host, start="echo no GPU; exit 3"))
    assert acting.carry_out(Change(0.0, start=(1,))) == []
    startable.keeper.on[1], startable.keeper.starting[1] = True, 1e9
    acting.starting[1]._process.wait()
    startable.step(0.0)
    assert "ended with status 3: no GPU" in startable.last_error
    assert startable.keeper.starting == {}
    assert (tmp_path / "log").read_text() == "stopped gpu-1\n"
    acting.servers[1] = replace(acting.servers[1], host=replace(acting.servers[1].host, start="sleep 60"))
    acting.fleet = replace(acting.fleet, limits=replace(FAST, start_s=0.01))
    acting.carry_out(Change(0.0, start=(1,)))
    time.sleep(0.02)
    assert list(acting.started().values()) == ["gpu-1 was not healthy within 0.01 s."]


def test_a_plan_of_a_replayed_trace_is_followed(following: Callable[..., Following], plan: Plan) -> None:
    """The requests of a plan's trace are over: what servers hold is asked at the rates that come now."""
    loop = following()
    requests = packer.RequestTrace(np.arange(4.0), np.arange(4), np.full(4, 200), np.full(4, 100), end_s=4.0)
    replayed = plan.workload.with_arrivals(packer.Arrivals("trace", trace=requests))
    loop = Following(loop.acting, replayed, 1.0)
    loop.serve(replayed)
    assert loop.step(60.0) == []
    assert (loop.keeper.caps([0, 1]) > 100.0).all()


def test_a_trend_of_the_planned_hour_changes_no_capacity(following: Callable[..., Following], plan: Plan) -> None:
    """Rates are measured anew: the beginning of an hour whose load rises says nothing of what servers hold."""
    rising = plan.workload.with_arrivals(plan.workload.arrivals.following((1800.0, 0.1, 1.9)))
    loop = Following(following().acting, rising, 1.0)
    assert not loop.keeper.workload.arrivals.trend


def test_a_server_that_is_gone_has_no_load(following: Callable[..., Following], servers: list[StandIn]) -> None:
    """What a lost server did counts for the time that it did it, not for ever: its load is not counted twice."""
    loop = following()
    page = "vllm:prompt_tokens_total {0}\nvllm:generation_tokens_total {0}\n".format
    for each in servers:
        each.counters = page(0)
    loop.step(0.0)
    for each in servers:
        each.counters = page(300_000)
    loop.step(600.0)
    assert loop.load.sum() == pytest.approx(2000.0, rel=0.05)
    servers[1].close()
    for k in range(1, 5):
        servers[0].counters = page(300_000 + 600_000 * k)
        loop.step(600.0 * (k + 1))
        assert loop.load.sum() == pytest.approx(2000.0, rel=0.05)


def test_few_requests_change_the_planned_rates_little(
    following: Callable[..., Following], servers: list[StandIn], plan: Plan
) -> None:
    """A burst in the first second is no change of the load: planned rates count as requests that have come."""
    loop = following()
    loop.step(0.0)
    servers[0].counters = "vllm:prompt_tokens_total 600\nvllm:generation_tokens_total 600\n"
    loop.step(1.0)
    planned = float(plan.workload.offered_tok_s_by_adapter.sum())
    assert planned < loop.load.sum() < 2.0 * planned
    servers[0].counters = "vllm:prompt_tokens_total 360600\nvllm:generation_tokens_total 360600\n"
    loop.step(601.0)
    assert loop.load.sum() == pytest.approx(1200.0, rel=0.05)
