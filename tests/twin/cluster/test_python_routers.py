"""Routers written in Python: what they see, what they may do, and what is said when they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.errors import IncompatibleError, InputError, PluginError, UnknownNameError, ValidationError
from packer.profile import Profile
from packer.twin.cluster.caching import LRU, Move
from packer.twin.cluster.routers.base import HOLD, AnyCluster, Request
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.view import ClusterView
from packer.workload import Workload


class Idle:
    """The rule of "most-idle", in Python."""

    name = "idle"

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Every cluster."""
        return None

    def start(self, view: ClusterView, seed: int) -> None:
        """Nothing to prepare."""

    def route(self, request: Request, view: ClusterView) -> int:
        """The first in turn of those with the fewest requests."""
        own = view.candidates(request.adapter).tolist()
        turn = [own[(request.number + k) % len(own)] for k in range(len(own))]
        load = view.running + view.waiting
        return int(min(turn, key=lambda s: load[s]))


class Narrow(Idle):
    """Holds requests while every server has two."""

    def route(self, request: Request, view: ClusterView) -> int:
        """The most idle server with fewer than two requests."""
        s = super().route(request, view)
        return s if (view.running + view.waiting)[s] < 2 else HOLD


class Broken(Idle):
    """Fails on its third request."""

    def __init__(self, wrong: object) -> None:
        self.wrong = wrong

    def route(self, request: Request, view: ClusterView) -> int:
        """Server 0, until it goes wrong."""
        if request.number < 2:
            return super().route(request, view)
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong  # type: ignore[return-value]


@pytest.mark.parametrize("placed", [False, True])
def test_python_and_compiled_router_decide_alike(placed: bool, case: Callable[..., Any]) -> None:
    """The same rule in Python and compiled sends every request to the same server."""
    for seed in range(8):
        found = case(seed, placed=placed)
        runs = [
            simulate_cluster(found.workload, found.cluster, router=router, duration_s=found.duration_s)
            for router in (Idle(), "most-idle")
        ]
        assert runs[0].requests.equals(runs[1].requests)


def test_held_requests_keep_their_order(case: Callable[..., Any]) -> None:
    """With at most two requests per server, requests are given first come, first served, and none is lost."""
    found = case(2)
    run = simulate_cluster(found.workload, found.cluster, router=Narrow(), duration_s=60.0)
    assert run.completed == run.sent
    assert run.max_running <= 2
    assert run.state is not None
    given = run.state.requests["sent_s"]
    assert (given[1:] >= given[:-1]).all()
    assert (given > run.state.sent_s).any()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ValueError("no idea"), r"Router 'idle' raised ValueError on request 2 at [\d.e+-]+ s: no idea"),
        (99, r"router 'idle' to send request 2 of adapter 'a\d' at [\d.e+-]+ s to a server.*got 99"),
        (None, "got None"),
        ("0", "got '0'"),
    ],
)
def test_a_router_that_fails_is_named(wrong: object, message: str, case: Callable[..., Any]) -> None:
    """The error names the router, the request and the time."""
    found = case(3)
    with pytest.raises(PluginError, match=message):
        simulate_cluster(found.workload, found.cluster, router=Broken(wrong), duration_s=1.0)


class Ticks(Idle):
    """Acts every `period_s`, and returns `moves` then; as a cache policy, too."""

    rule, high_water, takes_memory = LRU, 1.0, True

    def __init__(self, **given: object) -> None:
        self.period_s, self.moves = 0.5, []
        vars(self).update(given)

    def tick(self, now_s: float, view: ClusterView) -> list[Any]:
        """Return the moves."""
        return self.moves

    act = tick


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"period_s": 0.0}, r"period_s of 'idle' to be a finite number >= 0.001, got 0.0"),
        ({"period_s": 1e-9}, r"period_s of 'idle' .*>= 0.001, got 1e-09"),
        ({"period_s": "a"}, "period_s of 'idle' .*got 'a'"),
        ({"moves": [7]}, "'idle', at 0.5 s, raised"),
        ({"moves": [Move(999, 0, keep=True)]}, "'idle', at 0.5 s, raised IndexError"),
        ({"moves": [Move(-1, 0, keep=True)]}, "policy 'idle' to keep adapter -1"),
        ({"rule": 99}, "rule of the cache policy 'idle' to be one of 0, 1, 2, 3, 4, got 99"),
        ({"high_water": -1.0}, "high_water of 'idle' .*got -1.0"),
    ],
)
def test_a_cache_policy_that_is_wrong_is_named(given: dict[str, Any], message: str, toy_profile: Profile) -> None:
    """The error names the policy and what is wrong: no run hangs, and no value stands for another."""
    fleet, cluster = Workload([Adapter("a", 8, 1.0)]), Cluster.of(toy_profile, 1, max_loras=1)
    with pytest.raises(InputError, match=message):
        simulate_cluster(fleet, cluster, "rrod", cache=Ticks(**given), duration_s=1.0)


