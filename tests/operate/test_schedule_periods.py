"""Rates and trends of the periods of a day, from a trace or from a table of rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.operate import schedule as schedules
from packer.operate.day import Period
from packer.operate.schedule import periods_of_trace, schedule, trends_of_rates
from packer.plan import Plan
from packer.planning import explore
from packer.planning.periods import Periods
from packer.planning.solve import solve
from packer.testing.analytic import small_profile
from packer.traces.trace import Trace
from packer.workload import Workload

PROFILE = small_profile()
LONG = Lengths.constant(500), Lengths.constant(460)
FLEET = Workload([Adapter(f"a{i}", 8, 0.3) for i in range(40)], *LONG)


def test_rates_come_from_a_trace() -> None:
    """Requests of two days give the mean rate of each period; an adapter without requests has none."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 1.0)])
    times = np.concatenate([np.arange(0.5, 3600.0, 10.0), 3600.0 + np.arange(0.5, 3600.0, 20.0)])
    ones = np.ones(len(times), dtype=np.int64)
    trace = Trace(times, ones, ones, np.zeros(len(times), dtype=np.int64), ("a",), (8,))
    found, trends = periods_of_trace(replace(trace, start_s=5 * 3600.0), fleet, 3600.0)
    assert list(found) == ["05:00", "06:00"]
    assert found["05:00"].tolist() == pytest.approx([0.1, 0.0], rel=0.02)
    assert found["06:00"].tolist() == pytest.approx([0.05, 0.0], rel=0.02)
    assert trends == {"05:00": (), "06:00": ()}
    with pytest.raises(ValidationError, match="the fleet's adapters, got requests of 'a'"):
        periods_of_trace(trace, Workload([Adapter("b", 8, 1.0)]), 3600.0)


def test_a_period_between_others_holds_at_the_height_that_their_rates_show() -> None:
    """On the way from a quiet period to a busy one rates rise beyond their mean, which fewer servers hold; the fleet's
    own trend, that of its busiest hour, is in no period of several."""
    rates = {name: np.full(40, rate) for name, rate in (("a", 0.01), ("b", 0.3), ("c", 0.75), ("d", 0.3))}
    own = FLEET.with_arrivals(Arrivals().following((300.0, 0.5, 1.5)))
    trends = trends_of_rates(own, rates, 3600.0)
    assert [len(each) for each in trends.values()] == [0, 13, 0, 13]
    assert trends["b"][1] < 0.6 < 1.5 < trends["b"][-1]
    assert trends["d"][1:] == trends["b"][:0:-1]
    assert trends_of_rates(own, {"a": rates["a"]}, 3600.0) == {"a": (300.0, 0.5, 1.5)}
    held, steady = (
        [each.gpus for each in schedule(own, PROFILE, rates, trends=given, margin=0.0).periods for _ in each.names]
        for given in (None, {})
    )
    assert (steady[1], held[1]) == (1, 2)
    assert held[0] == steady[0]


@pytest.mark.parametrize(("from_hour", "hours"), [(22, 4), (9, 3), (6, 24)])
def test_periods_of_a_part_of_a_day_follow_each_other(from_hour: int, hours: int) -> None:
    """Also over midnight; a whole day begins there."""
    times = np.arange(0.0, hours * 3600.0, 100.0)
    ones = np.ones(len(times), dtype=np.int64)
    seen = Trace(times, ones, ones, ones * 0, ("a",), start_s=20_000 * 86_400.0 + from_hour * 3600.0)
    found, _ = periods_of_trace(seen, Workload([Adapter("a", 8, 1.0)]), 3600.0)
    first = 0 if hours == 24 else from_hour
    assert list(found) == [f"{(first + k) % 24:02d}:00" for k in range(hours)]


def _steady(hours: float, last_s: float = 0.0, per_s: float = 1.0, from_s: float = 0.0) -> dict[str, tuple[float, ...]]:
    """The trends of a steady log's periods; the requests of its last seconds come `per_s` times a second."""
    begin_s = 3600.0 * hours - last_s
    times = np.append(np.arange(0.0, begin_s), np.arange(begin_s, 3600.0 * hours, 1.0 / per_s))
    ones = np.ones(len(times), dtype=np.int64)
    log = Trace(times, ones, ones, ones * 0, ("a",), start_s=20_000 * 86_400.0 + from_s)
    return periods_of_trace(log, Workload([Adapter("a", 8, 1.0)]), 3600.0)[1]


def test_a_period_of_which_a_log_shows_a_part_has_the_trend_of_that_part() -> None:
    """The time after the end of a log is not the end of the load in its last period, of one day or of several."""
    assert _steady(4 + 1 / 3, last_s=1200.0, per_s=5.0)["04:00"] == ()
    assert _steady(48 + 1 / 3)["00:00"] == ()
    assert _steady(24 + 1 / 3, from_s=1200.0)["00:00"] == ()


def test_what_is_known_to_hold_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server that also holds in the period beside its own stays there without a search. Where the static servers
    split no adapter, none is simulated alone again."""
    searched: list[str] = []
    alone: list[Any] = []
    plan, needed = Periods.plan, explore.needed

    def counted(self: Periods, names: Any, most: int | None = None, running: Any = (), known: Any = ()) -> Plan | None:
        if known:
            assert self.hold(names, known)
            searched.extend(names)
        return plan(self, names, most, running, known)

    monkeypatch.setattr(Periods, "plan", counted)
    monkeypatch.setattr(explore, "needed", lambda *given, **more: alone.append(1) or needed(*given, **more))
    fleet = Workload([Adapter(f"a{i}", 8, 0.3) for i in range(30)], *LONG)
    rates = {str(t): np.full(30, rate) for t, rate in enumerate((0.08, 0.09, 0.08, 1.4))}
    found = schedule(fleet, PROFILE, rates, trends={}, margin=0.0)
    assert [(each.names, each.gpus > 1) for each in found.periods] == [(("0", "1", "2"), False), (("3",), True)]
    assert "3" in searched
    assert "1" not in searched
    assert len(alone) == 1


def test_starts_that_take_longer_than_a_period_are_paid_once_for_a_long_night() -> None:
    """A night of 8 quiet hours runs on fewer servers, although a start takes 1.5 h."""
    rates = dict(zip("abcdefghijkl", [np.full(40, rate) for rate in (*[0.6] * 4, *[0.02] * 8)], strict=True))
    found = schedule(FLEET, PROFILE, rates, trends={}, startup_s=5400.0, margin=0.0)
    assert [(each.gpus, len(each.names)) for each in found.periods] == [(2, 4), (1, 8)]
    assert found.gpu_hours < found.static_gpu_hours


def test_starts_of_servers_with_several_gpus_count_each_gpu() -> None:
    """A server of two GPUs that starts takes the time of both; half a start counts where it stops."""
    pair = replace(PROFILE, engine=replace(PROFILE.engine, tensor_parallel_size=2))
    settings = pair.settings(2, 8)
    few, many = (
        Period(("t",), 0.0, 3600.0, replace(solve(FLEET, PROFILE, objective="gpus"), bins=bins), (0, 1)[: len(bins)])
        for bins in ([Bin((0, 1), settings, pair)], [Bin((0,), settings, pair), Bin((1,), settings, pair)])
    )
    assert schedules._change_s(few, few, 100.0) == 0.0
    assert schedules._change_s(few, many, 100.0) == 100.0 + schedules.MOVE_COST_S
