"""Limits that a plan breaks rarely, and by little, are broken by chance."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.planning import rarely
from packer.planning.chance import (
    HOURS,
    ONE_IN,
    beyond,
    by_chance,
    chance_words,
    hours_broken,
    looked_at,
    more_than_chance,
)
from packer.planning.explain import by_luck
from packer.planning.explore import Frontier
from packer.planning.kept import Hour, KeptHours
from packer.planning.recommend import Deployment
from packer.profile import Profile
from packer.seeds import fresh
from packer.twin.hours import Hours, ServerHour
from packer.twin.per_adapter import FEW_CHANCE
from packer.workload import Workload


def hour_of(used: float, by_adapter: list[float]) -> ServerHour:
    """An hour of a server that uses so much of its limits, and for each adapter."""
    return cast("ServerHour", SimpleNamespace(used=used, adapters=SimpleNamespace(slo_used=np.array(by_adapter))))


@pytest.mark.parametrize(
    ("goal", "used", "over", "expected"),
    [
        ("p95_ttft_ms=2000", (0.9, 1.0), (0, 0), 0.0),
        ("p95_ttft_ms=2000", (1.2, 1.1), (0, 0), 2 * FEW_CHANCE),
        ("p95_ttft_ms=2000", (1.2, 1.1), (3, 0), 3 + FEW_CHANCE),
        ("p95_ttft_ms=2000,p95_itl_ms=50", (1.2, 1.1), (0, 0), 1.0),
        ("p95_ttft_ms=2000,p95_itl_ms=50", (1.2, 1.1), (3, 0), 3.0),
        ("p95_ttft_ms=2000", (2.1, 0.5), (0, 0), math.inf),
    ],
)
def test_servers_without_an_adapter_beyond_count_by_what_may_be_expected(
    goal: str, used: tuple[float, ...], over: tuple[int, ...], expected: float
) -> None:
    """Where only adapters have limits, a server exceeds them without an adapter that does if those with few requests
    may: it counts as the number that may be expected. Other limits that are broken count as one adapter."""
    fleet = Workload([Adapter("a", 8, 1.0)]).held_to(goal)
    hours = [hour_of(u, [1.1] * number + [0.4] * 3) for u, number in zip(used, over, strict=True)]
    bins = [SimpleNamespace(adapters=range(10 * k, 10 * k + 3 + number)) for k, number in enumerate(over)]
    assert beyond(cast("list[Bin]", bins), hours, fleet) == pytest.approx(expected)


def test_an_adapter_beyond_its_limits_on_two_servers_is_one() -> None:
    """Numbers of adapters beyond their limits are compared with the number of adapters: replicas do not count twice."""
    fleet = Workload([Adapter("hot", 8, 1.0), Adapter("a", 8, 1.0), Adapter("b", 8, 1.0)])
    bins = [SimpleNamespace(adapters=(0, 1)), SimpleNamespace(adapters=(0, 2))]
    hours = [hour_of(1.3, [1.2, 0.5]), hour_of(1.3, [1.1, 1.3])]
    assert beyond(cast("list[Bin]", bins), hours, fleet) == 2.0


def test_hours_without_an_adapter_beyond_are_not_said_to_break_the_limits() -> None:
    """Hours in which adapters only may be beyond their limits add to the number of adapters, not of hours: there are
    never more hours than adapter-hours."""
    assert chance_words([0.4, 1.0, 0.05, 0.1], 2_000).endswith("in 1 of 4 hours: 2 of 8,000 adapter-hours.")
    assert chance_words([0.0, 0.1, 0.1], 2_000).endswith("in 1 of 3 hours: 1 of 6,000 adapter-hours.")
    assert hours_broken([0.0, 0.0]) == 0


@pytest.mark.parametrize(
    ("adapters", "found", "later", "hours", "chance"),
    [
        (40, [1.0, 0.0, 0.0], [0.0] * 9, 12, True),  # one adapter-hour in a dozen hours
        (40, [1.0, 0.0, 0.0], [0.0, 1.0] + [0.0] * 7, 6, False),
        (40, [2.0, 0.0, 0.0], [], 3, False),
        (40, [math.inf, 0.0, 0.0], [], 3, False),
        (40, [0.0, 0.0, 0.0], [], 3, True),
        (500, [1.0, 0.0, 0.0], [0.0] * 9, 12, True),  # 1.2 of 6,000 adapter-hours
        (
            1_000,
            [1.0, 0.0, 0.0],
            [0.0, 1.0] + [0.0] * 7,
            12,
            True,
        ),  # two of 12,000, though more than 1.2 of 6,000
        (
            1_000,
            [1.0, 1.0, 0.0],
            [1.0] + [0.0] * 8,
            6,
            False,
        ),  # three are too many of 12,000, whatever the others are
        (2_000, [1.0, 0.0, 0.0], [], 3, True),  # 1.2 of 6,000
        (2_000, [2.0, 0.0, 0.0], [0.0] * 3, 6, True),  # two of 6,000 leave a doubt, two of 12,000 none
        (2_000, [4.0, 0.0, 0.0], [], 3, False),  # more than a standard error above 1.2
    ],
)
def test_one_adapter_hour_in_so_many_may_be_beyond(
    adapters: int, found: list[float], later: list[float], hours: int, chance: bool
) -> None:
    """As many further hours are looked at as it takes to tell; where they can't be chance any more, none."""
    asked: list[int] = []

    def further(first: int, count: int) -> list[float]:
        asked.extend(range(first, first + count))
        return later[first - len(found) : first - len(found) + count]

    seen = looked_at(found, adapters, further)
    assert asked == list(range(len(found), hours))
    assert len(seen) == hours
    assert by_chance(seen, adapters) is chance


