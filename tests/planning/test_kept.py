"""Plans are held to hours whose random numbers are known by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from packer import Adapter, Arrivals, Bin, Goal, Lengths, Profile, Workload, seeds, simulate
from packer.arrival import RequestTrace
from packer.planning import kept as kept_hours
from packer.planning.busiest import peak
from packer.planning.chance import HOURS
from packer.planning.kept import DRAWN, MOST_LONE, SERVER_HOURS, Hour, KeptHours
from packer.sessions import Sessions
from packer.twin.hours import Hours


def test_servers_share_the_first_hour_and_draw_their_own_fresh_hours(toy_profile: Profile) -> None:
    """Two equal servers of other adapters get the same figures in the first hour and different ones in a fresh hour:
    those of a simulation with the seed of the server."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.3) for k in range(6)])
    settings = toy_profile.settings(3, 8)
    servers = [Bin(adapters, settings, toy_profile) for adapters in ((0, 1, 2), (3, 4, 5))]
    kept = KeptHours(fleet, fleet, 7, Hours(7))
    first = [hour.adapters.mean_ttft_ms for hour in kept.all(servers, kept.given)]
    np.testing.assert_array_equal(*first)

    (fresh,) = kept.fresh(servers)[:1]
    for item, hour in zip(servers, kept.all(servers, fresh), strict=True):
        own = seeds.of_server(fresh[1], item.adapters[0])
        run = simulate(item.workload(fleet), toy_profile, max_loras=3, max_lora_rank=8, seed=own)
        np.testing.assert_array_equal(hour.adapters.mean_ttft_ms, run.adapter_mean_ttft_ms)
    assert len({seeds.of_server(fresh[1], item.adapters[0]) for item in servers}) == len(servers)
    assert not np.array_equal(*(hour.adapters.mean_ttft_ms for hour in kept.all(servers, fresh)))


def test_parts_of_the_same_adapters_on_equal_servers_are_simulated_once(toy_profile: Profile) -> None:
    """Replicas are one server to the search: they share their fresh hours, too."""
    fleet = Workload([Adapter("a", 8, 1.0)])
    half = Bin((0,), toy_profile.settings(1, 8), toy_profile, (0.5,))
    kept = KeptHours(fleet, fleet, 0, Hours())
    assert len({kept.job(item, hour) for item in (half, half) for hour in kept.fresh([half, half])[:1]}) == 1


LONG_TAILS = Lengths.gamma(500.0, 3.0), Lengths.gamma(350.0, 2.5)


@pytest.mark.parametrize(
    ("lengths", "arrivals", "sets"),
    [((), Arrivals("unpredictable"), [2, 1, 0]), (LONG_TAILS, Arrivals(), [2, 1, 0]), ((), Arrivals(), [2])],
)
def test_hours_that_vary_are_kept_in_all_sets(
    toy_profile: Profile, monkeypatch: pytest.MonkeyPatch, lengths: tuple[Lengths, ...], arrivals: Arrivals,
    sets: list[int],
) -> None:  # fmt: skip
    """A plan that is tried after others were broken must keep the limits in their hours, too: in a set of its own one
    of several plans would do so by luck."""
    fleet = Workload([Adapter("a", 8, 0.3)], *lengths, arrivals=arrivals)
    kept, seen = KeptHours(fleet, fleet, 0, Hours()), []
    monkeypatch.setattr(kept, "broken_in", lambda _, hours: seen.append(list(hours)) or [])
    bins = [Bin((0,), toy_profile.settings(1, 8), toy_profile)]
    kept.broken_later(bins, 2)
    assert seen[0] == [hour for number in sets for hour in kept.fresh(bins, number)]


