"""Running servers brought to a plan, with faults at every step."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.change import Change
from packer.errors import IncompatibleError, LiveError, OutputError
from packer.evaluation import Evaluations
from packer.io import files
from packer.lengths import Lengths
from packer.live import act
from packer.live.act import Acting, apply
from packer.live.fleet_file import Host, LiveFleet, RouterFile, StepLimits
from packer.plan import Plan, Status
from packer.profile import Profile
from packer.workload import Workload
from tests.live.stand_in import StandIn

FAST = StepLimits(load_s=0.4, drain_s=0.4, start_s=5.0, answer_s=0.4, settle_s=0.0, tries=3)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(act, "POLL_S", 0.01)


@pytest.fixture
def plan_of(profile: Profile) -> Callable[[list[dict[str, float]]], Plan]:
    """A plan with these adapters and shares on its servers, four slots each; `tiny` is the base model."""
    small = replace(profile, model=replace(profile.model, name="tiny", repository="acme/tiny"))

    def make(placed: list[dict[str, float]]) -> Plan:
        names = sorted({name for own in placed for name in own})
        adapters = [Adapter(name, 8 * (name != "tiny"), 1.0) for name in names]
        fleet = Workload(adapters, Lengths.gamma(20, 0.5, high=60), Lengths.gamma(8, 0.5, high=20), 0.0)
        bins = tuple(
            Bin(tuple(names.index(n) for n in own), small.settings(4, 8), small, tuple(own.values())) for own in placed
        )
        return Plan(fleet, bins, Evaluations.of([]), Status.FEASIBLE, "gpus", "test", "twin")

    return make


@pytest.fixture
def servers() -> Iterator[list[StandIn]]:
    """Two servers: a, b and f on the first, c, d and g on the second."""
    found = [StandIn({n: f"/adapters/{n}" for n in own}) for own in ("abf", "cdg")]
    yield found
    for each in found:
        each.close()


@pytest.fixture
def fleet(servers: list[StandIn], tmp_path: Path) -> LiveFleet:
    """The servers, with a router that reads JSON and fails while there is a file `broken`."""
    router = RouterFile("routing", str(tmp_path / "router"), f"test ! -e {tmp_path}/broken")
    hosts = tuple(Host(each.url) for each in servers)
    return LiveFleet(hosts, router, FAST, state=str(tmp_path / "state.json"))


GOAL: list[dict[str, float]] = [
    {"b": 1.0, "c": 1.0, "d": 0.5, "f": 1.0},
    {"a": 1.0, "d": 0.5, "e": 1.0, "g": 1.0},
]
"""a and c change places, d becomes two, e is new."""


def run(plan: Plan, fleet: LiveFleet) -> list[str]:
    """What `packer live apply --yes` does."""
    acting = Acting(plan, fleet)
    with acting.held():
        return apply(acting, acting.changes(), "test")


def routed(fleet: LiveFleet) -> dict[str, dict[str, float]]:
    """What the router knows."""
    assert fleet.router is not None
    path = Path(fleet.router.file) / "routing.json"
    if not path.exists():
        return {}
    table = json.loads(path.read_text())["adapters"]
    return {name: {each["server"]: each["share"] for each in places} for name, places in table.items()}


def check(fleet: LiveFleet, servers: list[StandIn]) -> None:
    """Every adapter of the state is on the servers that it says, every route leads to a holder, and no adapter that
    was served is lost."""
    state = json.loads(Path(fleet.state).read_text()) if Path(fleet.state).exists() else {"servers": {}}
    by_name = {f"gpu-{k}": server for k, server in enumerate(servers)}
    for server, placed in state["servers"].items():
        missing = set(placed) - set(by_name[server].adapters)
        assert not missing or state["doing"].startswith("unload"), (missing, state["doing"])
    for name, shares in routed(fleet).items():
        assert shares, name
        for server in shares:
            assert name in by_name[server].adapters
    assert set("abcdfg") <= {name for each in servers for name in each.adapters}


def reached(fleet: LiveFleet, servers: list[StandIn]) -> bool:
    """Whether the goal holds, on servers, in the router and in the state."""
    held = [set(each.adapters) for each in servers] == [set(own) for own in GOAL]
    want: dict[str, dict[str, float]] = {}
    for k, own in enumerate(GOAL):
        for name, share in own.items():
            want.setdefault(name, {})[f"gpu-{k}"] = share
    state = json.loads(Path(fleet.state).read_text())
    said = [state["servers"][f"gpu-{k}"] for k in range(2)] == GOAL
    return held and routed(fleet) == want and said and state["doing"] == ""


def test_servers_are_brought_to_the_plan(
    servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan]
) -> None:
    """Adapters are loaded, routed and unloaded in this order, and a second run has nothing to do."""
    plan = plan_of(GOAL)
    assert run(plan, fleet) == []
    assert reached(fleet, servers)
    for server in servers:
        done = [path for path, _ in server.calls if "lora_adapter" in path]
        assert done == sorted(done), "unloads come after loads"
    acting = Acting(plan, fleet)
    with acting.held():
        assert acting.changes() == []


LOAD, UNLOAD, MODELS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models"
ASK, METRICS = "/v1/completions", "/metrics"
FAULTS = [
    *((LOAD, 1, kind) for kind in ("500", "500-after", "hang", "reset", "reset-after", "slow", "400", "garbage")),
    *((LOAD, 0, kind) for kind in ("500", "400", "wrong-path", "hang", "reset-after", "500-after")),
    *((ASK, 1, kind) for kind in ("500", "hang", "reset", "no-token", "garbage")),
    *((ASK, 0, kind) for kind in ("500", "no-token")),
    *((UNLOAD, 1, kind) for kind in ("500", "500-after", "hang", "reset", "reset-after")),
    *((UNLOAD, 0, kind) for kind in ("500", "reset-after")),
    *((METRICS, 3, kind) for kind in ("500", "hang", "garbage")),
    *((MODELS, 3, kind) for kind in ("500", "reset", "garbage")),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda each: "-".join(map(str, each)).replace("/", ""))
def test_a_fault_of_a_server_leaves_a_true_state(
    fault: tuple[str, int, str], servers: list[StandIn], fleet: LiveFleet,
    plan_of: Callable[..., Plan],
) -> None:  # fmt: skip
    """Whatever a server does, every adapter stays served as the state says, and the same command then converges."""
    plan = plan_of(GOAL)
    servers[0].faults = [fault]
    failed = run(plan, fleet)
    check(fleet, servers)
    if fault[1] == 0 and fault[2] not in ("500-after", "reset-after"):
        assert failed
    if fault[2] == "wrong-path":
        assert "was loaded from '/other', expected '/adapters/" in failed[0]
    for each in servers:
        each.faults = []
    assert run(plan, fleet) == []
    assert reached(fleet, servers)


KILLS = [
    (number, path, n, kind)
    for number, path, n in (
        (0, LOAD, 1), (1, LOAD, 1), (1, LOAD, 2), (0, ASK, 1), (1, UNLOAD, 1), (0, UNLOAD, 1), (1, METRICS, 2),
    )
    for kind in ("kill", "kill-after")
]  # fmt: skip


@pytest.mark.parametrize("kill", KILLS, ids=lambda each: "-".join(map(str, each)).replace("/", ""))
def test_packer_killed_at_a_step_goes_on_from_there(
    kill: tuple[int, str, int, str], servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan]
) -> None:
    """kill -9 before or after any call leaves every adapter served, and the same command finishes."""
    plan = plan_of(GOAL)
    context = multiprocessing.get_context("fork")
    started = context.Event()
    child = context.Process(target=lambda: started.wait() and run(plan, fleet))
    number, *fault = kill
    servers[number].faults = [(fault[0], fault[1], fault[2])]  # type: ignore[list-item]
    child.start()
    servers[number].victim = child.pid or 0
    started.set()
    child.join(20.0)
    assert child.exitcode == -9
    check(fleet, servers)
    for each in servers:
        each.faults, each.victim = [], 0
    assert run(plan, fleet) == []
    assert reached(fleet, servers)


@pytest.mark.parametrize("write", range(1, 12))
def test_a_full_disk_stops_before_the_next_step(
    write: int, servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where the state can't be written nothing further is done, and the same command finishes later."""
    plan, count = plan_of(GOAL), 0
    write_bytes = files.write_bytes

    def full(path: str | os.PathLike[str], data: bytes, *, force: bool = True) -> None:
        nonlocal count
        count += str(path) == fleet.state
        if count >= write and str(path) == fleet.state:
            raise OutputError(f"{path}: can't be written: no space left on device.")
        write_bytes(path, data, force=force)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_bytes", full)
        with pytest.raises(OutputError, match="no space"):
            run(plan, fleet)
    check(fleet, servers)
    assert run(plan, fleet) == []
    assert reached(fleet, servers)


