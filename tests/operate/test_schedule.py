"""The day: servers by period, and their replay."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrays import FloatArray
from packer.arrival import Arrivals, Bursts, RequestTrace
from packer.errors import IncompatibleError, UnknownNameError, ValidationError
from packer.goal import Limits, Slo
from packer.gpu import GpuKind
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.objectives.headroom import with_rates
from packer.operate import schedule as schedules
from packer.operate.day import Period, Schedule
from packer.operate.observe import drawn_within
from packer.operate.replay import windows_of
from packer.operate.schedule import schedule
from packer.planning.periods import Periods
from packer.planning.recommend import recommend
from packer.testing.analytic import small_profile
from packer.twin.hours import Hours
from packer.workload import Workload

PROFILE = small_profile()
LONG = Lengths.constant(500), Lengths.constant(460)
FLEET = Workload([Adapter(f"a{i}", 8 << i % 3, 0.3) for i in range(40)], *LONG)


def day(periods: int = 4, swing: float = 0.8, peak: float = 0.65) -> dict[str, FloatArray]:
    """A day with a peak in its middle, and adapters that peak at different times."""
    shift = np.arange(len(FLEET)) % 2
    return {
        str(t): peak * (1.0 - swing * np.cos(2 * np.pi * (t - 0.3 * shift) / periods)) / (1.0 + swing)
        for t in range(periods)
    }


def scheduled(rates: Any, fleet: Workload = FLEET, **changes: Any) -> Schedule:
    """A schedule without a margin."""
    return schedule(fleet, PROFILE, rates, margin=0.0, **changes)


@pytest.mark.parametrize(
    "rates",
    [
        {}, [1.0], {"t": np.full(40, -1.0)}, {"t": np.full(39, 1.0)}, {"t": np.full(41, 1.0)}, {"t": 1.0},
        {"t": np.full((40, 1), 1.0)}, {"t": ["x"] * 40}, {"t": np.full(40, np.nan)},
    ],
)  # fmt: skip
def test_impossible_rates_are_refused(rates: Any) -> None:
    """Each period has one rate >= 0 per adapter; anything else is an error before planning."""
    with pytest.raises(ValidationError, match=r"Expected (the rates of|rates to be a mapping)"):
        scheduled(rates)


def test_rates_may_be_lists() -> None:
    """A list of rates is as good as an array."""
    fleet = FLEET.subset([0, 1])
    assert scheduled({"t": [0.3, 0.2]}, fleet).most_gpus == 1


@pytest.fixture(scope="module")
def found() -> Schedule:
    """The day on as few servers as keep the usual goal."""
    return scheduled(day())


def used(fleet: Workload, plan_bins: Any) -> float:
    """How much of its limits the worst server uses in an hour."""
    return max(hour.used for hour in Hours().all(plan_bins, fleet))


def test_every_period_holds_and_every_adapter_has_a_server(found: Schedule) -> None:
    """The servers of each period keep the goal at each of its rates, and so does the static plan."""
    rates = day()
    assert [name for each in found.periods for name in each.names] == list(rates)
    for before, after in pairwise(found.periods):
        assert before.end_s == after.start_s
    for each in found.periods:
        assert sorted(i for item in each.plan.bins for i in item.adapters) == list(range(len(FLEET)))
        assert each.plan.adapters is not None
        assert (each.plan.adapters.slo_used <= 1.0).all()
        for name in each.names:
            fleet = with_rates(FLEET, rates[name])
            assert used(fleet, each.plan.bins) <= 1.0
            assert used(fleet, found.static.bins) <= 1.0


def test_a_server_keeps_its_settings(found: Schedule) -> None:
    """max_loras and max_lora_rank of a server are the same all day, and it holds the adapters of all its periods."""
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


@pytest.mark.parametrize("shape", ["peak", "noise", "shifted"])
def test_servers_of_a_period_stay_close_to_those_beside_it(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more adapters move than where each period is planned without the others, and no more GPUs run."""
    rng = np.random.default_rng(3)
    rates = day(8, peak=0.9)
    if shape == "noise":
        rates = {name: vector * rng.lognormal(0.0, 0.4, len(vector)) for name, vector in rates.items()}
    elif shape == "shifted":
        rates = {name: np.roll(vector, 5 * k) for k, (name, vector) in enumerate(rates.items())}
    close = scheduled(rates)
    period = schedules._Day._period
    monkeypatch.setattr(
        schedules._Day,
        "_period",
        lambda self, names, static, beside, alone=(): period(self, names, static, None, alone),
    )
    monkeypatch.setattr(schedules, "with_few_changes", lambda periods, *_: periods)
    apart = scheduled(rates)
    assert apart.moves > 0
    assert close.moves <= apart.moves
    assert close.gpu_hours <= apart.gpu_hours + 1e-9
    hours = {name: each.gpus for each in apart.periods for name in each.names}
    assert all(each.gpus <= max(hours[name] for name in each.names) for each in close.periods)


