"""A replayed day: what changes cost, and that no request is lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster, ServerKind
from packer.errors import ValidationError
from packer.goal import Limits, Slo
from packer.io.profiles import load_profile
from packer.operate.replay import LATE_S, Window, replay, requests_of_day
from packer.profile import LoadingSpec
from packer.sessions import Sessions
from packer.testing.analytic import small_profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.override import with_engine
from packer.workload import Workload

PROFILE = small_profile()


@pytest.fixture(scope="module")
def small_day() -> tuple[Workload, RequestTrace, Cluster]:
    """Ten minutes of requests for one H100, and that server."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.2) for i in range(6)])
    rates = {"0": np.full(6, 0.3), "1": np.array([0.0, 0.6, 0.3, 0.3, 0.3, 0.3])}
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    return fleet, requests_of_day(fleet, rates, 300.0, seed=1), Cluster.of(profile, 1, max_loras=6)


def test_requests_follow_the_rates(small_day: tuple[Workload, RequestTrace, Cluster]) -> None:
    """An adapter without a rate sends nothing, the others about as many as their rate says."""
    _, trace, _ = small_day
    late = trace.time_s >= 300.0
    assert not np.any(trace.adapter[late] == 0)
    assert np.sum(trace.adapter[late] == 1) == pytest.approx(180, rel=0.25)
    assert trace.span_s == 600.0


def test_requests_follow_the_trends() -> None:
    """A period with a trend begins as quietly as it says; periods without one, and a fleet's own trend, are kept."""
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("piecewise", period_s=150.0, factors=(2.0, 0.0)))
    rates = {"0": np.array([2.0]), "1": np.array([2.0])}
    for trends, quarters in ((None, [2, 0, 2, 0]), ({}, [1, 1, 1, 1]), ({"1": (150.0, 0.0, 2.0)}, [1, 1, 0, 2])):
        found, _ = np.histogram(requests_of_day(fleet, rates, 300.0, trends=trends).time_s, 4, (0.0, 600.0))
        assert found == pytest.approx(300.0 * np.array(quarters), rel=0.2)


def test_a_change_of_servers_loses_no_request(small_day: tuple[Workload, RequestTrace, Cluster]) -> None:
    """Servers that stop end what they have, new requests go to the next ones: all are served."""
    fleet, trace, server = small_day
    whole = replay(fleet, trace, [Window(0.0, 600.0, server, "round-robin")])
    cut = replay(
        fleet,
        trace,
        [Window(0.0, 290.0, server, "round-robin"), Window(290.0, 600.0, server.resized(2), "round-robin")],
        startup_s=200.0,
    )
    replaced = replay(
        fleet,
        trace,
        [Window(0.0, 290.0, server, "round-robin"), Window(290.0, 600.0, server, "round-robin", (1,))],
        startup_s=200.0,
    )
    assert np.isfinite(whole.ttft_ms).all()
    assert np.isfinite(cut.ttft_ms).all()
    early = trace.time_s < 280.0
    assert np.array_equal(cut.ttft_ms[early], whole.ttft_ms[early])
    assert whole.gpu_hours == pytest.approx(600.0 / 3600.0)
    serving_s = 290.0 + 2 * 310.0 + 200.0
    longest_s = 60.0  # a server that is stopped ends what runs there
    assert serving_s < cut.gpu_hours * 3600.0 < serving_s + longest_s
    assert (cut.starts, whole.starts, replaced.starts) == (1, 0, 2)
    assert 600.0 + 400.0 < replaced.gpu_hours * 3600.0 < 600.0 + 400.0 + 2 * longest_s
    with pytest.raises(ValidationError, match="without gaps"):
        replay(fleet, trace, [Window(0.0, 10.0, server), Window(20.0, 600.0, server)])


@pytest.mark.parametrize(("startup_s", "on_s", "starts"), [(20.0, 2 * 20.0 + 310.0, 2), (110.0, 110.0 + 410.0, 1)])
def test_a_server_that_stops_for_less_than_a_start_goes_on(
    small_day: tuple[Workload, RequestTrace, Cluster], startup_s: float, on_s: float, starts: int
) -> None:
    """It can't start before it stopped: its GPU is in use all the time, as a schedule says."""
    fleet, trace, server = small_day
    edges, numbers = [0.0, 100.0, 300.0, 400.0, 510.0, 600.0], [(0,), (0, 1), (0,), (0, 1), (0,)]
    windows = [
        Window(one, two, server.resized(len(own)), "round-robin", own)
        for (one, two), own in zip(pairwise(edges), numbers, strict=True)
    ]
    found = replay(fleet, trace, windows, startup_s=startup_s)
    ending_s = 3600.0 * found.gpu_hours - 600.0 - on_s  # a server that is stopped ends what runs there
    assert found.starts == starts
    assert 0.0 < ending_s < 60.0