def test_fleets_with_very_long_requests_are_tried_in_many_hours_at_raised_rates(toy_profile: Profile) -> None:
    """A few long requests start a queue that does not end: that few fresh hours have none is luck."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.3) for k in range(2)])
    uneven = replace(fleet, input_tokens=LONG_TAILS[0], output_tokens=LONG_TAILS[1])
    bins = [Bin((k,), toy_profile.settings(1, 8), toy_profile) for k in range(2)]
    raised = uneven.scaled(1.1)
    hours = KeptHours(uneven, raised, 0, Hours()).fresh(bins)
    assert len(hours) * len(bins) >= SERVER_HOURS
    assert {id(hour.fleet) for hour in hours} == {id(raised)}
    cut = replace(fleet, input_tokens=Lengths.lognormal(500.0, 4.0, high=2000))
    for even in (fleet, cut, uneven.held_to("none")):  # long requests that are cut are not long, or none is too late
        (hour,) = KeptHours(even, raised, 0, Hours()).fresh(bins)
        assert hour.fleet is even
    talks = replace(uneven, adapters=tuple(replace(each, sessions=Sessions(turns=4)) for each in uneven.adapters))
    assert all(hour.fleet is talks for hour in KeptHours(talks, raised, 0, Hours()).fresh(bins))


def test_busy_hours_are_the_busiest_of_those_drawn_for_each_server(toy_profile: Profile) -> None:
    """Where arrivals vary, rare hours that break a plan are nearly always busy ones: every server gets the busiest of
    several hours. Where they don't, there are no busy hours."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.3) for k in range(4)], arrivals=Arrivals("unpredictable"))
    settings = toy_profile.settings(2, 8)
    servers = [Bin(adapters, settings, toy_profile) for adapters in ((0, 1), (2, 3))]
    kept, others = KeptHours(fleet, fleet, 0, Hours()), 0
    assert len(kept.busy(servers)) == len(kept.fresh(servers))
    for busy, fresh in zip(kept.busy(servers), kept.fresh(servers), strict=True):
        for item in servers:
            own = kept.job(item, fresh)[2]
            peaks = {each: peak(item.workload(fleet), each) for each in (seeds.further(own, k) for k in range(DRAWN))}
            assert peaks[kept.job(item, busy)[2]] == max(peaks.values())
            others += kept.job(item, busy) != kept.job(item, fresh)
    assert others
    even = fleet.with_arrivals(Arrivals())
    assert KeptHours(even, even, 0, Hours()).busy(servers) == []
    uneven = replace(fleet, input_tokens=LONG_TAILS[0], output_tokens=LONG_TAILS[1])
    busy_hours = KeptHours(uneven, uneven.scaled(1.1), 0, Hours()).busy(servers)
    assert all(hour.fleet is uneven for hour in busy_hours)  # at the rates as given, unlike fresh hours
    assert len(busy_hours) > 0


def test_the_draws_that_broke_one_server_are_kept_for_all(toy_profile: Profile) -> None:
    """Of the hours that break a plan the one that its worst server breaks most is shared by all servers from then on,
    with the random numbers of that server."""
    goal = Goal.parse("p95_ttft_ms=300")
    fleet = Workload([Adapter(f"a{k}", 8, 0.5) for k in range(6)], slo=goal)
    settings = toy_profile.settings(1, 8)
    servers = [Bin(adapters, settings, toy_profile) for adapters in ((0, 1, 2), (3, 4, 5))]
    kept = KeptHours(fleet, fleet, 0, Hours())
    hours = [kept.fresh_hour(place) for place in range(1, 4)]
    used = {(k, hour): kept.used([item], [hour])[0] for k, item in enumerate(servers) for hour in hours}
    broken = [hour for hour in hours if max(used[0, hour], used[1, hour]) > 1.0]
    assert broken
    kept.add(kept.worst(servers, broken))
    worst = kept.hours[0]
    owner = next((k, hour) for (k, hour) in used if kept.job(servers[k], hour)[1:] == worst[:2])
    assert not worst.apart
    assert used[owner] > 1.0
    assert kept.used([servers[owner[0]]], [worst])[0] == used[owner]
    assert len({kept.job(item, worst)[2] for item in servers}) == 1


class _Counted(KeptHours):
    """Hours that break nothing, and are counted."""

    asked = 0

    def broken_in(self, bins: Sequence[Bin], hours: Sequence[Hour]) -> list[Hour]:
        self.asked += len(bins) * len(hours)
        return []


