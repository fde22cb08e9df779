"""The day: servers by period, and their replay."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts, RequestTrace
from packer.errors import IncompatibleError, ValidationError
from packer.goal import Limits, Slo
from packer.gpu import GpuKind
from packer.io.profiles import load_profile
from packer.objectives.all_day import AllDay
from packer.objectives.headroom import with_rates
from packer.operate import schedule as schedules
from packer.operate.day import Period, Schedule
from packer.operate.replay import windows_of
from packer.operate.schedule import rates_of_trace, schedule, server_goal
from packer.plan import Plan, Status
from packer.planning.solve import solve
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.traces.trace import Trace
from packer.workload import Workload

PROFILE = small_profile()
FLEET = Workload([Adapter(f"a{i}", 8 << i % 3, 0.3) for i in range(40)])


def day(periods: int = 8, swing: float = 0.8) -> dict[str, np.typing.NDArray[np.float64]]:
    """A day with a peak in its middle, and adapters that peak at different times."""
    shift = np.arange(len(FLEET)) % 2
    return {
        str(t): 0.6 * (1.0 - swing * np.cos(2 * np.pi * (t - shift) / periods)) / (1.0 + swing)
        for t in range(periods)
    }


def scheduled(rates: Any, **changes: Any) -> Schedule:
    """A schedule by the analytic predictor, without a margin."""
    return schedule(FLEET, PROFILE, rates, predictor=AnalyticPredictor(), margin=0.0, **changes)


def test_every_period_holds_and_every_adapter_has_a_server() -> None:
    """The servers of each period serve all adapters at each of its rates, and so does the static plan."""
    rates = day()
    found = scheduled(rates)
    assert [name for each in found.periods for name in each.names] == list(rates)
    for before, after in pairwise(found.periods):
        assert before.end_s == after.start_s
    predictor = AnalyticPredictor()
    for each in found.periods:
        assert sorted(i for item in each.plan.bins for i in item.adapters) == list(range(len(FLEET)))
        for name in each.names:
            fleet = with_rates(FLEET, rates[name])
            assert predictor.evaluate(fleet, each.plan.bins).feasible.all()
            assert predictor.evaluate(fleet, found.static.bins).feasible.all()


def test_a_server_keeps_its_settings() -> None:
    """max_loras and max_lora_rank of a server are the same all day, and it holds the adapters of all its periods."""
    found = scheduled(day())
    for each in found.periods:
        for k, item in zip(each.servers, each.plan.bins, strict=True):
            assert item.settings == found.servers[k].settings
            assert set(item.adapters) <= set(found.servers[k].adapters)
    assert max(each.gpus for each in found.periods) <= found.static.n_gpus
    assert set(range(len(found.servers))) == {k for each in found.periods for k in each.servers}
    shares = np.zeros(len(FLEET))
    for item in found.servers:
        shares[list(item.adapters)] += item.shares
    assert shares == pytest.approx(1.0)


def test_a_server_with_other_settings_is_another_server() -> None:
    """One GPU at night has other settings than any by day: a new server takes its place, which counts as a start."""
    found = scheduled(day(), slo={"server.mean_ttft_ms": 60.0})
    night, morning = found.periods[0], found.periods[1]
    assert (night.gpus, morning.gpus) == (1, 2)
    assert not set(night.servers) & set(morning.servers)
    assert len(found.servers) > found.static.n_gpus
    assert {(1, k) for k in morning.servers} <= set(found.starts())
    hours = sum(each.gpus * each.hours for each in found.periods)
    assert found.gpu_hours == pytest.approx(hours + len(found.starts()) * found.startup_s / 3600.0)
    assert len(morning.moved) == len(FLEET)
    assert found.most_gpus == max(
        len({*each.servers, *found.periods[t - 1].servers}) for t, each in enumerate(found.periods)
    )


def test_gpus_at_hand_are_enough_while_servers_are_replaced() -> None:
    """Four GPUs hold all day, and five run while one of their servers is replaced: with four there is no such day."""
    given: dict[str, Any] = {
        "predictor": AnalyticPredictor(),
        "margin": 0.0,
        "slo": {"server.mean_ttft_ms": 55.0},
    }
    found = schedule(FLEET, GpuKind(PROFILE, available=5), day(), **given)
    assert (found.static.n_gpus, found.most_gpus) == (4, 5)
    with pytest.raises(ValidationError, match=r"at least 5 GPUs .* while servers are replaced, got 4"):
        schedule(FLEET, GpuKind(PROFILE, available=4), day(), **given)


def test_midnight_ends_no_period() -> None:
    """A day that begins at another hour takes as many GPU-hours and starts."""
    rates = day()
    names = list(rates)
    found = [scheduled({name: rates[name] for name in (*names[k:], *names[:k])}) for k in (0, 1, 3)]
    for each in found:
        assert each.gpu_hours == pytest.approx(found[0].gpu_hours)
        assert len(each.starts()) == len(found[0].starts())
        assert (each.periods[0].start_s, each.periods[-1].end_s) == (0.0, len(rates) * 3600.0)
    assert found[1].periods[0].servers == found[1].periods[-1].servers


def test_fewer_servers_at_night() -> None:
    """The schedule takes fewer GPU-hours than the static plan, starts included, and at least what each hour needs."""
    rates = day()
    found = scheduled(rates)
    assert found.static.n_gpus > min(each.gpus for each in found.periods)
    assert found.gpu_hours < found.static_gpu_hours
    alone = sum(
        solve(
            with_rates(FLEET, vector), PROFILE, predictor=AnalyticPredictor(), margin=0.0, verify=False
        ).n_gpus
        for vector in rates.values()
    )
    assert found.gpu_hours >= alone
    assert found.regret == pytest.approx(found.static_gpu_hours / found.gpu_hours - 1.0)
    assert found.moves > 0


def test_a_day_on_one_server_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one server holds all day no period can take fewer, and none is planned again."""
    searched: list[Any] = []
    monkeypatch.setattr(
        schedules, "solve", lambda *given, **more: searched.append(1) or solve(*given, **more)
    )
    fleet = Workload(FLEET.adapters[:3])
    rates = {str(t): np.full(3, 0.1 * t) for t in (1, 2, 3, 4)}
    found = schedule(fleet, PROFILE, rates, predictor=AnalyticPredictor(), margin=0.0)
    assert (len(searched), found.static.n_gpus, len(found.periods)) == (1, 1, 1)
    assert found.periods[0].plan.workload.rates.max() == pytest.approx(0.4)


