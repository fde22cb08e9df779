"""The loop over running servers, against stand-ins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

import packer
from packer.cli import run
from packer.errors import IncompatibleError
from packer.live import act
from packer.live.act import Acting
from packer.live.fleet_file import Host, Limits, LiveFleet, RouterFile
from packer.operate.follow import Following, rows_of
from packer.plan import Plan
from packer.predictors.twin import TwinPredictor
from packer.report.following import live_metrics, live_page
from tests.live.stand_in import StandIn

FAST = Limits(load_s=0.5, drain_s=0.5, start_s=5.0, answer_s=0.5, settle_s=0.0, tries=1)


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
    item = found.bins[0]
    settings = profile.settings(4, 8)
    bins = tuple(replace(item, adapters=own, shares=(), settings=settings) for own in ((0, 1), (2, 3)))
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
    router = RouterFile("routing", str(tmp_path / "router"))
    fleet = LiveFleet(
        tuple(Host(each.url) for each in servers), router, FAST, state=str(tmp_path / "state.json")
    )

    def make(**given: bool) -> Following:
        acting = Acting(plan, fleet)
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


def test_a_dry_run_changes_nothing(
    following: Callable[..., Following], servers: list[StandIn], tmp_path: Path
) -> None:
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
    assert "2 adapters without a server" in page


def test_servers_of_another_model_are_not_followed(
    following: Callable[..., Following], servers: list[StandIn]
) -> None:
    """A server that the plan was not made for ends the command before anything is changed."""
    loop = following()
    for each in servers:
        each.longest = 131072
    servers[1].base = "another"
    with pytest.raises(IncompatibleError, match="Server 1 does not fit"):
        loop.run(lambda _made: None)


def test_metrics_say_what_is_there(following: Callable[..., Following], servers: list[StandIn]) -> None:
    """Loads come from the servers' counters; figures that are not known are left out."""
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
    assert drawn
    assert drawn <= set(re.findall(r"packer_live_\w+", text))
    (load,) = [
        line for line in text.splitlines() if line.startswith('packer_live_server_load_tok_s{server="gpu-0"')
    ]
    assert 1500.0 < float(load.split()[-1]) < 2600.0


def test_the_commands_apply_and_refuse(
    servers: list[StandIn], plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints the steps of a dry run, carries them out with --yes, and needs servers or a trace."""
    plan.save(tmp_path / "plan.json")
    text = "".join(f'[[servers]]\nurl = "{each.url}"\n' for each in servers)
    (tmp_path / "servers.toml").write_text(f"schema = 1\n{text}[limits]\nsettle_s = 0.0\n")
    servers[0].adapters.pop("a1")
    for each in servers:
        each.longest = plan.bins[0].profile.engine.max_model_len
    words = ["live", "apply", str(tmp_path / "plan.json"), "--servers", str(tmp_path / "servers.toml")]
    assert run([*words, "--dry-run"]) == 0
    assert "load 'a1' on gpu-0" in capsys.readouterr().out
    assert "a1" not in servers[0].adapters
    assert run([*words, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []
    assert "a1" in servers[0].adapters
    assert run(["live", "follow", str(tmp_path / "plan.json")]) == 2


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