@pytest.mark.parametrize("role", ["router", "controller"])
def test_no_period_is_0(role: str, case: Callable[..., Any]) -> None:
    """A router or controller that would act without end at one time is refused."""
    found, given = case(3), {role: Ticks(period_s=0.0)}
    with pytest.raises(ValidationError, match="period_s of 'idle'"):
        simulate_cluster(found.workload, found.cluster, duration_s=1.0, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [[0.7], ["0"], None])
def test_a_static_router_assigns_whole_numbers(wrong: object, case: Callable[..., Any]) -> None:
    """Other values are refused with the router's name, not cut."""

    class Static(AnyCluster):
        name = "fixed"

        def assign(self, adapter: Any, *_: object) -> object:
            return wrong and wrong * len(adapter)  # type: ignore[operator]

    found = case(3)
    with pytest.raises(ValidationError, match="router 'fixed' assigns to be a row of whole numbers"):
        simulate_cluster(found.workload, found.cluster, router=Static(), duration_s=1.0)  # type: ignore[arg-type]


def test_a_static_router_keeps_no_hold_of_the_requests(case: Callable[..., Any]) -> None:
    """A router that writes to the array that it gets does not change which adapters are requested."""

    class Writing(AnyCluster):
        name = "writing"

        def assign(self, adapter: Any, *_: object) -> object:
            adapter[:] = 0
            return adapter

    found = case(3)
    run = simulate_cluster(found.workload, found.cluster, router=Writing(), duration_s=1.0)  # type: ignore[arg-type]
    same = simulate_cluster(found.workload, found.cluster, duration_s=1.0)
    assert run.requests["adapter"].to_list() == same.requests["adapter"].to_list()


def test_what_is_no_router(case: Callable[..., Any]) -> None:
    """Unknown names, systems, limits and routers that can't serve the cluster are refused with what exists."""
    found = case(3)
    for change, error, message in (
        ({"router": "fastest"}, UnknownNameError, "Known: affinity"),
        ({"system": "slora"}, UnknownNameError, "Unknown system 'slora'.*Known: "),
        (
            {"router": "affinity:slak=3"},
            ValidationError,
            "router 'affinity' has no parameter 'slak'; it has: slack",
        ),
        ({"router": "plan"}, IncompatibleError, "Router 'plan': the cluster has no placement"),
        ({"slo": {"ttft": 3}}, UnknownNameError, "Did you mean 'ttft_ms'"),
        ({"duration_s": 0}, ValidationError, "duration_s"),
        ({"stats_interval_s": -1}, ValidationError, "stats_interval_s"),
    ):
        with pytest.raises(error, match=message):
            simulate_cluster(found.workload, found.cluster, **change)  # type: ignore[arg-type]


def test_counts_that_are_never_renewed(case: Callable[..., Any]) -> None:
    """With counts from before the first request all servers look idle, and are taken in turn."""
    differs = []
    for seed in range(8):
        found = case(seed)
        cluster = Cluster.of(found.cluster.kinds[0].profile, 3, max_loras=2, max_lora_rank=32)
        stale, turn, live = (
            simulate_cluster(found.workload, cluster, router=router, duration_s=5.0, stats_interval_s=age).requests
            for router, age in (("most-idle", 1e6), ("round-robin", 0.0), ("most-idle", 0.0))
        )
        assert stale.equals(turn)
        differs.append(not stale.equals(live))
    assert any(differs)


def test_a_held_request_is_offered_by_renewed_counts(case: Callable[..., Any]) -> None:
    """A router that holds requests by counts of a while ago lets them go once it sees that there is room."""
    held = 0
    for seed in range(6):
        found = case(seed)
        run = simulate_cluster(
            found.workload, found.cluster, router="punica:max_batch=2", duration_s=60.0, stats_interval_s=0.05
        )
        assert run.state is not None
        assert run.completed == run.sent
        held += int((run.state.requests["sent_s"] > run.state.sent_s).sum())
    assert held > 0