def test_equal_hours_are_one_period() -> None:
    """Nothing moves and nothing starts on a day without change."""
    flat = {str(t): np.full(len(FLEET), 0.3) for t in range(4)}
    found = scheduled(flat)
    assert len(found.periods) == 1
    assert (found.moves, found.starts()) == (0, [])
    assert found.gpu_hours == found.static_gpu_hours
    assert found.running(0) == [(0.0, 4 * 3600.0)]


def test_slow_starts_keep_servers_on() -> None:
    """A server that takes longer to start than it would be off is not stopped."""
    rates = {str(t): np.full(len(FLEET), 0.6 if t % 2 else 0.2) for t in range(6)}
    quick = scheduled(rates, period_s=600.0, startup_s=10.0)
    slow = scheduled(rates, period_s=600.0, startup_s=3000.0)
    assert quick.starts()
    assert not slow.starts()


def test_every_server_keeps_the_limits() -> None:
    """A tight limit on the latency takes more servers than none, and an unknown one is refused."""
    rates = day()
    loose, tight = scheduled(rates, slo="none"), scheduled(rates, slo={"server.mean_ttft_ms": 60.0})
    assert tight.gpu_hours > loose.gpu_hours
    for each in tight.periods:
        for name in each.names:
            found = AnalyticPredictor().evaluate(with_rates(FLEET, rates[name]), each.plan.bins)
            assert (found.mean_ttft_ms <= 60.0).all()
    for key in ("ttft_ms", "p99_e2e_ms", "server.p90_itl_ms"):
        with pytest.raises(IncompatibleError, match=f"a limit of {key}"):
            scheduled(rates, slo={key: 1.0})