def test_starts_count(found: Schedule) -> None:
    """GPU-hours are those of the periods and of the starts; GPUs at once are those that run while others start."""
    hours = sum(each.gpus * each.hours for each in found.periods)
    assert found.starts()
    assert found.gpu_hours == pytest.approx(hours + len(found.starts()) * found.startup_s / 3600.0)
    assert found.most_gpus == max(
        len({*each.servers, *found.periods[t - 1].servers}) for t, each in enumerate(found.periods)
    )


def test_gpus_at_hand_are_enough_while_servers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs hold all day, and three run where a server is replaced: with two the periods become one; one
    breaks."""
    with pytest.raises(ValidationError, match=r"No plan holds in every period: 2 GPUs keep the goal"):
        schedule(FLEET, GpuKind(PROFILE, available=1), day(), margin=0.0)

    def replaced(periods: Any, holds: Any) -> list[Period]:
        return [replace(p, servers=(0, 1) if p.gpus == 2 else (2,)) for p in periods]

    monkeypatch.setattr(schedules, "with_steady_settings", replaced)
    assert schedule(FLEET, GpuKind(PROFILE, available=3), day(), margin=0.0).most_gpus == 3
    found = schedule(FLEET, GpuKind(PROFILE, available=2), day(), margin=0.0)
    assert (found.most_gpus, found.static.n_gpus) == (2, 2)
    assert [name for each in found.periods for name in each.names] == list(day())


def test_midnight_ends_no_period(found: Schedule) -> None:
    """A day that begins at another hour takes as many GPU-hours and starts."""
    rates = day()
    names = list(rates)
    for k in (1, 3):
        other = scheduled({name: rates[name] for name in (*names[k:], *names[:k])})
        assert other.gpu_hours == pytest.approx(found.gpu_hours)
        assert len(other.starts()) == len(found.starts())
        assert (other.periods[0].start_s, other.periods[-1].end_s) == (0.0, len(rates) * 3600.0)


def test_fewer_servers_at_night(found: Schedule) -> None:
    """The schedule takes fewer GPU-hours than the static plan, starts included, and at least what each hour needs."""
    assert found.static.n_gpus > min(each.gpus for each in found.periods)
    assert found.gpu_hours < found.static_gpu_hours
    plans = [recommend(with_rates(FLEET, each), PROFILE, margin=0.0) for each in day().values()]
    assert max(plan.n_gpus for plan in plans) == found.static.n_gpus
    assert found.gpu_hours >= sum(plan.n_gpus for plan in plans)
    says = [plan.decision.removeprefix(plan.hardware) for plan in (found.static, found.periods[0].plan, found.deployed)]
    assert says == [": the goal holds in every period.", ": the goal holds.", ""]
    assert found.regret == pytest.approx(found.static_gpu_hours / found.gpu_hours - 1.0)
    assert found.moves > 0


def test_constant_rates_take_as_many_gpus_as_a_plan() -> None:
    """A day without change is one period on the servers of the plan to deploy."""
    rng = np.random.default_rng(5)
    server = load_profile("h100-64gb/llama-3.1-8b-instruct")
    for n, total, exponent, bursts in ((54, 32.0, 2.0, 0.6), (25, 29.0, 0.0, 0.0), (9, 14.0, 0.6, 0.6)):
        rates = np.arange(1.0, n + 1.0) ** -exponent
        rates *= total / rates.sum()
        arrivals = Arrivals("bursty", common=Bursts(bursts, ((30.0, 1.0),))) if bursts else Arrivals()
        ranks = rng.choice([8, 16, 32], n).tolist()
        adapters = [Adapter(f"a{i}", rank, float(rates[i])) for i, rank in enumerate(ranks)]
        fleet = Workload(adapters, arrivals=arrivals)
        (only,) = schedule(fleet, server, {str(t): rates for t in range(3)}).periods
        assert only.gpus == recommend(fleet, server).n_gpus


def test_a_day_on_one_server_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one server holds all day no period can take fewer, and none is planned again."""
    searched: list[Any] = []
    plan = Periods.plan
    monkeypatch.setattr(Periods, "plan", lambda self, *given: searched.append(1) or plan(self, *given))
    fleet = Workload(FLEET.adapters[:3])
    found = scheduled({str(t): np.full(3, 0.1 * t) for t in (1, 2, 3, 4)}, fleet)
    assert (len(searched), found.static.n_gpus, len(found.periods)) == (1, 1, 1)
    assert found.periods[0].plan.workload.rates.max() == pytest.approx(0.4)


