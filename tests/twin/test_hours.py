"""Simulated hours are those of the server that was requested."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from packer import seeds
from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts
from packer.bin import Bin
from packer.profile import LatencySpec, Profile
from packer.room import LEVELS
from packer.twin import hours as stored
from packer.twin.hours import Hours, ServerHour
from packer.twin.limits import Limit
from packer.twin.simulate import simulate
from packer.twin.threads import Workers
from packer.workload import Workload


def test_hours_are_kept_by_kind_of_server(make_profile: Callable[..., Profile]) -> None:
    """The same adapters with the same slots on a slower kind of server have an hour of their own."""
    fleet = Workload([Adapter("a", 8, 0.2), Adapter("b", 8, 0.1)])
    kinds = [make_profile(latency=LatencySpec("linear", {"base_ms": ms})) for ms in (10.0, 30.0)]
    hours = Hours()
    quick, slow = hours.all([Bin((0, 1), kind.settings(2, 8), kind) for kind in kinds], fleet)
    assert quick.figures.mean_itl_ms < 0.5 * slow.figures.mean_itl_ms


def test_requests_of_the_oldest_hours_are_given_up(
    make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond so many requests, hours are simulated again where their requests are needed, and only there."""
    fleet = Workload([Adapter("a", 8, 0.2), Adapter("b", 8, 0.1)])
    profile = make_profile()
    first, second = (Bin((k,), profile.settings(1, 8), profile) for k in range(2))
    simulated = []
    one = stored._run
    monkeypatch.setattr(stored, "_run", lambda *job, **more: simulated.append(job[0]) or one(*job, **more))
    monkeypatch.setattr(stored, "MOST_REQUESTS", 1)
    hours = Hours()
    (before,) = hours.all([first], fleet, requests=True)
    hours.all([first, second], fleet)
    (known,) = hours.all([first], fleet)
    assert simulated == [first, second]
    assert known.ttft_ms is None
    (again,) = hours.all([first], fleet, requests=True)
    assert simulated == [first, second, first]
    assert again.figures == known.figures == before.figures
    assert again.ttft_ms is not None
    assert again.slowest_ms == known.slowest_ms == pytest.approx(again.ttft_ms.max(), rel=1e-6)


def test_hours_of_a_fleet_that_is_gone_are_no_others(make_profile: Callable[..., Profile]) -> None:
    """A fleet whose object takes the place of an earlier one in memory has hours of its own."""
    profile = make_profile()
    item = Bin((0,), profile.settings(1, 8), profile)
    hours = Hours()
    for rate in (0.1, 0.2, 0.4, 0.8) * 5:
        (found,) = hours.all([item], Workload([Adapter("a", 8, rate)]))
        assert found.figures.offered_tok_s == pytest.approx(Workload([Adapter("a", 8, rate)]).offered_tok_s)


def test_piecewise_rates_are_seen_for_whole_cycles(make_profile: Callable[..., Profile]) -> None:
    """The figures of a fleet whose cycle is longer than an hour include its busy period."""
    arrivals = Arrivals("piecewise", period_s=3600.0, factors=(0.1, 2.0))
    fleet = Workload([Adapter("a", 8, 0.5)], arrivals=arrivals)
    profile = make_profile()
    (found,) = Hours().all([Bin((0,), profile.settings(1, 8), profile)], fleet)
    assert found.ttft_ms.size > 0.9 * 0.5 * (0.1 + 2.0) * 3600.0