def test_a_day_is_planned_for_the_limits_of_the_fleet() -> None:
    """Without limits of its own a day keeps the strictest class of the fleet."""
    slow = [replace(adapter, slo_class="chat") for adapter in FLEET.adapters[:20]]
    adapters = (*slow, *FLEET.adapters[20:])
    strict = replace(FLEET, adapters=adapters, slo=Slo(classes=(("chat", Limits(300.0, 20.0)),)))
    limits = [server_goal(each.slo).limits.to_dict() for each in (strict, FLEET)]
    assert limits[0] == {"server.p99_ttft_ms": 300.0, "server.mean_itl_ms": 20.0}
    assert limits[1] == {"server.p99_ttft_ms": 2000.0, "server.mean_itl_ms": 100.0}
    given: dict[str, Any] = {"predictor": AnalyticPredictor(), "margin": 0.0}
    found = schedule(strict, PROFILE, day(), **given)
    for each in found.periods:
        assert (each.plan.evaluations.p99_ttft_ms <= 300.0).all()


def test_the_limits_hold_in_quieter_periods() -> None:
    """A server whose adapters peak while the rest of the fleet is quiet keeps the limits then, too."""
    fleet = Workload([Adapter(f"a{i}", rank, 1.0) for i, rank in enumerate((8, 32, 8, 8, 8))])
    rates = {"x": np.array([0.1, 0.1, 0.1, 4.6, 5.6]), "y": np.array([2.6, 2.9, 4.1, 0.1, 0.1])}
    for limit_ms in (60.0, 100.0):
        slo = {"mean_ttft_ms": limit_ms}
        found = schedule(fleet, PROFILE, rates, predictor=AnalyticPredictor(), margin=0.0, slo=slo)
        for vector in rates.values():
            rows = AnalyticPredictor().evaluate(with_rates(fleet, vector), found.static.bins)
            assert (rows.mean_ttft_ms <= limit_ms).all()


def test_the_day_has_rates() -> None:
    """No period, and rates that no plan serves, are refused with the reason."""
    with pytest.raises(ValidationError, match="at least one period"):
        scheduled({})
    with pytest.raises(ValidationError, match="No plan holds in every period"):
        scheduled({"0": np.append(np.full(len(FLEET) - 1, 0.1), 900.0)})


def test_scenarios_are_the_periods() -> None:
    """The objective demands every period's rates, the busiest first, of the adapters of a part of the fleet too."""
    goal = AllDay(rates={"night": {"a0": 0.1, "a1": 0.2}, "noon": {"a0": 1.0, "a1": 2.0}})
    part = Workload([Adapter("a1", 8, 5.0)])
    assert [scenario.workload.rates.tolist() for scenario in goal.scenarios(part)] == [[2.0], [0.2]]


def test_replicas_follow_the_load() -> None:
    """An adapter too hot for one GPU at its peak has several replicas then and one at night; shares sum to 1."""
    fleet = Workload([*FLEET.adapters, Adapter("hot", 8, 1.0)])
    hot = {"0": 0.5, "1": 40.0, "2": 40.0, "3": 0.5}
    rates = {name: np.append(np.full(len(FLEET), 0.1), rate) for name, rate in hot.items()}
    given: dict[str, Any] = {
        "predictor": AnalyticPredictor(),
        "margin": 0.0,
        "slo": {"server.mean_ttft_ms": 500.0},
    }
    with pytest.raises(ValidationError, match="No plan holds in every period"):
        schedule(fleet, PROFILE, rates, max_replicas=1, **given)
    found = schedule(fleet, PROFILE, rates, **given)
    replicas = []
    for each in found.periods:
        shares = np.zeros(len(fleet))
        for item in each.plan.bins:
            shares[list(item.adapters)] += item.shares
        assert shares == pytest.approx(1.0)
        replicas.append(sum("hot" in (fleet.names[i] for i in item.adapters) for item in each.plan.bins))
        for name in each.names:
            row = AnalyticPredictor().evaluate(with_rates(fleet, rates[name]), each.plan.bins)
            assert row.feasible.all()
            assert (row.mean_ttft_ms <= 500.0).all()
        assert each.plan.workload.names == fleet.names
        for k, item in zip(each.servers, each.plan.bins, strict=True):
            assert item.settings == found.servers[k].settings
    assert replicas[0] == 1
    assert 1 < max(replicas) <= 8
    assert found.static.workload.names == fleet.names
    assert len(found.static.evaluations) == len(found.static.bins)
    windows_of(found)
    trace = RequestTrace(np.zeros(1), *(np.ones(1, dtype=np.int64) for _ in range(3)))
    with pytest.raises(IncompatibleError, match="replayed trace"):
        schedule(fleet.with_arrivals(Arrivals("trace", trace=trace)), PROFILE, rates, max_replicas=2, **given)