def test_a_router_that_refuses_keeps_its_routes(
    servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan], tmp_path: Path
) -> None:
    """Where the router can't be told, nothing is unloaded and its old file is put back."""
    before = [{"a": 1.0, "b": 1.0, "f": 1.0}, {"c": 1.0, "d": 1.0, "g": 1.0}]
    run(plan_of([*before]), fleet)
    (tmp_path / "broken").touch()
    plan = plan_of(GOAL)
    acting = Acting(plan, fleet)
    with acting.held():
        acting._fresh = False
        failed = apply(acting, acting.changes(), "test")
    assert any("router did not take" in text for text in failed)
    assert routed(fleet)["a"] == {"gpu-0": 1.0}
    check(fleet, servers)
    (tmp_path / "broken").unlink()
    assert run(plan, fleet) == []
    assert reached(fleet, servers)


def test_an_adapter_with_requests_stays_loaded(
    servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan]
) -> None:
    """Nothing is unloaded before its requests have ended; past the limit it stays, and the command says so."""
    servers[0].busy = {"a"}
    said: list[str] = []
    acting = Acting(plan_of(GOAL), fleet, said.append)
    with acting.held():
        (failed,) = apply(acting, acting.changes(), "test")
    assert "did not end" in failed
    assert "a" in servers[0].adapters
    assert not any("trying again" in text for text in said), "the limit is for all attempts"
    servers[0].busy, servers[0].faults = set(), [(METRICS, 0, "garbage")]
    (failed,) = run(plan_of(GOAL), fleet)
    assert "/metrics did not say within 0.4 s that no request of 'a' is in flight" in failed
    servers[0].faults = []
    assert run(plan_of(GOAL), fleet) == []
    assert reached(fleet, servers)


