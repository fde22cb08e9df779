"""The trend of the load within a window of a trace is found where it was put in, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts
from packer.traces.bursts import measure_arrivals
from packer.traces.trace import Trace
from packer.traces.trend import CELLS, PARTS, flattened, trend_within, trends_between
from packer.twin.arrivals import draw_requests
from packer.workload import Workload

RISE = tuple(np.linspace(0.5, 1.5, PARTS).tolist())
BURSTY = Arrivals("bursty", common=Bursts(0.4, ((10.0, 1.0),)))
LONG = Arrivals("bursty", common=Bursts(0.6, ((30.0, 1.0),)), own=Bursts(1.0, ((60.0, 1.0),)))


def drawn(arrivals: Arrivals, seed: int, rate: float = 2.0) -> Trace:
    """An hour of requests to two adapters."""
    fleet = Workload([Adapter("a", 8, rate), Adapter("b", 8, 1.0)], arrivals=arrivals)
    seen = draw_requests(fleet, 3600.0, seed)
    return Trace(seen.time_s, seen.input_tokens, seen.output_tokens, seen.adapter, fleet.names, (8, 8))


@pytest.mark.parametrize("arrivals", [Arrivals(), BURSTY, LONG], ids=["poisson", "bursty", "long bursts"])
def test_chance_and_bursts_are_no_trend(arrivals: Arrivals) -> None:
    """The load of equal parts of an hour differs by chance and by bursts without one."""
    found = [trend_within(drawn(arrivals, seed), 0.0, 3600.0) for seed in range(25)]
    assert sum(map(bool, found)) <= 1


@pytest.mark.parametrize("arrivals", [Arrivals(), BURSTY], ids=["poisson", "bursty"])
def test_a_trend_is_found_again(arrivals: Arrivals) -> None:
    """The factors are those by which the rates were multiplied, on the mean of several traces, and have the mean 1."""
    rising = arrivals.following((300.0, *RISE))
    found = [trend_within(drawn(rising, seed), 0.0, 3600.0) for seed in range(20)]
    seen = [each for each in found if each]
    assert len(seen) >= 10
    assert np.mean(seen, axis=0) == pytest.approx(RISE, abs=0.12)
    assert np.mean(seen, axis=1) == pytest.approx(1.0, abs=1e-9)


def test_lengths_that_grow_are_a_trend() -> None:
    """The trend is that of the engine's time, so that longer prompts at the same rate are one, and so are answers, a
    token of which takes as long as several of a prompt."""
    steady = drawn(Arrivals(), 1, rate=5.0)
    longer = np.interp(steady.time_s, (0.0, 3600.0), (1.0, 4.0))
    one, few = np.full(len(steady), 3000), np.full(len(steady), 1000)
    prompts = replace(steady, input_tokens=(one * longer).astype(np.int64), output_tokens=few)
    answers = replace(steady, input_tokens=one, output_tokens=(few * longer).astype(np.int64))
    factors = trend_within(prompts, 0.0, 3600.0)
    assert np.all(np.diff(factors) > 0.0)
    assert factors[-1] == pytest.approx((1.0 + 4.0) / (1.0 + 2.5), abs=0.1)
    assert trend_within(answers, 0.0, 3600.0) == pytest.approx(factors, abs=0.01)


def test_the_same_window_of_every_day_has_one_trend() -> None:
    """Requests of all days count at their time of day; those outside the window do not."""
    one = drawn(Arrivals().following((300.0, *RISE)), 3)
    pairs = np.concatenate([one.time_s + 3600.0, one.time_s + 90_000.0, [7200.0 + 86_400.0 + k for k in range(500)]])
    rows = np.concatenate([np.tile(np.arange(len(one.time_s)), 2), np.zeros(500, dtype=np.int64)])
    days = replace(
        one, time_s=pairs, input_tokens=one.input_tokens[rows], output_tokens=one.output_tokens[rows],
        adapter=None, names=(), ranks=None,
    )  # fmt: skip
    assert trend_within(days, 3600.0, 7200.0, daily=True) == trend_within(one, 0.0, 3600.0)


def test_small_and_long_trends_are_left_out() -> None:
    """A rise of some per cent is within what a plan allows for; a simulated hour does not show a trend over a day."""
    few = tuple(np.linspace(0.94, 1.06, PARTS).tolist())
    assert trend_within(drawn(Arrivals().following((300.0, *few)), 4, rate=200.0), 0.0, 3600.0) == ()
    rising = drawn(Arrivals().following((300.0, *RISE)), 5)
    assert trend_within(rising, 0.0, 3600.0) != ()
    assert trend_within(rising, 0.0, 86_400.0) == ()


def test_mean_loads_of_hours_show_how_a_day_rises_and_falls() -> None:
    """Each hour of a day with one steep peak gets the course of its load, from the means of the hours alone."""
    minutes = (np.arange(24 * 60) + 0.5) / 60.0
    load = 1.0 + 50.0 * np.exp(-(((minutes - 12.3) / 3.0) ** 2))
    found = trends_between(load.reshape(24, 60).mean(axis=1), 3600.0)
    parts = load.reshape(24, PARTS, 5).mean(axis=2)
    steep = [k for k in range(24) if parts[k].max() > 1.25 * parts[k].mean()]
    assert len(steep) >= 6
    for k in steep:
        period_s, *factors = found[k]
        assert period_s == 300.0
        assert factors == pytest.approx(parts[k] / parts[k].mean(), abs=0.2)
        assert np.mean(factors) == pytest.approx(1.0, abs=1e-3)
    assert found[0] == found[12] == ()


def test_mean_loads_that_jump_have_no_trend() -> None:
    """Office hours, idle hours, one busy hour and periods longer than an hour are constant."""
    for loads in ([1.0, 1.0, 9.0, 9.0, 9.0, 1.0], [0.0, 5.0, 0.0, 0.0], [3.0], [1.0, 7.0]):
        assert trends_between(np.array(loads), 3600.0) == [()] * len(loads)
    assert trends_between(np.array([1.0, 5.0, 9.0, 5.0]), 7200.0) == [()] * 4


SPIKE = (600.0, 0.75, 2.25, 0.75, 0.75, 0.75, 0.75)


def hours(*traces: Trace) -> Trace:
    """Traces of an hour each, one after the other, from a whole hour on."""
    times = np.concatenate([each.time_s + 3600.0 * k for k, each in enumerate(traces)])
    names = ("input_tokens", "output_tokens", "adapter")
    columns = [np.concatenate([getattr(each, name) for each in traces]) for name in names]
    return Trace(times - times[0], *columns, traces[0].names, (8, 8), start_s=7200.0 + times[0])


@pytest.mark.parametrize("rate", [2.0, 36.0])
@pytest.mark.parametrize(
    "trend",
    [
        SPIKE,
        (1800.0, 0.3, 1.7),
        (1800.0, 2.0, 0.0),
        (600.0, *[0.6, 1.8, 0.6] * 2),
        (180.0, *[2.2, *[0.7] * 4] * 4),
        (1200.0, 0.5, 1.7, 0.8),
        (900.0, 0.4, 1.6, 0.8, 1.2),
        (300.0, *[0.4] * 2, *[1.6] * 3, *[0.7] * 4, *[1.4] * 2, 0.8),
    ],
    ids=["spike", "half", "off", "two", "each quarter", "three levels", "four levels", "five levels"],
)
def test_a_load_that_is_higher_for_some_minutes_is_a_trend_and_no_burst(trend: tuple[float, ...], rate: float) -> None:
    """A plan for random bursts of a load that has a few levels takes up to twice the GPUs of its hour."""
    trace = hours(*(drawn(Arrivals().following(trend), seed, rate) for seed in (1, 2)))
    factors = np.array(trend_within(trace, 7200.0, 10800.0))
    assert factors.mean() == pytest.approx(1.0)
    assert factors == pytest.approx(np.repeat(trend[1:], CELLS // len(trend[1:])), abs=0.35)
    assert measure_arrivals(trace, 3600.0).common is None
    assert measure_arrivals(trace).common is not None


def test_steps_that_a_plan_for_the_busiest_hour_does_not_follow_are_bursts() -> None:
    """Steps are left out of the bursts only up to the load of that of the busiest hour, which the rates follow."""
    spike = drawn(Arrivals().following(SPIKE), 1, 4.0)
    for rate, served in ((6.0, False), (12.0, True)):
        trace = hours(spike, drawn(Arrivals(), 2, rate))
        assert np.array_equal(flattened(trace, 3600.0).time_s, trace.time_s) != served
    both = hours(
        drawn(Arrivals().following((300.0, *[0.4] * 11, 7.6)), 3, 4.0), drawn(Arrivals().following(SPIKE), 4, 5.0)
    )
    kept = flattened(both, 3600.0).time_s
    first = both.time_s < 3600.0 - (both.start_s - 7200.0)
    assert np.array_equal(kept[first], both.time_s[first])
    assert not np.array_equal(kept[~first], both.time_s[~first])
    assert np.all(np.diff(kept) >= 0.0)