def test_equal_hours_are_one_period(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves and nothing starts on a day without change, and one of its hours is planned."""
    searched: list[Any] = []
    plan = Periods.plan
    monkeypatch.setattr(Periods, "plan", lambda self, *given: searched.append(1) or plan(self, *given))
    found = scheduled({str(t): np.full(len(FLEET), 0.65) for t in range(4)})
    assert len(searched) == 2
    assert len(found.periods) == 1
    assert (found.moves, found.starts()) == (0, [])
    assert found.gpu_hours == found.static_gpu_hours
    assert found.running(0) == [(0.0, 4 * 3600.0)]


def test_no_hour_of_a_day_is_simulated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for a day and its periods, the check of merged periods and the figures share simulated hours."""
    seen: list[Any] = []
    hour_of = Hours._hour_of

    def counted(self: Hours, job: Any, most: float | None) -> Any:
        seen.append((job[0], job[1].rates.tobytes(), job[2], most))
        return hour_of(self, job, most)

    monkeypatch.setattr(Hours, "_hour_of", counted)
    monkeypatch.setattr(Hours, "ahead", lambda *_: None)  # of which some are begun in vain
    fleet = FLEET.subset(range(20))
    assert scheduled({name: 1.4 * rates[:20] for name, rates in day(3).items()}, fleet).static.n_gpus > 1
    assert len(seen) == len(set(seen))


def test_slow_starts_keep_servers_on() -> None:
    """A server that takes longer to start than it would be off is not stopped."""
    rates = {str(t): np.full(len(FLEET), 0.65 if t % 2 else 0.13) for t in range(4)}
    quick = scheduled(rates, period_s=600.0, startup_s=10.0)
    slow = scheduled(rates, period_s=600.0, startup_s=3000.0)
    assert quick.starts()
    assert not slow.starts()


def test_a_day_is_planned_for_any_goal() -> None:
    """A tight goal takes more GPU-hours, none fewer; limits of requests and of servers count, too."""
    fleet = FLEET.subset(range(24))
    rates = {period: values[:24] for period, values in day(2).items()}
    usual = scheduled(rates, fleet).gpu_hours
    assert scheduled(rates, fleet, slo="none").gpu_hours <= usual
    for slo in ("p95_ttft_ms=26", "ttft_ms=25", "server.p90_itl_ms=14"):
        tight = scheduled(rates, fleet, slo=slo)
        assert tight.gpu_hours > usual
        assert tight.static.workload.slo == fleet.slo.changed_by(slo)
        for each in tight.periods:
            assert used(each.plan.workload, each.plan.bins) <= 1.0


def test_classes_keep_their_own_limits() -> None:
    """Adapters of a class keep its limits, the others those of the fleet."""
    chat = [replace(adapter, slo_class="chat") for adapter in FLEET.adapters[:10]]
    slo = Slo(classes=(("chat", Limits(80.0, 20.0)),))
    fleet = replace(FLEET, adapters=(*chat, *FLEET.adapters[10:]), slo=slo)
    for each in scheduled(day(), fleet).periods:
        assert each.plan.adapters is not None
        assert (each.plan.adapters.p95_ttft_ms[:10] <= 80.0).all()
        assert (each.plan.adapters.slo_used <= 1.0).all()


def test_the_goal_holds_in_quieter_periods() -> None:
    """A server whose adapters peak while the rest of the fleet is quiet keeps the goal then, too."""
    fleet = Workload([Adapter(f"a{i}", rank, 1.0) for i, rank in enumerate((8, 32, 8, 8, 8))], *LONG)
    rates = {"x": np.array([0.1, 0.1, 0.1, 8.0, 10.0]), "y": np.array([4.5, 5.0, 7.0, 0.1, 0.1])}
    for limit_ms in (60.0, 2000.0):
        found = scheduled(rates, fleet, slo={"p95_ttft_ms": limit_ms})
        assert found.static.n_gpus > 1
        for vector in rates.values():
            loaded = replace(with_rates(fleet, vector), slo=found.static.workload.slo)
            assert used(loaded, found.static.bins) <= 1.0


def test_the_day_has_rates() -> None:
    """No period, and rates that no plan serves, are refused with the reason."""
    with pytest.raises(ValidationError, match="at least one period"):
        scheduled({})
    with pytest.raises(ValidationError, match="No plan holds in every period: Adapter 'a39'"):
        scheduled({"0": np.append(np.full(len(FLEET) - 1, 0.1), 100.0)}, max_replicas=1)


def test_replicas_follow_the_load() -> None:
    """An adapter too hot for one GPU at its peak has several replicas then and one at night; shares sum to 1."""
    fleet = Workload([*FLEET.adapters, Adapter("hot", 8, 1.0)], *LONG)
    rates = {
        name: np.append(np.full(len(FLEET), 0.04), rate) for name, rate in {"0": 0.2, "1": 26.0, "2": 26.0}.items()
    }
    with pytest.raises(ValidationError, match="No plan holds in every period"):
        scheduled(rates, fleet, max_replicas=1)
    found = scheduled(rates, fleet)
    replicas = []
    for each in found.periods:
        shares = np.zeros(len(fleet))
        for item in each.plan.bins:
            shares[list(item.adapters)] += item.shares
        assert shares == pytest.approx(1.0)
        replicas.append(sum("hot" in (fleet.names[i] for i in item.adapters) for item in each.plan.bins))
        assert used(each.plan.workload, each.plan.bins) <= 1.0
        assert each.plan.workload.names == fleet.names
        for k, item in zip(each.servers, each.plan.bins, strict=True):
            assert item.settings == found.servers[k].settings
    assert replicas[0] == 1
    assert max(replicas) > 1
    assert found.static.workload.names == fleet.names
    assert len(found.static.evaluations) == len(found.static.bins)
    windows_of(found)


def test_rates_of_the_fleet_do_not_count() -> None:
    """A day has the same servers and shares, whatever rates the fleet has: parts are made at those of the day."""
    server = load_profile("h100-64gb/llama-3.1-8b-instruct")
    rates, found = {"night": np.array([2.0, 0.1]), "day": np.array([16.0, 0.2])}, set()
    for given in (0.5, 30.0):
        fleet = Workload([Adapter("hot", 8, given), Adapter("cool", 8, 0.2)], *LONG)
        bins = schedule(fleet, server, rates).static.bins
        found.add(tuple((item.adapters, item.shares) for item in bins))
    assert len(found) == 1
    assert len(found.pop()) > 1


def test_each_model_is_scheduled_on_the_cheapest_of_its_kinds() -> None:
    """Servers of two base models run by their own hours; of two kinds one model gets the cheaper one."""
    other = small_profile("test-gpu/other")
    other = replace(other, model=replace(other.model, name="other"))
    dear = small_profile("dear-gpu/test-model", price_per_hour=9.0)
    dear = replace(dear, gpu=replace(dear.gpu, name="dear-gpu"))
    models = ["test-model", "other"]
    fleet = replace(FLEET, adapters=tuple(replace(a, model=models[i % 2]) for i, a in enumerate(FLEET.adapters)))
    odd = np.arange(len(FLEET)) % 2
    rates = {"x": np.where(odd, 1.3, 0.1), "y": np.where(odd, 0.1, 0.1)}
    found = schedule(fleet, [PROFILE, other, dear], rates, margin=0.0)
    assert {item.profile.name for item in found.servers} == {PROFILE.name, other.name}
    assert [each.gpus for each in found.periods] == [3, 2]
    for each in found.periods:
        for item in each.plan.bins:
            assert {fleet.adapters[i].model for i in item.adapters} == {item.profile.model.name}
        assert used(each.plan.workload, each.plan.bins) <= 1.0
    with pytest.raises(IncompatibleError, match="Limits on GPUs"):
        schedule(fleet, [PROFILE, other, GpuKind(dear, available=1)], rates)


def test_a_fleet_that_replays_a_trace_is_drawn() -> None:
    """Its requests say how bursty it is within a period; an adapter without a request stays as it is."""
    times = np.arange(0.0, 7200.0, 2.0)
    ones = np.ones(len(times), dtype=np.int64)
    trace = RequestTrace(times, np.zeros(len(times), dtype=np.int64), 300 * ones, 200 * ones)
    fleet = Workload([Adapter("a", 8, 1.0), Adapter("b", 16, 0.1)], arrivals=Arrivals("trace", trace=trace))
    drawn = drawn_within(fleet, 3600.0)
    assert drawn.arrivals.trace is None
    assert drawn.adapters[1] == fleet.adapters[1]
    assert drawn.mean_input_tokens[0] == pytest.approx(300.0)
    found = scheduled({"x": np.array([0.5, 0.1])}, fleet)
    assert found.static.n_gpus == 1
    assert len(scheduled({"x": np.array([60.0, 0.1])}, fleet).static.bins) > 1


def test_a_schedule_is_replayed(found: Schedule) -> None:
    """Each window has the servers of its period."""
    windows = windows_of(found)
    gpus = [sum(w.cluster.kind(s).profile.engine.gpus for s in range(len(w.cluster))) for w in windows]
    assert gpus == [each.gpus for each in found.periods]
    assert windows[0].cluster.placement is not None


def test_a_period_whose_load_rises_holds_at_its_height() -> None:
    """A period in which the rates rise gets servers for its end; one at the same mean rates those for the mean."""
    rates, rise = dict.fromkeys("ab", np.full(40, 0.3)), (300.0, *np.linspace(0.2, 1.8, 12))
    assert [each.gpus for each in scheduled(rates, trends={"b": rise}).periods] == [1, 2]
    with pytest.raises(UnknownNameError, match="Unknown period with a trend 'c'"):
        scheduled(rates, trends={"c": rise})