def test_an_adapter_whose_load_failed_keeps_its_routes_in_later_changes(
    fleet: LiveFleet, servers: list[StandIn], plan_of: Callable[..., Plan]
) -> None:
    """An adapter is never routed to a server that does not hold it, nor unloaded from the one that does."""
    acting = Acting(plan_of([{"a": 1.0, "b": 1.0, "f": 1.0}, {"c": 1.0, "d": 1.0, "g": 1.0}]), fleet)
    servers[1].faults = [(LOAD, 0, "400")]
    later = Change(0.0, route={"a": {1: 1.0}}, unload=((0, "a"),))
    with acting.held():
        failed, stays = apply(acting, [Change(0.0, load=((1, "a"),)), later], "test")
    assert failed.startswith("load 'a' on gpu-1: ")
    assert stays == "'a' is not on all its new servers and stays as it is."
    assert routed(fleet)["a"] == {"gpu-0": 1.0}
    check(fleet, servers)


def test_a_load_waits_for_an_unload_that_failed(
    fleet: LiveFleet, servers: list[StandIn], plan_of: Callable[..., Plan]
) -> None:
    """A server never holds more adapters than it has room for, also where one of them could not be unloaded."""
    servers[0].busy = {"a"}
    full = replace(fleet, servers=(replace(fleet.servers[0], room=3), fleet.servers[1]))
    plan = plan_of([{"b": 1.0, "c": 1.0, "f": 1.0}, {"a": 1.0, "d": 1.0, "g": 1.0}])
    unload, load = run(plan, full)
    assert "unload 'a' from gpu-0" in unload
    assert load.startswith("load 'c' on gpu-0: not done, the server has room for 3 adapters")
    assert servers[0].adapters.keys() == {"a", "b", "f"}
    check(full, servers)
    servers[0].busy = set()
    assert run(plan, full) == []
    assert servers[0].adapters.keys() == {"b", "c", "f"}


def test_a_plan_goes_to_the_servers_that_have_room_for_it(
    fleet: LiveFleet, servers: list[StandIn], plan_of: Callable[..., Plan]
) -> None:
    """Adapters stay where they are only if the plan's other adapters of that server have room beside them."""
    plan = plan_of([{"c": 1.0, "d": 1.0, "e": 1.0, "g": 1.0}, {"a": 1.0, "b": 1.0}])
    near = replace(fleet, servers=(replace(fleet.servers[0], room=5), replace(fleet.servers[1], room=3)))
    with pytest.raises(IncompatibleError, match="gpu-0 has room for 5 adapters, and would hold 7, 1 of them not of"):
        run(plan_of([dict.fromkeys("abcdeg", 1.0), {"h": 1.0}]), near)
    assert run(plan, near) == []
    assert [set(each.adapters) for each in servers] == [set("cdefg"), set("ab")]


