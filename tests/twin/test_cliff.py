"""How far the cliff is: the probability that a run fails, and the load factor at which it reaches 5 %."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats
from seeds import simulate_seeds

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.profile import LatencySpec, LoadingSpec, Profile
from packer.twin.cliff import HIGHEST, chance, cliff, cliff_of, fails, share
from packer.twin.simulate import simulate
from packer.workload import Workload

MakeProfile = Callable[..., Profile]
CAPACITY_REQ_S = 1e3 / (10.0 * 50.5)
"""Of a server that runs one request at a time, 10 ms a token: 50 tokens on average and rounding."""


@pytest.fixture(scope="module")
def one_at_a_time(make_profile: MakeProfile) -> Profile:
    """A single queue: one request runs, the others wait; its capacity is known."""
    return make_profile(max_num_seqs=1, latency=LatencySpec("linear", {"base_ms": 10.0}))


def _fleet(load: float) -> Workload:
    adapters = [Adapter(f"a{i}", 8, load * CAPACITY_REQ_S / 2) for i in range(2)]
    return Workload(adapters, Lengths.gamma(30, 1.0), Lengths.gamma(50, 1.0))


@pytest.mark.parametrize(("failures", "runs"), [(0, 10), (1, 10), (7, 20), (20, 20)])
def test_interval_of_a_share_is_exact(failures: int, runs: int) -> None:
    """The interval of a probability is Clopper and Pearson's."""
    found = share(failures, runs)
    expected = stats.binomtest(failures, runs).proportion_ci(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (found.probability, found.runs) == (failures / runs, runs)


@pytest.mark.parametrize("seeds", [3, 6, 20])
def test_a_further_run_fails_as_often_as_said(seeds: int) -> None:
    """Where thresholds are log-normal, a further one lies below the load factor with the given probability."""
    spread, location = 0.04, np.log(1.3)
    below, hit = [], 0
    for trial in range(400):
        thresholds = np.exp(location + spread * np.random.default_rng(trial).standard_normal(seeds))
        found = cliff_of(lambda factor, seed, of=thresholds: factor > of[seed], range(seeds))
        assert found is not None
        below.append(stats.norm.cdf((np.log(found.load_factor) - location) / spread))
        hit += found.low <= np.exp(location + spread * stats.norm.ppf(0.05)) <= found.high
    assert np.mean(below) == pytest.approx(0.05, abs=0.012)
    assert hit / 400 == pytest.approx(0.95, abs=0.035)


def test_search_is_exact_and_short() -> None:
    """Thresholds are found wherever they lie, in few runs."""
    calls: list[float] = []

    for threshold in (0.2, 0.95, 1.05, 2.5, 3.5):

        def failed(factor: float, _seed: int, least: float = threshold) -> bool:
            calls.append(factor)
            return factor >= least

        calls.clear()
        found = cliff_of(failed, range(2))
        assert found is not None
        assert found.load_factor == pytest.approx(threshold, rel=0.05)
        assert found.runs == len(calls) <= 24
        assert found.high - found.low < 0.2 * threshold


def test_ends_of_the_search() -> None:
    """A server that never fails holds at least the largest factor; one that always fails has none."""
    never = cliff_of(lambda _factor, _seed: False, range(3))
    assert never is not None
    assert (never.load_factor, never.at_least) == (HIGHEST, True)
    assert cliff_of(lambda _factor, _seed: True, range(3)) is None


def test_load_factor_of_a_single_queue(one_at_a_time: Profile) -> None:
    """A queue of known capacity fails with about 5 % at the load factor found, by forty other seeds."""
    found = cliff(_fleet(0.5), one_at_a_time, max_loras=2, jobs=2)
    assert found is not None
    assert 0.9 < 0.5 * found.load_factor < 1.0
    assert found.low < found.load_factor < found.high
    again = simulate_seeds(_fleet(0.5).scaled(found.load_factor), one_at_a_time, max_loras=2, seeds=40, seed=1000)
    assert chance(again).probability < 0.15
    beyond = simulate_seeds(
        _fleet(0.5).scaled(1.06 * found.load_factor), one_at_a_time, max_loras=2, seeds=30, seed=1000
    )
    assert chance(beyond).low > 0.14


def test_bistable_slots_are_a_probability(make_profile: MakeProfile) -> None:
    """Near the saturation of slots some hours stay calm and others don't: the same server, other seeds."""
    profile = make_profile(
        latency=LatencySpec("linear", {"base_ms": 10.0, "per_adapter_ms": 0.6}),
        loading=LoadingSpec(host_base_ms=20.0),
    )
    fleet = Workload([Adapter(f"a{i}", 8, 0.1) for i in range(96)], Lengths.gamma(60, 1.0), Lengths.gamma(90, 1.0))
    found = cliff(fleet, profile, max_loras=24, duration_s=900.0, jobs=2)
    assert found is not None
    runs = simulate_seeds(
        fleet.scaled(found.load_factor * 1.05), profile, max_loras=24, seeds=60, seed=500, duration_s=900.0
    )
    assert 0.02 < chance(runs).probability < 0.98
    calm = simulate_seeds(fleet.scaled(found.load_factor), profile, max_loras=24, seeds=60, seed=500, duration_s=900.0)
    assert chance(calm).probability < 0.2


def test_threads_do_not_change_it(one_at_a_time: Profile) -> None:
    """The same seeds give the same load factor, however many threads there are."""
    one, two = (cliff(_fleet(0.7), one_at_a_time, max_loras=2, seeds=3, jobs=jobs, duration_s=600.0) for jobs in (1, 2))
    assert one == two


def test_failures(one_at_a_time: Profile, make_profile: MakeProfile) -> None:
    """A server fails that starves, whose queue grows, or that does not start; what holds does not fail."""
    assert not fails(simulate(_fleet(0.5), one_at_a_time, max_loras=2))
    growing = simulate(_fleet(1.07), one_at_a_time, max_loras=2, seed=1)
    assert fails(growing)
    assert not growing.starved
    broken = make_profile(kv_budget_bytes=10.0, min_kv_tokens=100)
    assert fails(simulate(_fleet(0.1), broken, max_loras=2))
    assert cliff(_fleet(0.1), broken, max_loras=2) is None


def test_traces_have_no_load_factor(one_at_a_time: Profile) -> None:
    """The rates of a replayed trace can't be scaled."""
    trace = RequestTrace(np.zeros(1), np.zeros(1, int), np.full(1, 3), np.full(1, 3))
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    assert cliff(fleet, one_at_a_time, max_loras=1) is None


def test_one_seed_is_refused(one_at_a_time: Profile) -> None:
    """A single threshold has no spread."""
    with pytest.raises(ValidationError):
        cliff(_fleet(0.5), one_at_a_time, max_loras=2, seeds=1)