def test_servers_that_go_on_keep_what_they_have(small_day: tuple[Workload, RequestTrace, Cluster]) -> None:
    """A day that is cut into windows of the same servers is the whole day, bit for bit: no window begins idle."""
    fleet, trace, server = small_day
    whole = replay(fleet, trace, [Window(0.0, 600.0, server, "round-robin")])
    cuts = [0.0, 100.0, 290.0, 300.0, 600.0]
    cut = replay(fleet, trace, [Window(one, two, server, "round-robin") for one, two in pairwise(cuts)])
    np.testing.assert_array_equal(cut.ttft_ms, whole.ttft_ms)
    np.testing.assert_array_equal(cut.run.raw.finish_s, whole.run.raw.finish_s)
    assert cut.gpu_hours == pytest.approx(whole.gpu_hours)


def test_a_replayed_day_shows_what_a_move_costs(small_day: tuple[Workload, RequestTrace, Cluster]) -> None:
    """An adapter that comes to a server stops its engine for the load: a request there waits as long."""
    fleet, trace, server = small_day
    slow = replace(server.kinds[0].profile, loading=LoadingSpec(1.0, 0.0, 5000.0, 0.0))
    kind = replace(server.kinds[0], profile=slow)
    at_s = float(trace.time_s[trace.time_s > 290.0][0]) - 1e-3
    windows = []
    homes = [dict.fromkeys(fleet.names[:3], 1.0), dict.fromkeys(fleet.names[3:], 1.0)]
    for begin_s, end_s, placed in ((0.0, at_s, homes), (at_s, 600.0, homes[::-1])):
        cluster = Cluster((kind,), (kind.name,) * 2, tuple(placed))
        windows.append(Window(begin_s, end_s, cluster))
    stays = replay(fleet, trace, [windows[0], replace(windows[0], start_s=at_s, end_s=600.0)])
    moves = replay(fleet, trace, windows, moves=6)
    first = int(np.flatnonzero(trace.time_s > at_s)[0])
    assert moves.ttft_ms[first] - stays.ttft_ms[first] == pytest.approx(15_000.0, abs=100.0)
    np.testing.assert_array_equal(moves.ttft_ms[trace.time_s < at_s - 30.0], stays.ttft_ms[trace.time_s < at_s - 30.0])


def test_the_last_server_of_a_day_counts_until_all_its_requests_end() -> None:
    """Also those that have no token when the day ends: no other server takes them."""
    n = 3000
    trace = RequestTrace(
        145.0 + 5e-4 * np.arange(n), np.zeros(n, dtype=np.int64), np.full(n, 500), np.full(n, 200), end_s=250.0
    )
    cluster = Cluster((ServerKind("s", PROFILE, max_loras=4),), ("s",))
    windows = [
        Window(begin_s, end_s, cluster, "round-robin", (t,))
        for t, begin_s, end_s in ((0, 0.0, 100.0), (1, 100.0, 150.0))
    ]
    found = replay(Workload([Adapter("a0", 8, 1.0)]), trace, windows)
    last_s = found.run.raw.finish_s.max()
    assert last_s > 200.0
    assert 3600.0 * found.gpu_hours == pytest.approx(last_s)


def test_a_replay_holds_each_adapter_to_the_limits_of_its_class(
    small_day: tuple[Workload, RequestTrace, Cluster],
) -> None:
    """Limits given take the place of the fleet's."""
    fleet, trace, server = small_day
    windows = [Window(0.0, 600.0, server, "round-robin")]
    apart = replace(fleet.adapters[0], slo_class="batch")
    mixed = replace(
        fleet,
        adapters=(apart, *fleet.adapters[1:]),
        slo=Slo(Limits(1e-3), (("batch", Limits(60_000.0, 1e4)),)),
    )
    replayed = replay(mixed, trace, windows)
    assert replayed.within == pytest.approx(np.mean(trace.adapter == 0))
    assert replay(mixed, trace, windows, slo=Slo.of(60_000.0, 1e4)).within == 1.0


def test_a_replay_keeps_sessions_and_priorities() -> None:
    """A day of one window is the run of its requests: turns stay on their replica, urgent requests come first."""
    base = with_engine(
        load_profile("h100-64gb/llama-3.1-8b-instruct"),
        vllm_version="0.32.0",
        scheduling_policy="priority",
        max_num_seqs=4,
    )
    cluster = replace(Cluster.of(base, 2, max_loras=1), placement=({"a": 0.5}, {"a": 0.5}))
    fleet = Workload([Adapter("a", 8, 4.0)], sessions=Sessions(6.0, 5.0))
    trace = requests_of_day(fleet, {"0": np.array([4.0])}, 100.0, seed=1)
    trace = replace(trace, priority=np.arange(len(trace)) % 3, end_s=100.0 + LATE_S)
    replayed = replay(fleet, trace, [Window(0.0, 100.0, cluster)])
    run = simulate_cluster(fleet.replaying(trace), cluster, router="plan", duration_s=100.0 + LATE_S)
    np.testing.assert_array_equal(replayed.run.raw.first_s, run.raw.first_s)