def test_the_base_model_takes_no_room_and_is_not_loaded(
    fleet: LiveFleet, servers: list[StandIn], plan_of: Callable[..., Plan]
) -> None:
    """It is routed to full servers, and a server that does not answer is asked for nothing."""
    hosts = (*(replace(each, room=3) for each in fleet.servers), Host("http://127.0.0.1:9"))
    plan = plan_of([{**dict.fromkeys(own, 1.0), "tiny": 0.5} for own in ("abf", "cdg")])
    assert run(plan, replace(fleet, servers=hosts)) == []
    assert routed(fleet)["tiny"] == {"gpu-0": 0.5, "gpu-1": 0.5}
    assert not [path for each in servers for path, _ in each.calls if "lora_adapter" in path]


def test_two_at_once_are_refused(fleet: LiveFleet, plan_of: Callable[..., Plan]) -> None:
    """A second process does not change servers that a first one changes; a lock that can't be made names no other."""
    acting = Acting(plan_of(GOAL), fleet)
    with acting.held(), pytest.raises(OutputError, match="another process writes"):
        run(plan_of(GOAL), fleet)
    Path(f"{fleet.state}2.lock").touch()
    for state, why in ((f"{fleet.state}2", "File exists"), ("/proc/none/state", "No such file or directory")):
        with pytest.raises(OutputError, match=rf"locked beside their file `state`: .* can't be made: .*{why}"):
            run(plan_of(GOAL), replace(fleet, state=state))


def test_servers_of_another_model_are_refused(
    servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan]
) -> None:
    """A plan for another model, or other slots, changes nothing."""
    servers[0].base = "large"
    with pytest.raises(IncompatibleError, match="serves 'large', the plan is for 'tiny'"):
        run(plan_of(GOAL), fleet)
    assert not [path for each in servers for path, _ in each.calls if "lora_adapter" in path]
    with pytest.raises(IncompatibleError, match="at least 3 servers, as the plan has, got 2"):
        run(plan_of([{"a": 1.0}, {"b": 1.0}, {"c": 1.0}]), fleet)


def test_a_plan_for_another_engine_is_refused(
    servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan]
) -> None:
    """SGLang loads adapters in another way than vLLM: its servers are asked nothing."""
    plan = plan_of(GOAL)
    profile = plan.bins[1].profile
    other = replace(profile, engine=replace(profile.engine, name="sglang", version="0.5"))
    bins = (plan.bins[0], replace(plan.bins[1], profile=other))
    with pytest.raises(IncompatibleError, match=r"Expected a plan for vLLM, .* got one for 'sglang'"):
        run(replace(plan, bins=bins), fleet)
    assert not any(each.calls for each in servers)


def test_a_redirect_is_not_followed_and_keys_stay_in_headers(
    servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The key is sent in a header alone: it is in no file, message or body."""
    monkeypatch.setenv("FLEET_KEY", "sesame-4711")
    said: list[str] = []
    servers[0].faults = [(LOAD, 0, "400")]
    acting = Acting(plan_of(GOAL), replace(fleet, api_key_env="FLEET_KEY"), said.append)
    with acting.held():
        failed = apply(acting, acting.changes(), "test")
    assert servers[0].headers[0]["Authorization"] == "Bearer sesame-4711"
    texts = [*said, *failed, Path(fleet.state).read_text(), json.dumps([c for s in servers for c in s.calls])]
    assert not any("sesame" in text for text in (*texts, *capsys.readouterr()))


def test_a_server_that_is_away_is_left_alone(
    servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan]
) -> None:
    """A plan that needs a server which does not answer is not begun: the server failed, not the input."""
    servers[1].close()
    with pytest.raises(LiveError, match="No server fits"):
        run(plan_of(GOAL), fleet)
    assert servers[0].adapters.keys() == {"a", "b", "f"}


def test_a_command_of_the_user_fails_with_its_words(
    servers: list[StandIn], fleet: LiveFleet, plan_of: Callable[..., Plan]
) -> None:
    """A start that fails says what the command said."""
    acting = Acting(plan_of(GOAL), fleet)
    with pytest.raises(LiveError, match="status 3: no such unit"):
        acting.servers[0].command("echo no such unit {name} >&2; exit 3")
