"""The controller on simulated servers: losses, rising and falling load, and what it costs."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import packer
from packer.change import Change, Controller
from packer.cluster import ServerKind
from packer.operate.autoscalers import Autoscaler
from packer.operate.capacity import MOST_REQUESTS, SPAN_S, Capacity
from packer.operate.keeper import Keeper
from packer.operate.measured import Observation
from packer.operate.rehearse import Failing, _as_planned, fewest_loads, keeper_of, rehearse
from packer.sessions import Sessions
from packer.solvers.nearest import Nearest
from packer.twin.cluster.simulate import simulate_cluster

PROFILE = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
FLEET = packer.Workload(
    [packer.Adapter(f"a{k}", 8, 0.5) for k in range(8)],
    packer.Lengths.gamma(200.0, 1.0), packer.Lengths.gamma(100.0, 1.0), 0.0,
)  # fmt: skip
KIND = ServerKind("h100", PROFILE, 8, 8)


def keeper(servers: int, on: int, **given: object) -> Keeper:
    """A controller whose first servers run, with the adapters dealt to them; each holds 1,000 tok/s."""
    held: list[dict[int, float]] = [{} for _ in range(servers)]
    for a in range(len(FLEET)):
        held[a % on][a] = 1.0
    made = Keeper(FLEET, [KIND] * servers, held, np.arange(servers) < on, **given)  # type: ignore[arg-type]
    made.capacity.of = lambda server, load: 1000.0  # type: ignore[method-assign]
    return made


def seen(load: float, ready: list[bool]) -> Observation:
    """The same load of every adapter."""
    return Observation(np.full(8, load / 8), load, load, np.array(ready))


def test_adapters_of_a_lost_server_go_elsewhere_at_the_next_look() -> None:
    """They are loaded where they are not, routed there, and nothing else moves."""
    control = keeper(2, 2)
    assert control.decide(0.0, seen(800.0, [True, True])) == []
    first, *_ = control.decide(60.0, seen(800.0, [True, False]))
    assert {name for s, name in first.change.load if s == 0} == {f"a{k}" for k in (1, 3, 5, 7)}
    assert all(shares == {0: 1.0} for shares in first.change.route.values())
    assert first.forced == 4


def test_a_server_more_is_started_before_the_others_are_full() -> None:
    """Beyond its share of the capacity another server starts; it gets load when it answers, with few loads."""
    control = keeper(3, 2)
    (made,) = control.decide(0.0, seen(1970.0, [True, True, False]))
    assert made.change.start == (2,)
    assert "expected" in made.why
    assert control.decide(60.0, seen(1970.0, [True, True, False])) == []
    (made,) = control.decide(180.0, seen(1970.0, [True, True, True]))
    assert 1 <= made.loads <= 3
    assert {s for s, _ in made.change.load} == {2}


def test_what_packer_cannot_start_is_said() -> None:
    """Without commands the number of servers that are needed is a figure."""
    control = keeper(2, 1, may_start=False)
    control.decide(0.0, seen(2500.0, [True, False]))
    assert control.missing == 2


def test_adapters_without_room_need_servers() -> None:
    """A server more is needed, and started if it can be, for adapters that the others have no room for, however low
    their load; the base model takes no room, and a rank that no server takes needs no server."""
    control = keeper(4, 2, may_start=False, rooms=[4] * 4)
    control.decide(0.0, seen(100.0, [True, False, False, False]))
    assert control.missing == 1
    assert control.left.words(0) == "no server has room for 4 adapters: a1, a3, a5, a7"
    control = keeper(4, 2, rooms=[3] * 4)
    (made,) = control.decide(0.0, seen(100.0, [True, False, False, False]))
    assert (made.change.start, made.why) == ((1, 2), "the servers have no room for 4 adapters")
    assert (control.missing, control.left.words(len(control.starting))) == (0, "")
    control = keeper(2, 2, may_start=False, rooms=[4] * 2)
    ranks = [0, 512, *[8] * 6]
    control.workload = replace(
        FLEET, adapters=tuple(replace(a, rank=rank) for a, rank in zip(FLEET.adapters, ranks, strict=True))
    )
    control.held = [{0: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, {5: 1.0, 6: 1.0, 7: 1.0}]
    control.decide(0.0, seen(100.0, [True, True]))
    assert (control.missing, control.left.words(0)) == (0, "no server takes a rank above 8: a1")


def test_a_server_that_takes_the_rank_is_started_first() -> None:
    """Of the servers that are off, those come first whose kind takes all adapters for which there is no room."""
    control = keeper(3, 1, rooms=[8, 8, 8])
    control.kinds = [KIND, KIND, replace(KIND, name="large", max_lora_rank=64)]
    ranks = [64, *[8] * 7]
    control.workload = replace(
        FLEET, adapters=tuple(replace(a, rank=rank) for a, rank in zip(FLEET.adapters, ranks, strict=True))
    )
    del control.held[0][0]
    (made,) = control.decide(0.0, seen(100.0, [True, False, False]))
    assert made.change.start == (2,)


def test_only_servers_with_commands_are_started_and_stopped() -> None:
    """One server that cannot be started or stopped keeps no other from it."""
    control = keeper(4, 2, may_start=[False, False, False, True], may_stop=[True, False, False, False])
    (made,) = control.decide(0.0, seen(3500.0, [True, True, False, False]))
    assert (made.change.start, control.missing) == ((3,), 1)
    control = keeper(2, 2, may_stop=[False, True])
    for now_s in (0.0, 300.0):
        assert control.decide(now_s, seen(500.0, [True, True])) == []
    assert control.decide(700.0, seen(500.0, [True, True]))[0].change.stop == (1,)
    control = keeper(2, 2, may_stop=False)
    assert not any(control.decide(now_s, seen(500.0, [True, True])) for now_s in (0.0, 300.0, 700.0))


def test_no_server_stops_whose_adapters_the_others_do_not_hold() -> None:
    """With more adapters than slots, a server holds a fraction of the load: what the others held before is no reserve,
    and a stop would be followed by a start, again and again. No stop is announced then, but why there was none and
    when it is tried again, until the load has risen."""
    control = keeper(2, 2)
    control.capacity.of = lambda _server, own: 1000.0 if len(own) < 8 else 300.0  # type: ignore[method-assign]
    made = [control.decide(60.0 * minute, seen(500.0, [True, True])) for minute in range(60)]
    assert not any(made)
    assert control.caps([0, 1]).tolist() == [1000.0, 1000.0]
    why = "server 1 was not stopped: the others would have held 300 tok/s with its adapters, and 556 tok/s were needed"
    assert re.fullmatch(re.escape(why) + r"; this is tried again in \d+ s", control.waiting)
    control.decide(3600.0, seen(950.0, [True, True]))
    assert control.waiting == ""
    control.decide(3660.0, seen(500.0, [True, True]))
    assert control.waiting.startswith("1 server would be enough for 0 s now")


def test_no_stop_is_announced_whose_adapters_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other servers have the capacity, but no room for a server's adapters: it does not stop later either."""
    monkeypatch.setattr(Nearest, "empty", lambda *_: False)
    control = keeper(2, 2)
    for minute in range(15):
        assert control.decide(60.0 * minute, seen(500.0, [True, True])) == []
        assert control.waiting == ""


