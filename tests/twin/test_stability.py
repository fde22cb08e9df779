"""Whether a server's queue grows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.lengths import Lengths
from packer.profile import LatencySpec, Profile
from packer.twin import stability as stability_module
from packer.twin.arrivals import draw_requests
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.twin.stability import fewest_waiting, queue_growth, stability, waiting_means
from packer.workload import Workload

MakeProfile = Callable[..., Profile]
CAPACITY_REQ_S = 1e3 / (10.0 * 50.5)
"""Of a server that runs one request at a time, 10 ms a token: 50 tokens on average and rounding."""


@pytest.fixture(scope="module")
def one_at_a_time(make_profile: MakeProfile) -> Profile:
    """A single queue: one request runs, the others wait; its capacity is known."""
    return make_profile(max_num_seqs=1, latency=LatencySpec("linear", {"base_ms": 10.0}))


def _fleet(load: float, arrivals: Arrivals | None = None) -> Workload:
    """Two adapters that together send `load` times what the server can do."""
    adapters = [Adapter(f"a{i}", 8, load * CAPACITY_REQ_S / 2) for i in range(2)]
    return Workload(adapters, Lengths.gamma(30, 1.0), Lengths.gamma(50, 1.0), arrivals=arrivals)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("load", "stable"), [(0.5, True), (0.8, True), (0.9, True), (1.1, False), (1.3, False)])
def test_queue_grows_beyond_capacity(one_at_a_time: Profile, load: float, stable: bool, seed: int) -> None:
    """One hour tells loads of 0.9 and less from loads of 1.1 and more."""
    assert simulate(_fleet(load), one_at_a_time, max_loras=2, seed=seed).stable == stable


def test_growing_queue_is_served_and_not_stable(one_at_a_time: Profile) -> None:
    """A server that completes more than 0.9 of the tokens sent does not starve, and still is not stable."""
    sim = simulate(_fleet(1.07), one_at_a_time, max_loras=2, seed=1)
    assert not sim.starved
    assert not sim.stable
    assert sim.to_dict()["stable"] is False


@pytest.mark.parametrize(("load", "stable"), [(0.6, True), (0.95, True), (1.04, False), (1.2, False)])
def test_longer_runs_and_more_seeds_make_it_clear(one_at_a_time: Profile, load: float, stable: bool) -> None:
    """Loads just below and above capacity are distinguished once the server is simulated for longer."""
    found = stability(_fleet(load), one_at_a_time, max_loras=2, seed=3)
    assert (found.stable, found.clear) == (stable, True)
    if load == 1.2:
        assert found.growth_req_s == pytest.approx(0.2 * CAPACITY_REQ_S, rel=0.3)


def test_refused_requests_are_an_unstable_queue(one_at_a_time: Profile) -> None:
    """A queue that is cut off by the client's ceiling does not grow, but the server does not keep up."""
    sim = simulate(_fleet(1.5), one_at_a_time, max_loras=2, max_outstanding=20)
    assert sim.refused > 100
    assert not sim.stable


@pytest.mark.parametrize("limit", ["client", "server"])
def test_refused_requests_of_a_trace_are_not_served(one_at_a_time: Profile, limit: str) -> None:
    """A replayed trace counts refused requests as due, as a drawn one does: a server that refuses most starves."""
    drawn = _fleet(4.0)
    fleet = drawn.with_arrivals(Arrivals("trace", trace=draw_requests(drawn, 600.0, 1)))
    profile, most = one_at_a_time, 4
    if limit == "server":
        engine = replace(profile.engine, version="0.32.0", max_num_queued_reqs=most)
        profile, most = replace(profile, engine=engine), None
    sim = simulate(fleet, profile, max_loras=2, max_outstanding=most)
    assert sim.refused > 0.5 * sim.sent
    assert sim.served_share == pytest.approx(0.25, rel=0.1)
    assert sim.starved


def test_server_that_does_not_start_is_not_stable(make_profile: MakeProfile) -> None:
    """A memory error is no stable server, in one run and in many."""
    profile = make_profile(kv_budget_bytes=10.0, min_kv_tokens=100)
    assert not simulate(_fleet(0.1), profile, max_loras=2).stable
    assert not stability(_fleet(0.1), profile, max_loras=2).stable


@pytest.mark.parametrize(("peak", "stable"), [(1.5, True), (2.5, False)])
def test_changing_rates_are_stable_if_the_queue_empties(one_at_a_time: Profile, peak: float, stable: bool) -> None:
    """Where rates change, a queue at the peak is no growth if it is gone again later, and one that stays is."""
    arrivals = Arrivals("piecewise", period_s=300.0, factors=(peak, 0.2))
    sim = simulate(_fleet(0.8, arrivals), one_at_a_time, max_loras=2, duration_s=6000.0)
    assert sim.mean_waiting > 5
    assert sim.stable == stable