@pytest.mark.parametrize(("part", "late", "hours"), [(0.9, False, 1), (0.98, False, HOURS), (0.98, True, 1)])
def test_a_server_near_its_limits_is_held_to_more_hours(
    toy_profile: Profile, part: float, late: bool, hours: int
) -> None:
    """Hours of the same load differ by some percent: what one hour keeps by less than that may break in many others.
    No time is taken for them once it is over."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.3) for k in range(3)])
    server = Bin((0, 1, 2), toy_profile.settings(3, 8), toy_profile)
    itl_ms = float(Hours().all([server], fleet)[0].adapters.mean_itl_ms.max())
    fleet = replace(fleet, slo=Goal.parse(f"p95_ttft_ms=60000,mean_itl_ms={itl_ms / part!r}"))
    kept = _Counted(fleet, fleet, 0, Hours(stop=lambda: late))
    assert not kept.broken_later([server])
    assert kept.asked == hours


def test_few_runs_of_adapters_alone_are_kept(toy_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of adapters that must be split do not keep a run each: 60 of them took 1.7 GB."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.3, Lengths.constant(9 + k)) for k in range(3 * MOST_LONE)])
    simulated: list[Bin] = []
    monkeypatch.setattr(kept_hours, "lone_run", lambda _fleet, alone, _seed: simulated.append(alone) or object())
    kept = KeptHours(fleet, fleet, 0, Hours())
    servers = [Bin((k,), toy_profile.settings(1, 8), toy_profile) for k in range(len(fleet))]
    last = [kept.lone(alone) for alone in servers][-1]
    assert len(kept._lone) == MOST_LONE
    assert kept.lone(servers[-1]) is last
    assert simulated == servers


def test_adapters_that_differ_by_rate_alone_have_one_run_alone(
    toy_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests one at a time do not depend on the rate: another draw would let some adapters keep a limit by luck."""
    lengths = Lengths.constant(9), Lengths.constant(9), Lengths.constant(10)
    fleet = Workload([Adapter(f"a{k}", 8, 0.3 + k, each) for k, each in enumerate(lengths)])
    monkeypatch.setattr(kept_hours, "lone_run", lambda *_: object())
    kept = KeptHours(fleet, fleet, 0, Hours())
    first, same, other = (kept.lone(Bin((k,), toy_profile.settings(1, 8), toy_profile)) for k in range(3))
    assert first is same
    assert first is not other
    each = np.arange(3)
    log = fleet.replaying(RequestTrace(1.0 * each, each, 9 + each, 9 + each))  # adapters with requests of their own
    kept = KeptHours(log, log, 0, Hours())
    assert len({id(kept.lone(Bin((k,), toy_profile.settings(1, 8), toy_profile))) for k in range(3)}) == 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("goal", ["p95_ttft_ms={}", "p99_ttft_ms={}", "mean_ttft_ms={}"])
def test_an_hour_in_which_too_many_adapters_are_late_ends_early(server: Profile, goal: str, seed: int) -> None:
    """With a share of adapters that keep the goal, an hour breaks a plan if and only if its whole simulation does, and
    servers are simulated only until more adapters than may be late are certain to be."""
    rng = np.random.default_rng(seed)
    fleet = Workload([Adapter(f"a{k}", 16, rate) for k, rate in enumerate(rng.uniform(0.1, 1.3, 24).tolist())])
    fleet = fleet.held_to(goal.format(rng.uniform(60.0, 160.0)) + ",adapter_share=0.9")
    bins = [Bin(tuple(range(k, k + 8)), server.settings(8, 16), server) for k in (0, 8, 16)]
    whole, early = (KeptHours(fleet, fleet, seed, Hours(seed)) for _ in range(2))
    late = int((whole.adapters(bins, whole.given).slo_used > 1.0).sum())
    assert early.holds_in(bins, early.given) is (late <= 2)
    assert late <= 2 or len(early.simulated._stored) < len(bins)


@pytest.mark.parametrize(("limit", "held"), [("p90_itl_ms=8", False), ("p90_itl_ms=90", True), ("ttft_ms=20", False)])
def test_a_share_of_adapters_does_not_excuse_limits_of_servers_and_requests(
    server: Profile, limit: str, held: bool
) -> None:
    """The share is one of the adapters: a server beyond a limit of its own, or of its requests, breaks the goal."""
    fleet = Workload([Adapter(f"a{k}", 16, 0.12) for k in range(20)]).held_to(f"{limit},adapter_share=0.9")
    bins = [Bin(tuple(range(20)), server.settings(20, 16), server)]
    kept = KeptHours(fleet, fleet, 0, Hours())
    assert kept.holds_in(bins, kept.given) is held
    assert (kept.all(bins, kept.given)[0].used <= 1.0) is held