def test_a_server_less_waits_until_it_is_worth_it() -> None:
    """It stops after the others have had enough for a while, and its adapters go to them first."""
    control = keeper(2, 2)
    assert control.decide(0.0, seen(500.0, [True, True])) == []
    assert control.decide(300.0, seen(500.0, [True, True])) == []
    assert control.waiting.startswith("1 server would be enough for 300 s now: a stop with 4 loads is worth it after ")
    made, *_ = control.decide(700.0, seen(500.0, [True, True]))
    assert len(made.change.stop) == 1
    assert made.loads == 4
    assert (
        control.decide(760.0, seen(500.0, [s == 1 - made.change.stop[0] or s != made.change.stop[0] for s in (0, 1)]))
        == []
    )


def talking(servers: int) -> Keeper:
    """A controller on servers with prefix caches, whose adapters have long sessions."""
    own = Sessions(10.0, 600.0)
    control = keeper(servers, servers)
    control.workload = replace(FLEET, adapters=tuple(replace(a, sessions=own) for a in FLEET.adapters))
    caching = replace(PROFILE, engine=replace(PROFILE.engine, version="0.32.0"))
    control.kinds = [ServerKind("caching", caching, 8, 8)] * servers
    return control


def test_a_cold_cache_is_worth_a_wait() -> None:
    """Load leaves a server that has a little too much only after the excess is more than what is computed again."""
    control = talking(2)
    skewed = Observation(np.array([260.0, 200.0] * 4), 1840.0, 1840.0, np.array([True, True]))
    assert control.decide(0.0, skewed) == []
    said = re.fullmatch(
        r"a server has 104% of what it holds: a placement that brings it to 9\d% loses ([\d,]+) tokens of prefix "
        r"caches and is worth it after (\d+) s", control.waiting,
    )  # fmt: skip
    assert said, control.waiting
    after_s = float(said[2])
    assert after_s > 60.0
    assert control.decide(after_s - 30.0, skewed) == []
    (made,) = control.decide(after_s + 30.0, skewed)
    assert f"; {said[1]} tokens of prefix caches are computed again" in made.why
    assert control.waiting == ""
    (made,) = keeper(2, 2).decide(0.0, skewed)
    assert "caches" not in made.why


