from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.arrays import FloatArray
from packer.errors import ValidationError
from packer.traces.pattern import RateTable, begins_at_s, latest_rates, loads_text, rates_of, spacing_s
from packer.traces.trace import Trace


def trace(times: list[float], adapters: list[int], names: tuple[str, ...]) -> Trace:
    """Requests of 100 + 10 tokens."""
    n = len(times)
    tokens = np.full(n, 100, dtype=np.int64)
    return Trace(np.array(times), tokens, tokens // 10, np.array(adapters, dtype=np.int64), names)


def test_requests_are_counted_in_windows() -> None:
    """Rates are requests / the time that is covered, aligned to the clock, without the cut-off window at the end."""
    seen = rates_of(trace([0, 50, 60, 70, 130, 170, 190], [0, 0, 0, 1, 1, 1, 0], ("a", "b")), 60.0)
    assert seen.start_s.tolist() == [0.0, 60.0, 120.0]
    np.testing.assert_allclose(seen.rates, [[2 / 60, 0], [1 / 60, 1 / 60], [0, 2 / 60]])
    np.testing.assert_allclose(seen.tokens, [110, 110])


def test_windows_follow_the_clock() -> None:
    """A log that starts at 10:59:30 has its first whole hour at 11:00."""
    start = 10 * 3600 + 3570.0
    seen = rates_of(replace(trace([0, 31, 3000, 4000, 7400], [0] * 5, ("a",)), start_s=start), 3600.0)
    assert seen.start_s.tolist() == [11 * 3600.0, 12 * 3600.0][: len(seen.start_s)]


def test_loads_are_hours_that_happened() -> None:
    """Mean, percentile and peak are rate vectors of windows; each-peak is every adapter's own maximum."""
    rates = np.array([[1.0, 1.0], [5.0, 0.0], [0.0, 4.0], [2.0, 2.0]])
    table = RateTable(("a", "b"), rates, np.array([10.0, 10.0]), np.arange(4.0), 1.0)
    loads = table.loads([50.0])
    assert loads["mean"].tolist() == [2.0, 1.75]
    assert loads["peak"].tolist() == [5.0, 0.0]
    assert loads["p50"].tolist() in rates.tolist()
    assert loads["each-peak"].tolist() == [5.0, 4.0]
    assert (loads["each-peak"] >= loads["peak"]).all()


def test_loads_are_the_median_and_the_95th_percentile_unless_named() -> None:
    """Without percentiles the loads are those that the documents name, lightest first."""
    table = RateTable(("a",), np.arange(1.0, 101.0)[:, None], np.ones(1), np.arange(100.0), 1.0)
    loads = {name: rates.tolist() for name, rates in table.loads().items()}
    assert loads == {"mean": [50.5], "p50": [50.0], "p95": [95.0], "peak": [100.0], "each-peak": [100.0]}


def test_days_are_averaged_by_their_hours() -> None:
    """Two days of a daily wave give one day whose hours are the means."""
    hours = np.arange(48)
    rates = np.array([[h % 24 + (1.0 if h < 24 else 3.0)] for h in hours])
    table = RateTable(("a",), rates, np.ones(1), hours * 3600.0, 3600.0)
    day = table.by_time_of_day()
    assert day.rates[:, 0].tolist() == [h + 2.0 for h in range(24)]


def test_loads_file_is_what_headroom_reads(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The CSV goes into the objective headroom, whatever the adapters are called."""
    from packer.adapter import Adapter
    from packer.objectives.headroom import Headroom
    from packer.workload import Workload

    names = ("a", 'b,"c"', "d e")
    path = tmp_path / "loads.csv"
    path.write_text(loads_text(names, {"mean": np.array([1.0, 2.0, 0.0]), "peak": np.array([2.0, 4.0, 1.0])}))
    fleet = Workload([Adapter(name, 8, 1.0) for name in names])
    found = Headroom(factor=1.5, rates=str(path)).scenarios(fleet)
    assert found[2].factor == 1.5
    np.testing.assert_allclose(found[2].workload.rates, [2.0, 4.0, 1.0])


def test_too_many_windows_are_refused() -> None:
    """A slip in the unit of time must not eat the memory."""
    with pytest.raises(ValidationError, match="longer window"):
        rates_of(trace([0, 1e9], [0, 0], ("a",)), 1.0)
    with pytest.raises(ValidationError, match="longer window"):
        rates_of(trace([0, 7e9], [0, 0], ("a",)), 3600.0)


def steady(rate: float, n: int) -> Trace:
    """`n` requests of one adapter at a constant rate, req/s."""
    return trace((np.arange(n) / rate).tolist(), [0] * n, ("a",))


@given(
    rate=st.floats(0.01, 100.0),
    per_window=st.integers(200, 1000),
    windows=st.floats(1.0, 4.0),
    phase=st.floats(0.0, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_a_constant_rate_is_found_whatever_the_alignment(
    rate: float, per_window: int, windows: float, phase: float
) -> None:
    """However a log lies across the windows, a constant rate is the rate of every window that is kept."""
    window_s = per_window / rate
    log = steady(rate, round(per_window * windows))
    seen = rates_of(replace(log, start_s=(1000.0 + phase) * window_s), window_s)
    np.testing.assert_allclose(seen.rates, rate, rtol=0.02)
    assert len(seen.rates) >= int(windows - 1.0)
    np.testing.assert_allclose(latest_rates(log, window_s), [rate], rtol=0.02)


@pytest.mark.parametrize("minutes_before", [3, 6, 30, 54, 60])
def test_two_cut_off_windows_do_not_dilute_the_rate(minutes_before: int) -> None:
    """66 minutes in two windows of an hour give the rate of the time that is covered, not a tenth of it."""
    start = 7 * 3600.0 - minutes_before * 60.0
    seen = rates_of(replace(steady(4.0, 66 * 60 * 4), start_s=start), 3600.0)
    np.testing.assert_allclose(seen.rates, 4.0, rtol=0.01)


def test_whole_windows_are_kept() -> None:
    """A log that covers three windows from end to end gives three."""
    seen = rates_of(replace(steady(1.0, 180), start_s=600.0), 60.0)
    assert seen.start_s.tolist() == [600.0, 660.0, 720.0]
    np.testing.assert_allclose(seen.rates, 1.0, rtol=0.01)


def test_the_latest_rates_are_those_before_the_end() -> None:
    """Only the last seconds count, wherever the clock's windows lie; a shorter log counts for its length."""
    slow, fast = np.arange(0, 1000, 10.0), np.arange(1000, 1090, 0.5)
    log = trace([*slow, *fast], [0] * len(slow) + [1] * len(fast), ("slow", "fast"))
    np.testing.assert_allclose(latest_rates(log, 60.0), [0.0, 2.0])
    np.testing.assert_allclose(latest_rates(steady(3.0, 90), 3600.0), [3.0])


def test_rates_need_time() -> None:
    """Requests of a single moment have no rate: that is said instead of dividing by nothing."""
    for measure in (rates_of, latest_rates):
        with pytest.raises(ValidationError, match="longer than 0 s"):
            measure(trace([5.0, 5.0], [0, 0], ("a",)), 60.0)


def test_a_day_has_every_window() -> None:
    """The mean day is by the clock from midnight; windows off the clock and days with a gap are refused."""
    starts = 20_000 * 86_400.0 + 6 * 3600.0 + 6 * 3600.0 * np.arange(8)
    rates = np.arange(8.0)[:, np.newaxis]
    table = RateTable(("a",), rates, np.ones(1), starts, 6 * 3600.0)
    found = {name: vector.tolist() for name, vector in table.day().items()}
    assert found == {"00:00": [5.0], "06:00": [2.0], "12:00": [3.0], "18:00": [4.0]}
    with pytest.raises(ValidationError, match="whole day, got none of the 21600 s from 00:00"):
        RateTable(("a",), rates[:2], np.ones(1), starts[:2], 6 * 3600.0).day()
    with pytest.raises(ValidationError, match="start at multiples of 21600 s, got one at 06:01"):
        RateTable(("a",), rates, np.ones(1), starts + 60.0, 6 * 3600.0).day()
    for window_s in (90.0, 7 * 3600.0):
        with pytest.raises(ValidationError, match="whole minutes that divide a day"):
            RateTable(("a",), rates, np.ones(1), starts, window_s).day()


def test_the_mean_day_is_of_days_with_requests() -> None:
    """A day without requests, as of a lost file, makes no other day quieter; windows must begin at the same times."""
    starts = 20_000 * 86_400.0 + 6 * 3600.0 * np.arange(12)
    rates = np.repeat([1.0, 0.0, 2.0], 4)[:, np.newaxis]
    mean = RateTable(("a",), rates, np.ones(1), starts, 6 * 3600.0).by_time_of_day()
    assert (mean.rates.ravel().tolist(), mean.start_s.tolist()) == ([1.5] * 4, starts[:4].tolist())
    with pytest.raises(ValidationError, match="Expected windows that divide a day, got 25200 s"):
        RateTable(("a",), rates, np.ones(1), starts, 7 * 3600.0).by_time_of_day()


@pytest.mark.parametrize(("gap_s", "rates"), [(1.0, [0.1, 0.1, 1.0]), (9.0, [0.1, 0.1])])
def test_a_part_of_a_window_counts_if_it_is_the_busiest(gap_s: float, rates: list[float]) -> None:
    """A log that ends within its busiest hour shows that hour; a part with less load than another hour is left out."""
    times = [*np.arange(0.0, 7200.0, 10.0), *np.arange(7200.0, 10_200.0, gap_s)]
    seen = rates_of(trace(times, [0] * len(times), ("a",)), 3600.0)
    assert seen.rates.ravel().tolist() == pytest.approx(rates, rel=0.01)


@pytest.mark.parametrize(
    ("minutes", "gap_s", "rates"), [(20, 0.2, [1.0, 1.0, 5.0]), (40, 0.7, [1.0, 1.0, 1 / 0.7]), (20, 0.75, [1.0, 1.0])]
)
def test_traffic_that_grows_until_a_log_ends_is_planned_for(minutes: int, gap_s: float, rates: list[float]) -> None:
    """A part with a surely higher rate, over half an hour at least, is an hour with its rate, first or last."""
    times = np.append(np.arange(0.0, 7200.0), np.arange(7200.0, 7200.0 + 60.0 * minutes, gap_s))
    seen = rates_of(trace(times.tolist(), [0] * len(times), ("a",)), 3600.0)
    assert seen.rates.ravel().tolist() == pytest.approx(rates, rel=0.01)
    back = (times[-1] - times[::-1]).tolist()
    start_s = 3600.0 * 7 - 60.0 * minutes
    seen = rates_of(replace(trace(back, [0] * len(times), ("a",)), start_s=start_s), 3600.0)
    assert seen.rates.ravel().tolist() == pytest.approx(rates[::-1], rel=0.01)


def test_a_part_of_an_hour_as_busy_as_in_other_hours_is_left_out() -> None:
    """Where each hour begins with half an hour of requests, a log that ends after it has no busier hour at its end."""
    half = np.arange(0.0, 1800.0, 0.5)
    times = np.concatenate([half, half + 3600.0, half + 7200.0])
    seen = rates_of(trace(times.tolist(), [0] * len(times), ("a",)), 3600.0)
    assert seen.rates.ravel().tolist() == pytest.approx([1.0, 1.0], rel=0.01)


def test_a_few_busy_seconds_are_no_busy_hour() -> None:
    """A burst at the end of a log is not taken for the load of a whole hour."""
    times = [*np.arange(0.0, 7200.0, 100.0), *np.arange(7200.0, 7210.0, 0.1)]
    seen = rates_of(trace(times, [0] * len(times), ("a",)), 3600.0)
    assert seen.rates.ravel().tolist() == pytest.approx([0.01, 0.01, 100 / 1800])


def test_the_ends_of_whole_days_are_one_window() -> None:
    """A log of a day from 07:30 has 24 windows, that of 07:00 from both of its halves."""
    start_s = 20_000 * 86_400.0 + 7.5 * 3600.0
    times = [*np.arange(0.0, 1800.0, 60.0), *np.arange(1800.0, 84_600.0, 600.0), *np.arange(84_600.0, 86_400.0, 20.0)]
    seen = rates_of(replace(trace(times, [0] * len(times), ("a",)), start_s=start_s), 3600.0)
    assert len(seen.rates) == 24
    assert seen.start_s[0] == start_s - 1800.0
    assert seen.rates[0, 0] == pytest.approx(120 / 3600, rel=0.01)
    assert list(seen.day())[7] == "07:00"
    times = [*np.arange(0.0, 600.0, 1.0), *np.arange(600.0, 84_000.0, 100.0), *np.arange(84_000.0, 84_600.0, 1.0)]
    seen = rates_of(replace(trace(times, [0] * len(times), ("a",)), start_s=start_s + 1200.0), 3600.0)
    assert seen.rates.ravel().tolist() == pytest.approx([1200 / 1800, *[0.01] * 23], rel=0.02)


def test_an_hour_that_a_log_shows_at_both_ends_counts_once() -> None:
    """A steady log from 07:20 to 07:40 of the next day has no busier hour at 07:00, of which it shows 80 minutes."""
    seen = rates_of(replace(trace(range(87_600), [0] * 87_600, ("a",)), start_s=7 * 3600.0 + 1200.0), 3600.0)
    assert seen.rates.ravel().tolist() == pytest.approx([1.0] * 24, rel=0.01)


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize(("minutes", "times"), [(4, 5.0), (20, 1.4)])
def test_a_surge_that_is_left_out_is_known(*, front: bool, minutes: int, times: float) -> None:
    """A part of an hour at an end of a log, left out but busier than all times as long, is said with its load."""
    clock = np.append(np.arange(0.0, 7200.0), np.arange(7200.0, 7200.0 + 60.0 * minutes, 1.0 / times))
    if front:
        clock = (clock[-1] - clock)[::-1]
    log = replace(trace(clock.tolist(), [0] * len(clock), ("a",)), start_s=72_000.0 - 60.0 * minutes * front)
    seen = rates_of(log, 3600.0)
    np.testing.assert_allclose(seen.rates, 1.0, rtol=0.01)
    assert seen.surge is not None
    assert seen.surge == pytest.approx((72_000.0 + (-60.0 * minutes if front else 7200.0), 60.0 * minutes, times), 0.01)


@pytest.mark.parametrize("more", [np.empty(0), np.arange(1000.0, 1240.0, 0.2), np.arange(7205.0, 7206.0, 0.2)])
def test_an_end_of_a_log_that_is_not_surely_busier_is_no_surge(more: FloatArray) -> None:
    """Not said: an end as busy as the rest, one as busy as some minutes in the log, and one of a few requests."""
    end = np.arange(7200.0, 7440.0, 0.2 if 0 < more.min(initial=0.0) < 2000.0 else 1.0)
    clock = np.sort(np.concatenate([np.arange(0.0, 7200.0), more, end]))
    assert rates_of(trace(clock.tolist(), [0] * len(clock), ("a",)), 3600.0).surge is None


@pytest.mark.parametrize(("levels", "begin"), [((1, 5, 5), 50), ((5, 5, 1), 20), ((1, 5, 1), 20), ((1, 3, 2), 50)])
def test_a_log_without_a_whole_hour_by_the_clock_shows_its_busiest_one(levels: tuple[int, ...], begin: int) -> None:
    """An hour and a half from 10:20 has an hour, too: its mean would be planned for with its course as bursts."""
    minutes = np.repeat(levels, 30)
    times = np.concatenate([60.0 * k + np.arange(0.0, 60.0, 1.0 / level) for k, level in enumerate(minutes)])
    seen = rates_of(replace(trace(times.tolist(), [0] * len(times), ("a",)), start_s=10 * 3600.0 + 1200.0), 3600.0)
    most = max(sum(levels[:2]), sum(levels[1:])) / 2
    assert not seen.whole
    assert (seen.rates.ravel().tolist(), seen.start_s.tolist()) == (
        pytest.approx([most], rel=0.01), pytest.approx([36_000.0 + 60.0 * begin], abs=60.0),
    )  # fmt: skip
    day = seen.by_time_of_day()
    assert (day.rates.tolist(), day.start_s.tolist()) == (seen.rates.tolist(), seen.start_s.tolist())


def test_a_trace_without_requests_in_a_whole_window_is_one() -> None:
    """No whole hour with a request: the rate is that of the whole trace."""
    minute, times = 50, np.append(np.arange(0.0, 600.0), 9000.0)
    start_s = 10 * 3600.0 + minute * 60.0
    seen = rates_of(replace(trace(times.tolist(), [0] * len(times), ("a",)), start_s=start_s), 3600.0)
    assert seen.whole
    assert seen.rates.shape == (1, 1)
    assert seen.rates[0, 0] == pytest.approx((len(times) - 1) / times[-1], rel=0.01)


def test_a_trace_as_long_as_a_window_keeps_its_last_request() -> None:
    """The request at its very end counts."""
    seen = rates_of(trace([0.0, 1800.0, 3600.0], [0, 0, 1], ("a", "b")), 3600.0)
    assert (seen.rates > 0).all()


@pytest.mark.parametrize("percentile", [7.0, 14.0, 28.0, 55.0, 56.0])
def test_percentiles_are_exact(percentile: float) -> None:
    """Of 100 windows, p7 is the seventh from below."""
    table = RateTable(("a",), np.arange(1.0, 101.0)[:, None], np.ones(1), np.arange(100.0), 1.0)
    assert table.loads([percentile])[f"p{percentile:g}"].tolist() == [percentile]


@pytest.mark.parametrize(
    ("names", "gap_s"),
    [
        (["00:00", "06:00", "12:00", "18:00"], 21_600.0),
        (["22:30", "23:00", "23:30", "0:00"], 1800.0),
        (["00:00", "06:00", "13:00"], None),
        (["00:00", "13:00", "02:00"], None),
        (["00:00", "00:00"], None),
        (["night", "day"], None),
        (["12:00"], None),
        (["24:00", "25:00"], None),
    ],
)
def test_evenly_spaced_times_have_a_spacing(names: list[str], gap_s: float | None) -> None:
    """Times of one day at equal distances say how long their windows are, also over midnight."""
    assert spacing_s(names) == gap_s


def test_periods_begin_at_the_times_that_name_them() -> None:
    """The first time is the begin, other names have none, and times that the periods do not keep are refused."""
    assert begins_at_s(["22:30", "23:00", "23:30", "0:00"], 1800.0) == 81_000.0
    assert begins_at_s(["night", "06:00"], 1800.0) == 0.0
    assert begins_at_s(["00:00", "00:01", "00:03", "00:04"], 90.0) == 0.0  # names have no seconds
    for names, period_s in ((["22:30", "23:00"], 3600.0), (["00:00", "06:00", "13:00"], 21_600.0)):
        with pytest.raises(ValidationError, match="begin at the time that names it"):
            begins_at_s(names, period_s)