def test_rates_of_the_fleet_do_not_count() -> None:
    """A day has the same servers and shares, whatever rates the fleet has: parts are made at those of the day."""
    server = load_profile("h100-64gb/llama-3.1-8b-instruct")
    bursts = Arrivals("bursty", own=Bursts(0.8, ((120.0, 1.0),)))
    servers = []
    for hot in (22.0, 36.0):
        rates, found = {"night": np.array([5.0, 0.1]), "day": np.array([hot, 0.2])}, set()
        for given in (0.5, 60.0):
            fleet = Workload([Adapter("hot", 8, given), Adapter("cool", 8, 0.2)], arrivals=bursts)
            bins = schedule(fleet, server, rates).static.bins
            found.add(tuple((item.adapters, item.shares) for item in bins))
        assert len(found) == 1
        servers.append(len(bins))
    assert servers[-1] > 1


def test_a_schedule_is_replayed() -> None:
    """Each window has the servers of its period."""
    found = scheduled(day())
    windows = windows_of(found)
    assert [window.gpus for window in windows] == [each.gpus for each in found.periods]
    assert windows[0].cluster.placement is not None


def test_rates_come_from_a_trace() -> None:
    """Requests of two days give the mean rate of each period; an adapter without requests has none."""
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 8, 1.0)])
    times = np.concatenate([np.arange(0.5, 3600.0, 10.0), 3600.0 + np.arange(0.5, 3600.0, 20.0)])
    ones = np.ones(len(times), dtype=np.int64)
    trace = Trace(times, ones, ones, np.zeros(len(times), dtype=np.int64), ("a",), (8,))
    found = rates_of_trace(replace(trace, start_s=5 * 3600.0), fleet, 3600.0)
    assert list(found) == ["05:00", "06:00"]
    assert found["05:00"].tolist() == pytest.approx([0.1, 0.0], rel=0.02)
    assert found["06:00"].tolist() == pytest.approx([0.05, 0.0], rel=0.02)
    with pytest.raises(ValidationError, match="the fleet's adapters, got requests of 'a'"):
        rates_of_trace(trace, Workload([Adapter("b", 8, 1.0)]), 3600.0)


def test_a_period_on_all_servers_has_no_bound_of_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no plan of a period is found, all servers of the static plan run: its bound is one for all periods."""

    def solved(*given: Any, **options: Any) -> Plan:
        plan = solve(*given, **options)
        if options["solver"] == "replan":
            return replace(plan, status=Status.INFEASIBLE)
        bound = float(plan.n_gpus)
        return replace(plan, status=Status.OPTIMAL, lower_bound=bound, bound_proven=True)

    monkeypatch.setattr(schedules, "solve", solved)
    (only,) = scheduled(day()).periods
    assert only.gpus == 3
    assert (only.plan.status, only.plan.lower_bound, only.plan.bound_proven) == (Status.FEASIBLE, None, False)


def test_periods_about_midnight_are_merged_only_where_that_saves_gpus() -> None:
    """Three GPUs from 7 to 8 and one from 0 to 1 (the next day): three for both hours are not planned."""
    found = scheduled(day()).periods
    noon, night = (next(each for each in found if each.gpus == n) for n in (3, 1))
    late = replace(noon, start_s=7 * 3600.0, end_s=8 * 3600.0)
    early = replace(night, start_s=0.0, end_s=3600.0)
    tried: list[Any] = []

    def plan_for(names: Any) -> Period:
        tried.append(names)
        return noon

    assert schedules._merged([late, early], plan_for, 0.0) == [late, early]
    assert not tried