@pytest.mark.parametrize(("later", "stable"), [(0.4, True), (0.9, False)])
def test_a_queue_that_stays_long_since_a_burst_is_not_stable(
    one_at_a_time: Profile, later: float, stable: bool
) -> None:
    """A burst at the start leaves a queue that gets shorter at both loads; only one that empties is stable."""
    arrivals = Arrivals("piecewise", period_s=1200.0, factors=(1.6, later, later))
    sim = simulate(_fleet(1.0, arrivals), one_at_a_time, max_loras=2, duration_s=3600.0)
    middle, last = fewest_waiting(sim, 1200.0, 2400.0, 3600.0)
    assert middle > last
    assert sim.stable == stable


@st.composite
def _queues(draw: st.DrawFn) -> RequestTrace:
    n = draw(st.integers(1, 30))
    times = np.sort(draw(st.lists(st.integers(0, 90), min_size=n, max_size=n)))
    outputs = np.array(draw(st.lists(st.integers(1, 300), min_size=n, max_size=n)))
    return RequestTrace(times / 10.0, np.zeros(n, int), np.full(n, 3), outputs)


@example(RequestTrace(np.array([0.0, 0.0, 2.6]), np.zeros(3, int), np.full(3, 3), np.array([259, 1, 300])))
@given(_queues())
@settings(deadline=None, max_examples=40)
def test_waiting_requests_are_counted_exactly(one_at_a_time: Profile, trace: RequestTrace) -> None:
    """Means and minima of the queue are those of counting the waiting requests at many times."""
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    sim = simulate(fleet, one_at_a_time, max_loras=1, duration_s=12.0)
    edges_s = np.linspace(2.0, 12.0, 6)
    at_s = np.linspace(2.0, 12.0, 50_001)
    counts = _count(sim, at_s)
    brute = [counts[(at_s >= a) & (at_s < b)].mean() for a, b in itertools.pairwise(edges_s)]
    np.testing.assert_allclose(waiting_means(sim, edges_s), brute, atol=0.02)
    first_s = sim.raw.first_s[(sim.raw.first_s >= 2.0) & (sim.raw.first_s <= 12.0)]
    at_starts = _count(sim, first_s)  # where the queue may be shortest for less than a step of the grid
    assert fewest_waiting(sim, 2.0, 12.0) == [min([counts.min(), *at_starts])]


def test_a_request_waits_from_when_it_is_sent_until_its_first_token(make_profile: MakeProfile) -> None:
    """Nothing has started before the first prefill of 4 s ends: the queue is one request from 0.5 to 4.5 s."""
    slow = make_profile(max_num_seqs=1, latency=LatencySpec("linear", {"base_ms": 4000.0}))
    trace = RequestTrace(np.array([0.5]), np.zeros(1, int), np.full(1, 3), np.ones(1, int))
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    sim = simulate(fleet, slow, max_loras=1, duration_s=6.0)
    assert waiting_means(sim, np.arange(7.0)).tolist() == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.5, 0.0])


def _count(sim: Run, at_s: np.ndarray) -> np.ndarray:
    """Requests sent, but without a first token, at each time."""
    first_s = np.where(np.isnan(sim.raw.first_s), np.inf, sim.raw.first_s)
    waits = (sim.raw.requests.time_s <= at_s[:, None]) & (at_s[:, None] < first_s)
    return waits.sum(axis=1)


def test_steady_growth_is_two_thirds(one_at_a_time: Profile) -> None:
    """A queue that grows steadily from nothing is by two thirds longer in the last third than in the middle."""
    growth = queue_growth(simulate(_fleet(2.0), one_at_a_time, max_loras=2))
    assert growth.last / growth.middle == pytest.approx(5 / 3, rel=0.05)
    assert growth.material
    assert growth.statistic > 10


@pytest.mark.parametrize(("slope", "z"), [(0.0, 0.0), (-1.0, 0.0), (1.0, math.inf)])
def test_a_queue_without_scatter_grows_surely_or_not_at_all(
    slope: float, z: float, one_at_a_time: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a straight line nothing is left to chance; a queue that is constant does not grow."""
    sim = simulate(_fleet(0.1), one_at_a_time, max_loras=2, duration_s=60.0)
    monkeypatch.setattr(
        stability_module, "waiting_means", lambda _sim, edges: 100.0 + slope * np.arange(len(edges) - 1)
    )
    found = queue_growth(sim)
    assert found.statistic == z
    assert found.last - found.middle == pytest.approx(slope * stability_module.BATCHES)


def test_nobody_has_waited_before_the_first_request() -> None:
    """The time since each event up to now, summed by hand: none before, and each second one per event after."""
    found = stability_module._time_since(np.array([2.0, 5.0]), np.array([0.0, 1.0, 4.0, 6.0]))
    assert found.tolist() == [0.0, 0.0, 2.0, 5.0]