@pytest.mark.parametrize(
    ("adapters", "found", "more"),
    [(40, [1.0, 1.0] + [0.0] * 10, False), (40, [3.0] + [0.0] * 11, True), (40, [1.0, 0.0], True),
     (2_500, [1.0, 1.0, 1.0, 0.0], False), (2_500, [4.0, 0.0, 0.0, 0.0], True), (40, [math.inf, 0.0], True)],
)  # fmt: skip
def test_another_plan_takes_more_than_a_doubt(adapters: int, found: list[float], more: bool) -> None:
    """A plan that is at hand is given up where more adapters are beyond than one adapter-hour in so many, by a standard
    error of that number."""
    assert more_than_chance(found, adapters) is more


def test_words_count_adapter_hours() -> None:
    """People read in how many hours, and of how many adapter-hours."""
    said = chance_words([2.0, 0.0, 1.0], 5_000)
    assert said == "Chance breaks the limits in 2 of 3 hours: 3 of 15,000 adapter-hours."


class _Unlucky(KeptHours):
    """Hours of which some break the limits of some adapters, by chance or by more."""

    bad: dict[int, float]

    def broken_in(self, bins: object, hours: object) -> list[Hour]:
        return [hour for hour in hours if hour.seed in self.bad]  # type: ignore[attr-defined]

    def _beyond(self, bins: object, hours: object, most: float) -> list[float]:
        return [self.bad.get(hour.seed, 0.0) for hour in hours]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("places", "count", "adapters", "broken"),
    [
        ((), 1.0, 40, 0),
        ((1,), 1.0, 40, 0),
        ((1,), math.inf, 40, 1),
        ((1, 2), 1.0, 40, 2),
        ((1,), 1.0, 2_000, 0),
        ((1, 2), 2.0, 2_000, 2),
    ],
)
def test_a_plan_is_verified_where_chance_alone_breaks_it(
    server: Profile,
    monkeypatch: pytest.MonkeyPatch,
    places: tuple[int, ...],
    count: float,
    adapters: int,
    broken: int,
) -> None:
    """Fresh hours that break it by chance are none that another plan is made for, and are told."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.001) for i in range(adapters)])
    kept = _Unlucky(fleet, fleet, 7, Hours(7))
    kept.bad = {fresh(7, place): count for place in places}
    monkeypatch.setattr(Hours, "by_chance", lambda *_: True)
    bins = [Bin(tuple(range(adapters)), server.settings(8, 8), server)]
    assert len(kept.broken_later(bins)) == broken
    lucky = bool(places) and not broken
    assert (tuple(bins) in kept.unlucky) is lucky
    if lucky:
        found, hours = kept.unlucky[tuple(bins)]
        assert len(found) == (3 if 3 * adapters >= ONE_IN else HOURS)
        assert [hour.seed for hour in hours] == [fresh(7, place) for place in places]


@pytest.mark.parametrize("chance", [True, False])
def test_fewer_servers_that_chance_breaks_are_taken(server: Profile, chance: bool) -> None:
    """Where hours that broke other plans break one on fewer servers by chance alone, it is verified, and held to these
    hours no longer; else more servers are taken."""
    job = Frontier(Workload([Adapter(f"a{i}", 8, 0.05) for i in range(6)]), server)
    task = Deployment(job)
    point, hour = job.at(1), Hour(job.workload, 77)
    job.kept.add(hour)
    job._points[1] = replace(point, holds=False, broken_later=True)
    bins, asked = point.plan.bins, []

    def broken_later(bins: tuple[Bin, ...], number: int) -> list[object]:
        asked.append((bins, number))
        job.kept.unlucky |= {bins: ([1.0], [hour])} if chance else {}
        return [] if chance else [hour]

    job.kept.broken_later = broken_later  # type: ignore[method-assign,assignment]
    job.kept.holds_in = lambda _bins, each: each != hour  # type: ignore[method-assign,assignment]
    found = rarely.by_chance(task, 1, 2)
    assert asked == [(bins, 0)]
    assert job.kept.added == ([] if chance else [hour])
    if chance:
        assert found is not None
        assert (found.bins, found.verified, task.first, job.at(1).holds) == (bins, True, 1, True)
        assert by_luck(job, found) == ("Chance breaks the limits in 1 of 1 hours: 1 of 6 adapter-hours.",)
    else:
        assert found is None
    assert rarely.by_chance(task, 2, 2) is None


def test_one_hour_refuses_a_plan_for_a_share_of_the_adapters(server: Profile) -> None:
    """Where some adapters may break the goal, no hour may: the first that does decides, and hours that broke the last
    plan come first. All servers were simulated to the end of every hour."""
    job = Frontier(Workload([Adapter(f"a{i}", 8, 0.05) for i in range(6)]).held_to("adapter_share=0.8"), server)
    task = Deployment(job)
    job._points[1] = replace(job.at(1), holds=False, broken_later=True)
    hours, asked = [Hour(job.workload, seed) for seed in (1, 2, 3)], list[int]()
    job.broken = [hours[1]]

    def holds_in(_bins: object, hour: Hour) -> bool:
        asked.append(hour.seed)
        return hour not in hours

    job.kept.tried = lambda _bins, _number: hours  # type: ignore[method-assign,assignment]
    job.kept.holds_in = holds_in  # type: ignore[method-assign,assignment]
    assert rarely.by_chance(task, 1, 2) is None
    assert asked == [job.kept.given.seed, 2]