def test_a_stop_with_a_cold_cache_costs_more() -> None:
    """The tokens that other servers compute again are part of the cost of a stop, in its words and in its time."""
    waits = []
    for control in (keeper(2, 2, startup_s=400.0), talking(2)):
        control.startup_s = 400.0
        control.decide(0.0, seen(500.0, [True, True]))
        waits.append(control.waiting)
    costs = [float(text.rpartition("after ")[2].removesuffix(" s")) for text in waits]
    assert re.search(r"a stop with 4 loads and [\d,]+ tokens of prefix caches lost is worth it", waits[1])
    assert costs[0] == 840.0
    assert costs[1] > costs[0]


def test_noise_changes_nothing() -> None:
    """A load that varies by some percent between the marks makes no change for a day."""
    control = keeper(3, 2)
    rng = np.random.default_rng(0)
    for minute in range(24 * 60):
        load = 1880.0 * (1.0 + 0.01 * rng.standard_normal())
        assert control.decide(60.0 * minute, seen(load, [True, True, False])) == [], minute


def test_a_load_that_rises_and_falls_again_starts_no_server_each_time() -> None:
    """Two servers are enough for 1,200 to 1,800 tok/s in turns of 20 minutes: the trend started a third each time."""
    control = keeper(3, 2)
    ready = [True, True, False]
    load = 1500.0 + 300.0 * np.sin(2.0 * np.pi * np.arange(6 * 60) / 20.0)
    starts = 0
    for minute in range(30, len(load)):
        ready[2] = bool(control.on[2])
        recent, before = load[minute - 10 : minute].mean(), load[minute - 20 : minute - 10].mean()
        made = control.decide(60.0 * minute, Observation(np.full(8, 187.5), recent, before, np.array(ready)))
        starts += sum(each.starts for each in made)
    assert starts <= 1


def test_loads_in_an_hour_are_bounded() -> None:
    """A server that has too much gives no more adapters away than the limit allows."""
    control = keeper(2, 2, loads_per_hour=0)
    skewed = Observation(np.array([300.0, 1.0] * 4), 1204.0, 1204.0, np.array([True, True]))
    assert all(each.loads == 0 for each in control.decide(0.0, skewed))


def test_the_level_follows_what_was_measured_within_bounds() -> None:
    """Slower servers than predicted hold less; the correction is small at a time, and bounded."""
    control = keeper(1, 1)
    assert control.corrected(20.0, 40.0) == pytest.approx(0.5**0.1)
    for _ in range(100):
        control.corrected(20.0, 100.0)
    assert control.level == 0.7
    for _ in range(200):  # a constant difference is learnt once, not added up
        control.corrected(20.0, 21.0)
    assert control.level == pytest.approx(20.0 / 21.0, rel=1e-3)


def test_what_the_twin_refuses_is_planned_again() -> None:
    """A placement whose mix the twin holds less of is not carried out; load moves until every server holds its part."""
    control = keeper(2, 2)
    asked: list[set[int]] = []

    def of(server: int, load: dict[int, float]) -> float:
        asked.append(set(load))
        return 1000.0 if server == 0 or len(load) < 6 else 880.0

    control.capacity.of = of  # type: ignore[method-assign,assignment]
    skewed = Observation(np.array([300.0, 60.0] * 4), 1440.0, 1440.0, np.array([True, True]))
    (made, *_) = control.decide(0.0, skewed)
    assert "by the twin" in made.why
    used = control._near(control._expected_load(0.0, skewed)).used()
    assert (used <= 0.981 * control.caps([0, 1])).all()


def test_a_fast_server_is_simulated_for_less_time() -> None:
    """The memory of a decision is bounded: hundreds of requests per second are not simulated for twenty minutes."""
    asked = Capacity(FLEET, [KIND])
    many, few = (asked.run(KIND, {0: 300.0 * rate}) for rate in (300.0, 1.0))
    assert len(many.raw.requests) == pytest.approx(MOST_REQUESTS, rel=0.05)
    assert len(few.raw.requests) == pytest.approx(SPAN_S, rel=0.2)


def test_controllers_are_controllers() -> None:
    """The twin takes each of them."""
    assert isinstance(keeper(1, 1), Controller)
    assert isinstance(Autoscaler("queue", 5.0, 1), Controller)
    assert isinstance(Failing([], 0), Controller)


