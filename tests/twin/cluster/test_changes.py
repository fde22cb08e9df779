"""Changes of a running cluster: starts, stops, failures, loads and ways of requests at their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.change import Change
from packer.cluster import Cluster, ServerKind
from packer.errors import IncompatibleError, PluginError, UnknownNameError, ValidationError
from packer.lengths import Lengths
from packer.profile import LoadingSpec, Profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.view import ClusterView
from packer.twin.simulate import simulate
from packer.workload import Workload

ROUTERS = ("most-idle", "round-robin", "affinity", "dlora", "hrw", "dynamo", "dynamo:algorithm=mcf")


@pytest.fixture
def fleet() -> Workload:
    """Six adapters."""
    return Workload(
        [
            Adapter(f"a{i}", 8, 1.0, input_tokens=Lengths.constant(200), output_tokens=Lengths.constant(50))
            for i in range(6)
        ]
    )


@pytest.fixture
def three(h100: Profile) -> Cluster:
    """Three servers."""
    return Cluster.of(h100, 3, max_loras=6, max_lora_rank=8)


@pytest.fixture
def halves(three: Cluster) -> Cluster:
    """The first server has the first three adapters, the second one the others, the third one all."""
    own = [{f"a{i}": 1.0 for i in part} for part in ((0, 1, 2), (3, 4, 5), range(6))]
    return replace(three, placement=tuple(own))


@pytest.fixture
def h100() -> Profile:
    """The shipped server."""
    from packer.io.profiles import load_profile

    return load_profile("h100-64gb/llama-3.1-8b-instruct")


def _times(run: Any) -> list[Any]:
    return [run.raw.first_s, run.raw.finish_s, run.state.server]


@pytest.mark.parametrize("router", [*ROUTERS, "plan"])
def test_a_change_that_changes_nothing_does_nothing(
    router: str, fleet: Workload, halves: Cluster, three: Cluster
) -> None:
    """The same ways and servers again give the same bytes: however a run is cut, servers keep what they have."""
    cluster = halves if router == "plan" else three
    again = [Change(t, start=(0,)) for t in (0.0, 7.3, 20.0)]
    given: dict[str, Any] = {"router": router, "duration_s": 60.0}
    # The first change of a server may not be a start, or it would be off before.
    again = [Change(0.0), *(replace(each, start=()) for each in again)]
    for one, two in zip(
        _times(simulate_cluster(fleet, cluster, **given)),
        _times(simulate_cluster(fleet, cluster, **given, changes=again)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("router", ROUTERS)
def test_servers_replayed_alone_give_the_same_times(router: str, case: Callable[..., Any]) -> None:
    """Requests of servers that start once and stop, replayed on the single twin, give the same times, bit for bit."""
    for seed in range(12):
        found = case(seed)
        count = len(found.cluster)
        span_s = found.duration_s / 2
        changes = [Change(0.2 * span_s, start=tuple(range(1, count))), Change(0.6 * span_s, stop=(0,))]
        if count == 1:
            changes = [Change(0.6 * span_s, stop=(0,))]
        run = simulate_cluster(
            found.workload, found.cluster, router=router, duration_s=found.duration_s, seed=seed, startup_s=0.0,
            changes=changes,
        )  # fmt: skip
        for sim in (sim for sim in run.servers if sim.sent):
            alone = simulate(
                sim.workload, sim.profile, max_loras=sim.max_loras, max_lora_rank=sim.max_lora_rank,
                duration_s=found.duration_s, timeline_bin_s=run.timeline_bin_s, seed=seed,
            )  # fmt: skip
            np.testing.assert_array_equal(sim.raw.first_s, alone.raw.first_s)
            np.testing.assert_array_equal(sim.raw.finish_s, alone.raw.finish_s)


@pytest.mark.parametrize("router", ROUTERS)
def test_servers_serve_between_start_and_stop(router: str, fleet: Workload, three: Cluster) -> None:
    """No request goes to a server before its start-up time is over, or after its stop; all of them end."""
    changes = [Change(10.0, start=(2,)), Change(40.0, stop=(0,))]
    run = simulate_cluster(fleet, three, router=router, duration_s=90.0, changes=changes, startup_s=5.0)
    frame = run.requests
    given = {s: frame.filter(frame["server"] == s)["sent_s"] for s in range(3)}
    assert all(len(sent) for sent in given.values())
    assert float(given[2].min()) >= 15.0  # type: ignore[arg-type]
    assert float(given[0].max()) <= 40.0  # type: ignore[arg-type]
    assert run.raw.finished[run.raw.requests.time_s < 80.0].all()
    (late,) = (span for span in run.spans or () if span[0] == 2)
    (early,) = (span for span in run.spans or () if span[0] == 0)
    assert late == (2, 10.0, 90.0)
    assert 40.0 <= early[2] < 45.0
    assert run.gpu_hours == pytest.approx((90.0 + 80.0 + early[2]) / 3600.0)


def test_a_router_that_relocates_adapters_moves_those_of_a_lost_server(fleet: Workload, three: Cluster) -> None:
    """With dLoRA, whose placement only says where adapters are at first, no request of a lost server is refused."""
    run = simulate_cluster(fleet, three, "dlora", duration_s=40.0, changes=[Change(10.0, fail=(0,))])
    assert run.refused == 0
    assert set(run.requests.filter(run.requests["sent_s"] > 10.0)["server"]) == {1, 2}
    placed = replace(three, placement=tuple({name: 1.0} for name in fleet.names[:3]))
    load = Change(10.0, load=((0, fleet.names[1]),))
    with pytest.raises(ValidationError, match="that the router keeps"):
        simulate_cluster(fleet, placed, router="dlora:mode=migrate", duration_s=20.0, changes=[load])


def test_no_time_of_a_server_is_paid_twice(h100: Profile) -> None:
    """A server that starts again while it ends its last requests is paid once; refused requests keep none running."""
    h100 = replace(h100, engine=replace(h100.engine, version="0.32.0", max_num_queued_reqs=1))
    trace = RequestTrace(
        np.array([1.0, 2.0]), *np.array([[0, 0], [100, 100], [4000, 4000]], dtype=np.int64), end_s=100.0
    )
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    stops = [Change(10.0, stop=(0,)), Change(20.0, start=(0,)), Change(30.0, stop=(0,))]
    run = simulate_cluster(fleet, Cluster.of(h100, 1, max_loras=1), changes=stops, duration_s=100.0, startup_s=0.0)
    assert (run.refused_by_server, run.completed) == (1, 1)
    end_s = float(run.raw.finish_s[0])
    assert 50.0 < end_s < 60.0
    assert run.gpu_hours == pytest.approx(end_s / 3600.0)


@pytest.mark.parametrize("router", [*ROUTERS, "plan"])
def test_requests_of_a_lost_server_are_sent_again(
    router: str, fleet: Workload, three: Cluster, halves: Cluster
) -> None:
    """What a server had not finished when it fails ends elsewhere, later; what it had finished stays as it was."""
    cluster = halves if router == "plan" else three
    given: dict[str, Any] = {"router": router, "duration_s": 90.0}
    fleet = fleet.scaled(4.0)
    whole = simulate_cluster(fleet, cluster, **given)
    run = simulate_cluster(fleet, cluster, **given, changes=[Change(30.0, fail=(0,))])
    before = whole.raw.finish_s <= 30.0
    np.testing.assert_array_equal(run.raw.finish_s[before], whole.raw.finish_s[before])
    assert run.state is not None
    assert whole.state is not None
    lost = (whole.state.server == 0) & (whole.raw.requests.time_s < 30.0) & ~before
    assert lost.any()
    assert (run.state.server[lost] != 0).all()
    assert (run.raw.first_s[lost] > 30.0).all()
    assert run.raw.finished[run.raw.requests.time_s < 80.0].all()
    assert not (run.state.server[run.raw.requests.time_s > 30.0] == 0).any()
    again = simulate_cluster(fleet, cluster, **given, changes=[Change(30.0, fail=(0,)), Change(50.0, start=(0,))],
                             startup_s=10.0)  # fmt: skip
    assert again.state is not None
    back = again.raw.requests.time_s[(again.state.server == 0) & (again.raw.requests.time_s > 30.0)]
    assert back.min() >= 60.0
    assert again.raw.finished[again.raw.requests.time_s < 80.0].all()
    assert [span[1:] for span in again.spans or () if span[0] == 0] == [(0.0, 30.0), (50.0, 90.0)]


def test_servers_that_count_blocks_may_be_lost(fleet: Workload, h100: Profile) -> None:
    """Servers that schedule ahead but cache no prefixes send the requests of a lost server again, too."""
    engine = replace(h100.engine, version="0.18.0", async_scheduling=True, prefix_caching=False)
    cluster = Cluster.of(replace(h100, engine=engine), 2, max_loras=6, max_lora_rank=8)
    run = simulate_cluster(fleet, cluster, router="round-robin", duration_s=20.0, changes=[Change(5.0, fail=(0,))])
    assert run.raw.finished[run.raw.requests.time_s < 10.0].all()


def test_requests_take_the_ways_of_the_moment(fleet: Workload, halves: Cluster) -> None:
    """Shares hold from the time of their change; a server gets an adapter once it was loaded, until it is unloaded."""
    changes = [
        Change(20.0, load=((1, "a0"),), route={"a0": {1: 1.0}}),
        Change(40.0, route={"a0": {0: 1.0}}, unload=((1, "a0"),)),
    ]
    run = simulate_cluster(fleet, halves, router="plan", duration_s=60.0, changes=changes)
    frame = run.requests.filter(run.requests["adapter"] == "a0")
    for sent_s, server in zip(frame["sent_s"], frame["server"], strict=True):
        if 20.0 <= sent_s < 40.0:
            assert server == 1
        elif sent_s >= 40.0:
            assert server == 0


@pytest.mark.parametrize("busy", [True, False])
def test_a_load_stops_the_engine(busy: bool, halves: Cluster, h100: Profile) -> None:
    """The requests of a server wait for an adapter that comes from disk, as long as the profile says."""
    slow = replace(h100, loading=LoadingSpec(5.0, 0.0, 2000.0, 0.0))
    kind = ServerKind("h", slow, 6, 8)
    cluster = Cluster((kind,), ("h", "h"), ({"a0": 1.0}, {"a1": 1.0}))
    fleet = Workload(
        [
            Adapter(
                "a0",
                8,
                3.0 if busy else 0.2,
                input_tokens=Lengths.constant(50),
                output_tokens=Lengths.constant(50),
            ),
            Adapter("a1", 8, 0.01),
        ]
    )
    given: dict[str, Any] = {"router": "plan", "duration_s": 60.0, "seed": 2}
    plain = simulate_cluster(fleet, cluster, **given)
    at_s = float(plain.raw.requests.time_s[plain.raw.requests.adapter == 0][1]) - (0.0 if busy else 0.5)
    run = simulate_cluster(fleet, cluster, **given, changes=[Change(at_s, load=((0, "a1"),))])
    later = run.raw.first_s - plain.raw.first_s
    assert np.nanmax(later) == pytest.approx(2.0 if busy else 1.5, abs=0.05)
    assert run.servers[0].disk_loads == 1


@dataclass
class Scaler:
    """A server more whenever one has more than four requests."""

    period_s: float = 5.0
    seen: list[float] = field(default_factory=list)

    def act(self, now_s: float, view: ClusterView) -> Iterable[Change]:
        """By the queue."""
        self.seen.append(now_s)
        load = view.running + view.waiting
        if load.max() > 4 and len(self.seen) > 2:
            yield Change(now_s + 1.0, start=(2,))


def test_a_controller_sees_the_servers_and_changes_them(fleet: Workload, three: Cluster) -> None:
    """It looks at regular times, at what is there then; its changes are made at theirs."""
    scaler = Scaler()
    run = simulate_cluster(
        fleet.scaled(4.0), three, router="most-idle", duration_s=60.0, controller=scaler, startup_s=3.0,
        changes=[Change(59.0, start=(2,))],
    )  # fmt: skip
    assert scaler.seen == [5.0 * k for k in range(12)]
    assert run.state is not None
    first_s = run.raw.requests.time_s[run.state.server == 2].min()
    assert 14.0 <= first_s < 59.0


def test_an_adapter_without_a_server_is_refused(fleet: Workload, halves: Cluster) -> None:
    """Its requests fail until a server has it again; those of other adapters do not wait for them."""
    one = replace(halves, servers=halves.servers[:2], placement=(halves.placement or ())[:2])
    changes = [Change(20.0, fail=(0,)), Change(40.0, load=((1, "a0"),), route={"a0": {1: 1.0}})]
    for router in ("plan", "most-idle", "dlora"):
        run = simulate_cluster(fleet, one, router=router, duration_s=60.0, changes=changes)
        assert run.refused > 0
        served = run.raw.finished[(run.raw.requests.time_s > 40.0) & (run.raw.requests.time_s < 55.0)]
        adapter = run.raw.requests.adapter[(run.raw.requests.time_s > 40.0) & (run.raw.requests.time_s < 55.0)]
        assert served[(adapter == 0) | (adapter > 2)].all()
        assert not served[(adapter == 1) | (adapter == 2)].any()


def test_what_a_lost_server_had_refused_is_not_sent_again(fleet: Workload, h100: Profile) -> None:
    """A request that a full server refused is over: the other server gets only what the lost one had open."""
    engine = replace(h100.engine, version="0.32.0", max_num_queued_reqs=2)
    cluster = Cluster.of(replace(h100, engine=engine), 2, max_loras=6, max_lora_rank=8)
    given: dict[str, Any] = {"router": "round-robin", "duration_s": 60.0}
    before = simulate_cluster(fleet, cluster, **{**given, "duration_s": 30.0})
    run = simulate_cluster(fleet, cluster, **given, changes=[Change(30.0, fail=(0,))])
    frame = run.requests.head(before.sent)
    again = np.flatnonzero((frame["server"] != before.requests["server"]).to_numpy())
    assert before.servers[0].refused > 10
    assert len(again) <= 2
    assert run.sent == run.servers[0].sent + run.servers[1].sent


def test_what_cannot_be_changed_is_said(fleet: Workload, three: Cluster, halves: Cluster) -> None:
    """Servers and adapters that are not there, late changes, ways to servers that do not hold the adapter."""

    class Late:
        period_s = 10.0

        def act(self, now_s: float, view: ClusterView) -> list[Change]:
            return [Change(now_s - 5.0)] if now_s else []

    for cluster, given, error, words in (
        (three, {"changes": [Change(1.0, start=(3,))]}, ValidationError, "servers 0 to 2, got server 3"),
        (halves, {"changes": [Change(1.0, load=((0, "b"),))]}, UnknownNameError, "Unknown adapter 'b'"),
        (three, {"changes": [Change(1.0, load=((0, "a0"),))]}, ValidationError, "placement"),
        (halves, {"changes": [Change(1.0, route={"a0": {1: 1.0}})]}, ValidationError, "does not hold it"),
        (replace(three, network_ms=1.0), {"changes": [Change(1.0)]}, IncompatibleError, "network_ms"),
        (three, {"startup_s": -1.0}, ValidationError, "startup_s .*got -1.0"),
        (three, {"controller": Late()}, (ValidationError, PluginError), "changes from 10 s on"),
    ):
        with pytest.raises(error, match=words):
            simulate_cluster(fleet, cluster, router="most-idle", duration_s=30.0, **given)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="time_s of a change"):
        Change(-1.0)
    with pytest.raises(ValidationError, match="sum above 0"):
        Change(1.0, route={"a": {0: 0.0}})


def test_a_server_that_was_lost_loads_its_adapters_again(fleet: Workload, halves: Cluster, h100: Profile) -> None:
    """Where host memory holds few adapters, one that the server knew before it failed is read once more."""
    few = replace(h100, engine=replace(h100.engine, max_cpu_loras=3))
    cluster = replace(halves, kinds=tuple(replace(kind, profile=few, max_loras=2) for kind in halves.kinds))
    whole = {f"a{i}": {1 if i > 2 else 0: 1.0} for i in range(6)}
    changes = [
        Change(10.0, fail=(0,), unload=((0, "a0"),), route={"a0": {2: 1.0}}),
        Change(11.0, start=(0,)),
        Change(30.0, load=((0, "a0"),), route=whole),
    ]
    given: dict[str, Any] = {"router": "plan", "duration_s": 60.0, "startup_s": 5.0}
    run = simulate_cluster(fleet, cluster, changes=changes, **given)
    server = run.state.server[run.raw.requests.time_s > 31.0]
    assert set(server.tolist()) == {0, 1}
    assert run.raw.finished[run.raw.requests.time_s < 50.0].all()


def test_a_server_that_starts_again_is_a_new_one(h100: Profile) -> None:
    """A server that fails and starts serves requests with and without adapters as one that never ran before."""
    lengths = {"input_tokens": Lengths.constant(200), "output_tokens": Lengths.constant(50)}
    fleet = Workload([Adapter(name, rank, 2.0, **lengths) for name, rank in (("base", 0), ("a", 8), ("b", 8))])
    one, two = (Cluster.of(h100, n, max_loras=1, max_lora_rank=8) for n in (1, 2))
    first, other = (
        simulate_cluster(
            fleet,
            cluster,
            router="most-idle",
            duration_s=60.0,
            startup_s=0.0,
            changes=[Change(20.0, fail=(0,)), Change(20.0, start=(len(cluster) - 1,))],
        )
        for cluster in (one, two)
    )
    assert (other.state.server[first.raw.requests.time_s > 20.0] == 1).all()
    for again, new in zip(_times(first)[:2], _times(other)[:2], strict=True):
        np.testing.assert_array_equal(again, new)