def test_hours_that_are_begun_ahead_are_those_that_are_asked_for(
    make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour that was begun with the same end is simulated once; a single thread begins nothing ahead."""
    fleet, profile = Workload([Adapter("a", 8, 0.2)]), make_profile()
    job = Bin((0,), profile.settings(1, 8), profile), fleet, 0
    simulated = []
    one = stored._run
    monkeypatch.setattr(stored, "_run", lambda *job, **more: simulated.append(job[0]) or one(*job, **more))
    found = []
    for jobs, begun in ((2, 1), (1, 0)):
        hours = Hours(_workers=Workers(jobs))
        hours.ahead([(job, 8.0), (job, 8.0)])
        assert len(hours._ahead) == begun
        found += hours.judged([job], [8.0])
        hours.ahead([(job, 8.0)])
        assert hours.judged([job], [8.0])[0] is found[-1]
        assert not hours._ahead
    assert len(simulated) == 2
    assert isinstance(found[0], ServerHour)
    assert isinstance(found[1], ServerHour)
    assert found[0].figures == found[1].figures
    hours = Hours(_workers=Workers(2))
    hours.ahead([(job, 8.0)])
    hours.forget()
    assert not hours._ahead


def test_an_error_leaves_nothing_to_begin(
    make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours that wait for a thread are not simulated once one of them failed."""
    fleet, profile = Workload([Adapter(name, 8, 0.2) for name in "abcdefgh"]), make_profile()
    begun, hold = [], threading.Event()

    def broken(item: Bin, *_job: object, **_more: object) -> None:
        begun.append(item)
        assert len(begun) == 1 or hold.wait(10.0)
        raise ZeroDivisionError

    monkeypatch.setattr(stored, "_run", broken)
    hours = Hours(_workers=Workers(1))
    with pytest.raises(ZeroDivisionError):
        hours.all([Bin((k,), profile.settings(1, 8), profile) for k in range(8)], fleet)
    hold.set()
    assert hours._workers.begin(lambda: True).result(10.0)
    assert len(begun) <= 2


class At(list[int]):
    """A run: its level, and the last one that keeps the limits."""

    slo_used = 0.5


@pytest.mark.parametrize("ends", [(4, 9, 12), (9, 4, 12), (12, 9, 4)])
@pytest.mark.parametrize("near", [None, *LEVELS[::3]])
def test_headroom_is_found_in_few_levels(
    make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch, near: float | None, ends: tuple[int, ...]
) -> None:
    """The headroom is the highest level at which the limits are kept, no queue grows and the server does not starve,
    wherever the search begins; no level is looked at twice, and none once the headroom is known."""
    asked = list[float]()

    def run(_item: Bin, fleet: Workload, _seed: int) -> At:
        asked.append(fleet.rate)
        return At([LEVELS.index(round(fleet.rate, 4))])

    monkeypatch.setattr(stored, "_run", run)
    monkeypatch.setattr(Hours, "holds", lambda _self, at: tuple(at[0] <= end for end in ends))
    profile = make_profile()
    growth = Hours().growth(Bin((0,), profile.settings(1, 8), profile), Workload([Adapter("a", 8, 1.0)]))
    assert growth.reach(near) == growth.reach(None) == LEVELS[4]
    assert len(asked) == len(set(asked)) <= 9


def of_first(place: int) -> int:
    """The seed of the server with the first adapter in a fresh hour."""
    return seeds.of_server(seeds.fresh(0, place), 0)


@pytest.mark.parametrize(
    ("chance", "kind", "end"), [(True, "unpredictable", 3), (True, "poisson", 6), (False, "poisson", 7)]
)
def test_room_is_what_the_worst_of_further_hours_leaves(
    make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch, chance: bool, kind: Any, end: int
) -> None:
    """Where limits break by chance, the room is that of the worst hour (of two where hours are alike), which says what
    limits the server; a server whose limits break at once in another hour keeps the rates as given."""
    worst = {of_first(place): end for place, end in ((1, 6), (2, 3), (3, 5))}
    asked = list[int]()

    def run(_item: Bin, fleet: Workload, seed: int) -> At:
        asked.append(seed)
        return At([LEVELS.index(round(fleet.rate, 4)), worst.get(seed, 7)])

    monkeypatch.setattr(stored, "_run", run)
    monkeypatch.setattr(Hours, "holds", lambda _self, at: (at[0] <= at[1], at[0] <= 9, at[0] <= 12))
    monkeypatch.setattr(Hours, "by_chance", lambda *_: chance)
    monkeypatch.setattr(stored, "limit_of", lambda at, _help=None: Limit("slots", 1.0, str(at[1]), ""))
    profile, fleet = make_profile(), Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals(kind))
    item, hours = Bin((0,), profile.settings(1, 8), profile), Hours()
    rooms = hours.rooms([item], fleet)
    assert rooms[0].headroom == LEVELS[7]
    (found,) = hours.checked(rooms, [item], fleet)
    assert found.headroom == LEVELS[end]
    assert found.usage == (f"{end} at +{LEVELS[end + 1] - 1:.0%}" if chance else rooms[0].usage)
    worst[of_first(1)] = -1
    assert hours.checked(rooms, [item], fleet)[0].headroom == (1.0 if chance else LEVELS[7])
    assert hours.checked((), [item], fleet) == ()