def test_an_autoscaler_follows_its_metric() -> None:
    """More waiting requests start servers at once; fewer stop them after the stable window."""

    class View:
        on = np.array([True, False, False])
        waiting, running, used_share = np.array([12, 0, 0]), np.zeros(3, int), np.zeros(3)

    scaler = Autoscaler("queue", 5.0, 1)
    assert list(scaler.act(0.0, View())) == [Change(0.0, start=(1, 2))]
    View.on, View.waiting = np.array([True, True, True]), np.zeros(3, int)
    assert list(scaler.act(30.0, View())) == []
    assert list(scaler.act(600.0, View())) == [Change(600.0, stop=(1, 2))]


def test_the_fewest_loads_count_what_a_start_takes_over() -> None:
    """A second server for two equal adapters takes one of them; no start takes none."""
    rates = np.array([[1.0, 1.0], [2.0, 2.0]])
    assert fewest_loads(rates, np.ones(2), [1, 2]) == 1
    assert fewest_loads(rates, np.ones(2), [2, 2]) == 0


def test_a_rehearsal_learns_what_requests_are_like() -> None:
    """The controller begins with the plan's lengths; the trace's outputs are three times as long, which it learns."""
    rng = np.random.default_rng(1)
    times = np.sort(rng.uniform(0.0, 7200.0, 12000))
    n = len(times)
    outputs = rng.integers(200, 400, n)
    trace = packer.RequestTrace(times, rng.integers(0, 8, n), np.full(n, 200), outputs, end_s=7200.0)
    fleet = replace(FLEET, slo=FLEET.slo.changed_by(packer.Goal.parse("ttft_ms=4000,itl_ms=150,request_share=0.99")))
    plan = packer.solve(fleet, PROFILE, slo=fleet.slo, with_headroom=False)
    control, cluster = keeper_of(plan, _as_planned(fleet, plan.workload), 3, period_s=300.0)
    assert control.workload.mean_output_tokens == pytest.approx([100.0] * 8, rel=0.01)
    traced = fleet.with_arrivals(packer.Arrivals("trace", trace=trace))
    off = [Change(0.0, stop=tuple(range(len(plan.bins), 3)))]
    simulate_cluster(
        traced, cluster, controller=control, router="plan", duration_s=7200.0, changes=off, startup_s=120.0
    )
    assert control.workload.mean_output_tokens == pytest.approx([300.0] * 8, rel=0.05)
    assert control.workload.mean_input_tokens == pytest.approx([200.0] * 8, rel=0.01)


def test_a_rehearsal_keeps_requests_served() -> None:
    """Three hours with a peak and failures: nearly all requests within limits, and the same seed gives the same."""
    goal = packer.Goal.parse("ttft_ms=4000,itl_ms=150,request_share=0.99")
    fleet = replace(FLEET, slo=FLEET.slo.changed_by(goal))
    rng = np.random.default_rng(1)
    hours = [rng.uniform(3600.0 * k, 3600.0 * (k + 1), int(n)) for k, n in enumerate((9000, 40000, 9000))]
    times = np.sort(np.concatenate(hours))
    n = len(times)
    trace = packer.RequestTrace(times, rng.integers(0, 8, n), np.full(n, 200), np.full(n, 100), end_s=10800.0)
    plan = packer.solve(fleet, PROFILE, slo=goal, with_headroom=False)
    plan = replace(plan, bins=tuple(item.with_slots(len(fleet)) for item in plan.bins))
    traced = fleet.with_arrivals(packer.Arrivals("trace", trace=trace))
    found = rehearse(plan, traced, servers=4, failures_per_day=8.0, beside=False, seed=3)
    (ours,) = found.outcomes
    assert ours.failures == 1
    assert ours.within > 0.95
    assert ours.gpu_hours < 12.0
    assert found.hindsight_gpu_hours <= ours.gpu_hours * 1.01
    again = rehearse(plan, traced, servers=4, failures_per_day=8.0, beside=False, seed=3)
    assert again.to_dict() == found.to_dict()


def test_servers_fail_in_a_rehearsal_of_an_hour() -> None:
    """Failures come at any time of the trace, also in its first hour."""
    n, one = 100, FLEET.subset([0])
    zeros = np.zeros(n, dtype=np.int64)
    trace = packer.RequestTrace(np.arange(n) * 36.0, zeros, zeros + 200, zeros + 100, end_s=3600.0)
    plan = packer.solve(one, PROFILE, with_headroom=False)
    found = rehearse(plan, one.replaying(trace), failures_per_day=24.0, beside=False)
    assert found.outcomes[0].failures == 1
