"""Burstiness is measured from traces: absent where arrivals are Poisson, and found again where it was put in."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import packer
from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts
from packer.gamma import gamma_covariances
from packer.traces import burst_fit
from packer.traces.assign import assign_adapters
from packer.traces.bursts import _pooled, bursts_within, measure_arrivals
from packer.traces.measure import measure_workload
from packer.traces.read import read_trace
from packer.traces.trace import Trace
from packer.twin.arrivals import draw_requests
from packer.workload import Workload

AZURE = Path(__file__).parents[4] / "shared/data/traces"


def drawn(
    arrivals: Arrivals, seed: int, *, duration_s: float = 7200.0, adapters: int = 40, factor: float = 1.0
) -> Trace:
    """A trace of a made-up fleet, its rates times a factor."""
    rates = [factor * (0.05 + 0.01 * i) for i in range(adapters)]
    fleet = Workload([Adapter(f"a{i:02d}", 8, rate) for i, rate in enumerate(rates)], arrivals=arrivals)
    seen = draw_requests(fleet, duration_s, seed)
    return Trace(seen.time_s, seen.input_tokens, seen.output_tokens, seen.adapter, fleet.names, (8,) * adapters)


def test_poisson_arrivals_stay_poisson() -> None:
    """Chance is not taken for bursts."""
    kinds = [measure_arrivals(drawn(Arrivals(), seed)).kind for seed in range(20)]
    assert kinds.count("bursty") <= 1


def test_closing_hours_are_no_bursts() -> None:
    """Hours in which a service opens or closes show a step; bursts are measured in the others, as without nights."""
    bursty = Arrivals("bursty", common=Bursts(0.5, ((100.0, 1.0),)))
    for arrivals in (Arrivals(), bursty):
        seen = drawn(arrivals, 1, duration_s=4 * 16_200.0)  # four days of 4.5 h, from a quarter past on
        nights_s = (seen.time_s // 16_200.0) * (86_400.0 - 16_200.0)
        closed = replace(seen, time_s=seen.time_s + nights_s, start_s=900.0)
        found = [measure_arrivals(each, 3600.0).common for each in (seen, closed)]
        assert [each.cv if each else 0.0 for each in found] == pytest.approx([0.5 * arrivals.varies] * 2, rel=0.2)


def test_common_and_own_bursts_are_told_apart() -> None:
    """Spreads are found again within a fifth, on the mean of several traces."""
    truth = Arrivals("bursty", common=Bursts(0.6, ((30.0, 1.0),)), own=Bursts(1.2, ((60.0, 1.0),)))
    found = [measure_arrivals(drawn(truth, seed)) for seed in range(4)]
    assert np.mean([a.common.cv if a.common else 0.0 for a in found]) == pytest.approx(0.6, rel=0.2)
    assert np.mean([a.own.cv if a.own else 0.0 for a in found]) == pytest.approx(1.2, rel=0.2)
    common_only = [measure_arrivals(drawn(replace(truth, own=None), seed)) for seed in range(4)]
    assert sum(a.own is not None for a in common_only) <= 1
    assert all(a.common is not None for a in common_only)


@pytest.mark.parametrize(("size", "width_s"), [(30, 0.0), (30, 0.01), (5, 0.04)])
def test_requests_that_come_at_once_are_bursts(size: int, width_s: float) -> None:
    """Batches that one client sends at the same moment vary counts by as many requests as a batch has, and so do
    requests that are drawn from what was measured."""
    rng = np.random.default_rng(1)
    starts_s = rng.uniform(0.0, 3600.0, 14_400 // size)
    time_s = np.sort(np.repeat(starts_s, size) + rng.uniform(0.0, width_s, len(starts_s) * size))
    adapter, ones = rng.integers(0, 8, len(time_s)), np.ones(len(time_s), dtype=np.int64)
    found = measure_arrivals(Trace(time_s - time_s[0], ones, ones, adapter, tuple("abcdefgh"), (8,) * 8))
    fleet = Workload([Adapter(name, 8, 0.5) for name in "abcdefgh"], arrivals=found)
    again = [dispersion(draw_requests(fleet, 3600.0, seed).time_s, 3600.0, 10.0) for seed in range(4)]
    assert np.mean(again) == pytest.approx(size, rel=0.35)


def test_slow_bursts_beside_requests_that_come_at_once_are_kept() -> None:
    """Batches do not hide that the rate of the other half of the requests varies over minutes."""
    rng = np.random.default_rng(1)
    single = drawn(Arrivals("bursty", common=Bursts(0.5, ((100.0, 1.0),))), 1, duration_s=3600.0, adapters=8)
    batches_s = np.repeat(rng.uniform(0.0, 3600.0, len(single.time_s) // 10), 10)
    time_s = np.sort(np.append(single.time_s, batches_s))
    adapter, ones = rng.integers(0, 8, len(time_s)), np.ones(len(time_s), dtype=np.int64)
    found = measure_arrivals(Trace(time_s - time_s[0], ones, ones, adapter, single.names, single.ranks)).common
    assert found is not None
    assert min(found.scales)[0] == 0.1
    assert max(found.scales)[0] > 20.0
    assert len(dict(found.scales)) == len(found.scales)


def test_requests_that_come_at_once_are_counted_once() -> None:
    """The slow factor of a log of hours does not count batches again; bursts of minutes alone have no short part."""
    rng = np.random.default_rng(1)
    batches_s = np.repeat(rng.uniform(0.0, 14_400.0, 720), 10)
    time_s = np.sort(np.append(rng.uniform(0.0, 14_400.0, 7200), batches_s))
    adapter, ones = np.zeros(len(time_s), dtype=np.int64), np.ones(len(time_s), dtype=np.int64)
    trace = Trace(time_s - time_s[0], ones, ones, adapter, ("a",), (8,))
    assert measure_arrivals(trace).common == measure_arrivals(trace, 3600.0).common
    minutes = drawn(Arrivals("bursty", common=Bursts(0.5, ((100.0, 1.0),))), 2, duration_s=3600.0, adapters=8)
    found = measure_arrivals(minutes).common
    assert found is not None
    assert min(found.scales)[0] > 10.0


def test_own_bursts_are_not_counted_twice() -> None:
    """What a few hot adapters do on their own varies the sum of all requests, and is no burst that all have."""
    truth = Arrivals("bursty", own=Bursts(1.0, ((60.0, 1.0),)))
    fleet = Workload([Adapter(f"a{i:02d}", 8, 4.0 / (i + 1)) for i in range(40)], arrivals=truth)
    for seed in range(3):
        seen = draw_requests(fleet, 14_400.0, seed)
        trace = Trace(seen.time_s, seen.input_tokens, seen.output_tokens, seen.adapter, fleet.names, fleet.ranks)
        found = measure_arrivals(trace, window_s=3600.0)
        assert found.own is not None
        assert found.own.cv == pytest.approx(1.0, rel=0.2)
        assert found.common is None or found.common.cv < 0.15
        again = (draw_requests(fleet.with_arrivals(found), 14_400.0, seed + 100 * k).time_s for k in range(6))
        drawn_again = np.mean([dispersion(each, 14_400.0, 60.0) for each in again])
        assert drawn_again == pytest.approx(dispersion(trace.time_s, 14_400.0, 60.0), rel=0.35)


def test_two_adapters_may_have_bursts_of_their_own() -> None:
    """Two are enough to tell what they share from what they do not; one alone has nothing to be compared with."""
    truth = Arrivals("bursty", own=Bursts(1.5, ((60.0, 1.0),)))
    two, one = (measure_arrivals(drawn(truth, 0, adapters=n, factor=6.0)) for n in (2, 1))
    assert two.own is not None
    assert one.own is None


def a_day(seed: int = 0) -> Trace:
    """A day of Poisson arrivals of 20 adapters whose rates are five times as high at noon as at midnight."""
    rng = np.random.default_rng(seed)
    hours = [3.0 - 2.0 * np.cos(2.0 * np.pi * (hour + 0.5) / 24.0) for hour in range(24)]
    times = [3600.0 * (hour + rng.random(rng.poisson(400.0 * rate))) for hour, rate in enumerate(hours)]
    time_s = np.sort(np.concatenate(times))
    tokens = np.full(len(time_s), 50)
    owner = rng.integers(0, 20, len(time_s))
    names = tuple(f"a{k:02d}" for k in range(20))
    return Trace(time_s - time_s[0], tokens, tokens, owner, names, (8,) * 20)


def test_the_day_is_no_burst_within_an_hour() -> None:
    """Bursts for the rates of one hour do not hold the day, which those over the whole trace do."""
    trace = a_day()
    whole = measure_arrivals(trace)
    assert whole.common is not None
    assert max(scale for scale, _ in whole.common.scales) > 3600.0
    assert measure_arrivals(trace, window_s=3600.0).kind == "poisson"


@pytest.mark.parametrize("seed", range(3))
def test_the_ramps_of_a_day_are_no_bursts(seed: int) -> None:
    """A rate that rises tenfold within an hour and falls again is a trend, within the hour as between hours."""
    rng = np.random.default_rng(seed)
    minutes = np.arange(360.0)
    means = 60.0 * (1.0 + 45.0 * np.exp(-((minutes / 60.0 - 3.5) ** 2)))
    at_s = np.repeat(60.0 * minutes, rng.poisson(means))
    at_s = np.sort(at_s + 60.0 * rng.random(len(at_s)))
    tokens = np.full(len(at_s), 50)
    owner = rng.integers(0, 20, len(at_s))
    trace = Trace(at_s - at_s[0], tokens, tokens, owner, tuple(f"a{k:02d}" for k in range(20)), (8,) * 20)
    assert measure_arrivals(trace, window_s=3600.0).kind == "poisson"


@pytest.mark.parametrize(("cv", "scale_s", "rel"), [(0.3, 30.0, 0.1), (0.3, 220.0, 0.12), (2.0, 8.0, 0.1)])
def test_bursts_survive_the_removal_of_trends(cv: float, scale_s: float, rel: float) -> None:
    """A polynomial takes little of a burst, even of one that lasts minutes."""
    truth = Arrivals("bursty", common=Bursts(cv, ((scale_s, 1.0),)))
    found = [measure_arrivals(drawn(truth, seed, factor=2.0), window_s=3600.0).common for seed in range(4)]
    assert np.mean([bursts.cv if bursts else 0.0 for bursts in found]) == pytest.approx(cv, rel=rel)


@pytest.mark.parametrize("degree", [0, 2])
@pytest.mark.parametrize(
    "truth", [Bursts(0.5, ((24.0, 1.0),)), Bursts(0.6, ((24.0, 0.5), (220.0, 0.5))), Bursts(2.0, ((8.1, 1.0),))]
)
def test_what_the_removal_of_trends_takes_is_given_back(truth: Bursts, degree: int) -> None:
    """From the covariance that an endless log has left, the factor's means over windows vary as they do."""
    lag_s = np.geomspace(0.1, 700.0, 40)
    rho, table = gamma_covariances(truth.cv)

    def covariance(of: Bursts, at_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        score = sum(weight * np.exp(-at_s / scale_s) for scale_s, weight in of.scales)
        return np.interp(score, rho, table) * (of.cv / truth.cv) ** 2

    cell_s = 6.0
    apart = np.arange(600)
    whole = covariance(truth, cell_s * np.abs(apart[:, np.newaxis] - apart))
    basis, _ = np.linalg.qr(np.vander(np.linspace(-1.0, 1.0, 600), degree + 1))
    without = np.eye(600) - basis @ basis.T
    left = without @ whole @ without
    taken = [float(np.diagonal(whole - left, k).mean()) for k in range(300)]
    seen = covariance(truth, lag_s) - np.interp(lag_s, cell_s * apart[:300], taken)
    found = burst_fit.fitted(lag_s, seen, 3600.0, degree)
    assert found is not None
    for window_s in (1.0, 10.0, 60.0, 300.0):
        at_s = np.linspace(0.0, window_s, 2001)
        same, other = (np.trapezoid((window_s - at_s) * covariance(each, at_s), at_s) for each in (found, truth))
        assert same == pytest.approx(other, rel=0.1)


def test_bursts_within_an_hour_are_found_beside_the_day() -> None:
    """Bursts of a minute have the spread that was put in, whatever the day does, within windows and over all."""
    truth = Arrivals("bursty", common=Bursts(0.6, ((30.0, 1.0),)))
    found = []
    for seed in range(4):
        hours = [drawn(truth, 10 * seed + k, duration_s=3600.0, factor=k + 1.0).requests() for k in range(3)]
        time_s = np.concatenate([hour.time_s + 3600.0 * k for k, hour in enumerate(hours)])
        owner, tokens = np.concatenate([hour.adapter for hour in hours]), np.full(len(time_s), 50)
        trace = Trace(time_s - time_s[0], tokens, tokens, owner, tuple(f"a{k:02d}" for k in range(40)), (8,) * 40)
        measured = measure_arrivals(trace, window_s=3600.0)
        found.append(measured.common.cv if measured.common else 0.0)
        whole = measure_arrivals(trace)
        assert whole.common is not None
        assert max(scale for scale, _ in whole.common.scales) > 360.0
        again = bursts_within(whole, 3600.0).common
        assert again is not None
        assert again.cv == pytest.approx(found[-1], rel=0.01)
    assert np.mean(found) == pytest.approx(0.6, rel=0.2)


@pytest.mark.parametrize(("cv", "slow"), [(0.5, 0.3), (1.5, 0.6), (2.1, 0.9)])
def test_bursts_within_a_window_keep_the_spread_beside_the_slow_scales(cv: float, slow: float) -> None:
    """What remains is the factor over its mean given the slow scales, as both parts show."""
    from scipy.stats import gamma, norm

    arrivals = Arrivals("bursty", common=Bursts(cv, ((10.0, round(1.0 - slow, 4)), (20_000.0, slow))))
    left = bursts_within(arrivals, 3600.0).common
    assert left is not None
    assert left.scales == ((10.0, 1.0),)
    # Each part at nodes whose weighted sum is the mean over a standard-normal variable.
    nodes, weights = np.polynomial.hermite_e.hermegauss(50)
    weights /= weights.sum()
    scores = np.sqrt(slow) * nodes[:, np.newaxis] + np.sqrt(1.0 - slow) * nodes
    factor = gamma(cv**-2.0, scale=cv**2).ppf(np.clip(norm.cdf(scores), 1e-15, 1 - 1e-15))
    relative = weights @ factor**2 @ weights / (weights @ (factor @ weights) ** 2) - 1.0
    assert left.cv**2 == pytest.approx(relative, rel=0.001)
    assert bursts_within(arrivals, 1e6) == arrivals
    assert bursts_within(Arrivals(), 60.0) == Arrivals()


def test_times_recorded_in_seconds() -> None:
    """A trace with whole seconds has no bursts shorter than that."""
    trace = drawn(Arrivals(), 3)
    assert measure_arrivals(replace(trace, time_s=np.floor(trace.time_s))).kind == "poisson"


@pytest.mark.skipif(not AZURE.is_dir(), reason="needs the Azure traces in ../shared/data/traces")
def test_the_azure_code_trace_queues_as_when_replayed() -> None:
    """Drawn bursts give the replayed trace's dispersion, and its mean TTFT within a factor 1.5; Poisson does not."""
    trace = assign_adapters(read_trace(AZURE / "azure_llm_2023_code.csv.gz"), 200, ranks=(8, 16, 32), seed=0)
    fleet = measure_workload(trace)
    replay = measure_workload(trace, replay=True)
    server = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")

    def ttft_ms(workload: Workload, seed: int = 0) -> float:
        return packer.simulate(workload, server, max_loras=32, seed=seed).mean_ttft_ms

    drawn_ms = float(np.median([ttft_ms(fleet, seed) for seed in range(9)]))
    assert 1 / 1.5 < drawn_ms / ttft_ms(replay) < 1.5
    assert ttft_ms(fleet.with_arrivals(Arrivals())) < ttft_ms(replay) / 10
    drawn = [draw_requests(fleet, 3600.0, seed).time_s for seed in range(9)]
    for window in (1.0, 10.0, 60.0):
        again = [dispersion(time_s, 3600.0, window) for time_s in drawn]
        assert np.mean(again) == pytest.approx(dispersion(trace.time_s, trace.span_s, window), rel=0.35)


def dispersion(time_s: npt.NDArray[np.float64], span_s: float, window_s: float) -> float:
    """Variance over mean of the counts in whole windows."""
    counts = np.histogram(time_s, window_s * np.arange(span_s // window_s + 1.0))[0]
    return float(counts.var(ddof=1) / counts.mean())


@pytest.mark.parametrize("window_s", [None, 3600.0])
def test_memory_is_bounded_whatever_the_span(window_s: float | None) -> None:
    """A few requests over two years cost no more memory than the bounded tables: no cell for each tenth of a second."""
    time_s = np.array([0.0, 100.0, 150.0, 200.0, 250.0, 300.0, 350.0, 5e7])
    few = np.full(8, 9)
    trace = Trace(time_s, few, few, np.arange(8) % 2, ("a", "b"), (8, 8))
    tracemalloc.start()
    try:
        measure_arrivals(trace, window_s)
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("degree", [0, 2])
def test_what_a_trend_leaves_is_that_of_the_best_fit(degree: int) -> None:
    """Squares less those of the polynomials' coefficients are the squares about the fit of least squares."""
    counts = np.random.default_rng(1).poisson(3.0, 50).astype(np.float64)
    x = np.arange(50)
    fitted = np.polyval(np.polyfit(x, counts, degree), x)
    left = (counts**2).sum() - sum((counts * each).sum() ** 2 for each in burst_fit.polynomials(x, 50, degree))
    assert left == pytest.approx(((counts - fitted) ** 2).sum())


def test_the_end_of_a_window_is_not_taken_for_what_is_before_its_beginning() -> None:
    """The covariance at a lag is that of all pairs of cells so far apart, and of no others; in one cell, the squares
    without the noise of Poisson counts."""
    rows = np.random.default_rng(0).poisson(3.0, (2, 50)).astype(np.float64)
    lag_s, found, squares = _pooled([rows], 50, 1.0, 0)
    left = rows - rows.mean(axis=1, keepdims=True)
    pairs = [(left[:, :-k] * left[:, k:]).sum() / (50 - k) for k in lag_s[1:].astype(int).tolist()]
    assert len(pairs) == 9
    assert found * squares == pytest.approx([((left**2).sum() - rows.sum() * 49 / 50) / 50, *pairs])


def test_two_adapters_have_bursts_of_their_own() -> None:
    """Two are enough to tell what they share from what each has for itself."""
    own = Bursts(1.5, ((60.0, 1.0),))
    trace = drawn(Arrivals("bursty", own=own), 3, adapters=2, factor=40.0)
    found = measure_arrivals(trace).own
    assert found is not None
    assert found.cv == pytest.approx(1.5, rel=0.6)


@pytest.mark.parametrize("hour", [0.0, 0.5, 0.75])
@pytest.mark.parametrize("hours", [2.0, 4.0])
def test_a_change_at_a_full_hour_is_no_burst(hour: float, hours: float) -> None:
    """Bursts are measured in the windows of rates, hours of the clock, whenever a log starts."""
    rng, start_s = np.random.default_rng(3), 20_000 * 86_400.0 + (17.0 + hour) * 3600.0
    changes_s = (1.0 - hour) * 3600.0
    times = np.sort([*rng.uniform(0.0, changes_s, int(changes_s)), *rng.uniform(changes_s, hours * 3600.0, 60_000)])
    ones = np.full(len(times), 100, dtype=np.int64)
    seen = Trace(times - times[0], ones, ones, np.zeros(len(times), dtype=np.int64), ("a",), (8,), start_s=start_s)
    assert measure_arrivals(seen, 3600.0).kind == "poisson"


def test_requests_at_few_times_have_no_bursts(recwarn: pytest.WarningsRecorder) -> None:
    """Too few cells say nothing, and no warning of NumPy reaches the user."""
    times, ones = np.repeat([0.0, 50.0, 100.0], 70), np.full(210, 10, dtype=np.int64)
    seen = Trace(times, ones, ones, np.zeros(210, dtype=np.int64), ("a",), (8,))
    assert measure_arrivals(seen).kind == "poisson"
    assert not recwarn.list


@pytest.mark.parametrize("levels", [(2.0, 8.0, 8.0), (8.0, 8.0, 2.0), (2.0, 8.0, 2.0)])
def test_the_course_of_a_log_without_a_whole_hour_is_no_burst(levels: tuple[float, ...]) -> None:
    """In 90 minutes from 10:20 bursts are measured in the busiest hour, whose rates are those of the plan."""
    rng = np.random.default_rng(3)
    counts = rng.poisson(60.0 * np.repeat(levels, 30))
    times = np.sort(np.repeat(60.0 * np.arange(90), counts) + 60.0 * rng.random(counts.sum()))
    ones = np.full(len(times), 100, dtype=np.int64)
    seen = Trace(times - times[0], ones, ones, 0 * ones, ("a",), (8,), start_s=20_000 * 86_400.0 + 37_200.0)
    found = measure_arrivals(seen, 3600.0).common
    assert found is None or found.cv < 0.15


def test_an_hour_in_which_the_load_steps_up_to_that_of_the_busiest_one_is_no_burst() -> None:
    """A plan for the flat hours of a day serves the half hour that is as busy as they are."""
    rng = np.random.default_rng(0)
    counts = rng.poisson(60.0 * np.repeat([3.0, 36.0], [150, 90]))
    times = np.sort(np.repeat(60.0 * np.arange(240), counts) + 60.0 * rng.random(counts.sum()))
    ones = np.full(len(times), 100, dtype=np.int64)
    seen = Trace(times - times[0], ones, ones, 0 * ones, ("a",), (8,), start_s=20_000 * 86_400.0 + times[0])
    assert measure_arrivals(seen, 3600.0).kind == "poisson"


@pytest.mark.parametrize("times", [[0.0, 4000.0], [0.0, 7200.0, 14_400.0], [0.0, 1.0, 2.0, 3.0, 3900.0]])
@pytest.mark.parametrize("window_s", [60.0, 1800.0, 3600.0])
def test_logs_of_few_requests_have_bursts(
    times: list[float], window_s: float, recwarn: pytest.WarningsRecorder
) -> None:
    """No error or warning, also where the busiest window has one request, or the last request begins a window."""
    ones = np.full(len(times), 100, dtype=np.int64)
    for begin_s in (0.0, 1200.0):
        start_s = 20_000 * 86_400.0 + begin_s
        seen = Trace(np.array(times), ones, ones, 0 * ones, ("a",), (8,), start_s=start_s)
        measure_arrivals(seen, window_s)
    assert not recwarn.list


@pytest.mark.parametrize("window_s", [None, 3600.0])
def test_hours_that_a_log_shows_but_for_a_moment_are_measured(window_s: float | None) -> None:
    """In a log from 10:00 to 13:00 the first request comes a little later, the last one a little earlier: all three
    hours count, as in a log that begins at 10:00 with a request."""
    rng, calm = np.random.default_rng(5), np.full(60, 600)
    counts = np.concatenate([calm, rng.choice([200, 1000], 60), calm])
    times = np.sort(np.repeat(60.0 * np.arange(180), counts) + 60.0 * rng.random(counts.sum()))
    ones = np.full(len(times), 100, dtype=np.int64)
    found = []
    for late_s in (0.0, 0.05, 1.0):
        start_s = 20_000 * 86_400.0 + late_s
        seen = Trace(times - times[0], ones, ones, 0 * ones, ("a",), (8,), start_s=start_s)
        common = measure_arrivals(seen, window_s).common
        found.append(common.cv if common else 0.0)
    assert found == pytest.approx([0.67 / 3**0.5] * 3, rel=0.15)