def test_equal_servers_are_searched_once(make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that each get an equal part of the same adapters have one room, and no level is simulated again."""
    asked = list[tuple[float, int]]()

    def run(_item: Bin, fleet: Workload, seed: int) -> At:
        asked.append((fleet.rate, seed))
        return At([LEVELS.index(round(4 * fleet.rate, 4))])

    monkeypatch.setattr(stored, "_run", run)
    monkeypatch.setattr(Hours, "holds", lambda _self, at: (at[0] <= 7, at[0] <= 9, at[0] <= 12))
    monkeypatch.setattr(Hours, "by_chance", lambda *_: True)
    monkeypatch.setattr(stored, "limit_of", lambda _at, _help=None: Limit("slots", 1.0, "", ""))
    profile, fleet, hours = make_profile(), Workload([Adapter("a", 8, 1.0)]), Hours()
    items = [Bin((0,), profile.settings(1, 8), profile, (0.25,))] * 4
    rooms = hours.rooms(items, fleet)
    assert [room.headroom for room in hours.checked(rooms, items, fleet)] == [LEVELS[7]] * 4
    assert len(asked) == len(set(asked))


def test_rooms_that_a_search_did_not_reach_are_not_said(
    make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that ends before each server has a factor has no rooms: none would say that a server breaks."""
    monkeypatch.setattr(stored, "_run", lambda *_: At([0]))
    monkeypatch.setattr(Hours, "holds", lambda *_: (True, True, True))
    profile, fleet = make_profile(), Workload([Adapter(f"a{k}", 8, 1.0 + k) for k in range(6)])
    items = [Bin((k,), profile.settings(1, 8), profile) for k in range(6)]
    assert len(Hours().rooms(items, fleet)) == 6
    calls = iter([False] * 8)
    assert Hours(stop=lambda: next(calls, True)).rooms(items, fleet) == ()


def test_confirmed_room_is_kept_in_each_hour(make_profile: Callable[..., Profile]) -> None:
    """Of a bursty fleet, the highest factor at which simulations with the seeds of all hours keep the limits."""
    fleet = Workload(
        [Adapter(f"a{k}", 8, 0.05) for k in range(12)],
        arrivals=Arrivals("bursty", common=Bursts(0.6, ((60.0, 1.0),))),
    )
    profile = make_profile(latency=LatencySpec("linear", {"base_ms": 20.0}))
    item, hours = Bin(tuple(range(12)), profile.settings(6, 8), profile), Hours()
    (alone,) = hours.rooms([item], fleet)
    (found,) = hours.checked([alone], [item], fleet)

    def used(factor: float) -> float:
        own = item.workload(fleet.scaled(factor))
        places = [0, *(of_first(place) for place in range(1, 4))]
        return max(simulate(own, profile, max_loras=6, max_lora_rank=8, seed=seed).slo_used for seed in places)

    assert alone.headroom is not None
    assert found.headroom is not None
    assert 1.0 < found.headroom < alone.headroom
    assert used(found.headroom) <= 1.0 < used(LEVELS[LEVELS.index(found.headroom) + 1])


@pytest.mark.parametrize(
    ("kept", "worse", "advice"), [(5, 1, "max_loras 2"), (5, 2, "fewer adapters"), (4, 0, "fewer adapters")]
)
def test_more_slots_are_advised_if_they_keep_the_limits(
    make_profile: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch, kept: int, worse: int, advice: str
) -> None:
    """The server breaks its limits above level 4 in the second fresh hour. More slots are advised if with them this
    hour keeps the limits at the next level, and most of three hours use no more of the limits: one may by chance. No
    hour is simulated twice."""
    asked = list[tuple[int, float, int]]()

    def run(item: Bin, fleet: Workload, seed: int) -> SimpleNamespace:
        asked.append((item.max_loras, fleet.rate, seed))
        most = 9 if seed != of_first(2) else 4 if item.max_loras == 1 else kept
        used = 0.6 if item.max_loras == 2 and seed in [of_first(k + 1) for k in range(worse)] else 0.5
        return SimpleNamespace(seed=seed, kept=LEVELS.index(round(fleet.rate, 4)) <= most, slo_used=used)

    def limit_of(_sim: object, help_: Callable[..., bool] | None = None) -> Limit:
        return Limit("slots", 1.0, "", "max_loras 2" if help_ is None or help_(max_loras=2) else "fewer adapters")

    monkeypatch.setattr(stored, "_run", run)
    monkeypatch.setattr(Hours, "holds", lambda _self, sim: (sim.kept, True, True))
    monkeypatch.setattr(Hours, "by_chance", lambda *_: True)
    monkeypatch.setattr(stored, "limit_of", limit_of)
    profile = make_profile()
    fleet = Workload([Adapter("a", 8, 0.5), Adapter("b", 8, 0.5)], arrivals=Arrivals("unpredictable"))
    item, hours = Bin((0, 1), profile.settings(1, 8), profile), Hours()
    (found,) = hours.checked(hours.rooms([item], fleet), [item], fleet)
    assert (found.headroom, found.advice) == (LEVELS[4], advice)
    assert len(asked) == len(set(asked))
