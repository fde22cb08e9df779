"""A plan that fresh hours broke last holds if they do so as rarely as an evaluation allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import packer
from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.planning import rarely, recommend
from packer.planning.explain import by_luck
from packer.planning.explore import Frontier
from packer.planning.kept import Hour, KeptHours
from packer.planning.rarely import MOST_HOURS, holds_mostly, is_rare, looked_for_rare, often_broken
from packer.planning.recommend import ROUNDS, Deployment
from packer.profile import Profile
from packer.room import LEVELS, Room
from packer.twin.hours import Hours
from packer.workload import Workload


@pytest.mark.parametrize(
    ("broken", "hours", "rare"),
    [((), 4, True), ((0, 4), 13, True), ((0, 4, 9), 40, True), ((0, 4, 9, 30), 40, False), ((0, 1, 2, 3), 3, False)],
)
def test_a_few_of_many_hours_are_rare(broken: tuple[int, ...], hours: int, rare: bool) -> None:
    """Two of 13 hours, or three of 40, may break the limits; hours are looked at until that is clear."""
    found = looked_for_rare([float(0 in broken) * 5.0], 8, lambda place: 5.0 * (place in broken))
    assert len(found) == hours
    assert is_rare(found, 8) is rare


@pytest.mark.parametrize(
    ("late", "log", "rare"), [(1, False, True), (3, False, True), (4, False, False), (1, True, False)]
)
def test_a_plan_is_judged_by_its_fresh_and_further_hours(
    server: Profile, monkeypatch: pytest.MonkeyPatch, late: int, log: bool, rare: bool
) -> None:
    """Hours that break it rarely are told as chance is, with how many adapters they break it for; an hour of a log
    counts alone."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.05) for i in range(4)])
    kept, bins = KeptHours(fleet, fleet, 3, Hours(3)), (Bin((0, 1, 2, 3), server.settings(4, 8), server),)
    hours = [*kept.tried(bins, 5), *(kept.further_hour(place, 5) for place in range(1, MOST_HOURS))]
    bad = [hours[place] for place in (0, 4, 9, 30)[:late]]
    kept.others = bad if log else ()
    monkeypatch.setattr(kept, "holds_in", lambda _bins, hour: hour not in bad)
    kept.refused.add(bins)
    assert holds_mostly(kept, bins, 5, bad[:1]) is rare
    assert (bins in kept.refused) is not rare
    found, told = kept.by_luck(bins)
    assert list(told) == (bad if rare else [])
    assert sum(found) == (late if rare else 0)


@pytest.mark.parametrize(
    ("rare", "more", "gpus"), [((1,), False, 1), ((), True, 2), ((2,), False, 2), ((), False, None)]
)
def test_the_last_round_ends_with_a_plan_that_an_evaluation_confirms(
    server: Profile, monkeypatch: pytest.MonkeyPatch, rare: tuple[int, ...], more: bool, gpus: int | None
) -> None:
    """The plan that the last fresh hours break is verified if they do so rarely, else that on the next GPUs if its own
    hours keep the goal or break it rarely; else it is not. `rare`: numbers of GPUs on which breaks are rare. `more`:
    whether all hours keep the goal on more GPUs."""
    job = Frontier(Workload([Adapter(f"a{i}", 8, 0.05) for i in range(6)]), server)
    task, hour = Deployment(job), Hour(job.workload, 77)
    task.first = 1

    def broken_later(bins: Sequence[Bin], _number: int) -> list[Hour]:
        return [] if more and len(bins) > 1 else [hour]

    job.kept.broken_later = broken_later  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(rarely, "holds_mostly", lambda _kept, bins, *_: len(bins) in rare)
    found = task.judge(replace(job.at(1).plan, verified=None), ROUNDS - 1)
    assert found.verified is (gpus is not None)
    assert (found.n_gpus, task.first) == (gpus or 1, gpus or 1)
    assert by_luck(job, found) == ()
    before = task.judge(replace(job.at(1).plan, verified=None), ROUNDS - 2)
    assert before.verified is False  # another plan is made for the hour


@pytest.mark.parametrize(("broken", "often"), [(3, True), (2, False)])
def test_a_server_that_most_busy_hours_break_is_broken_too_often(
    server: Profile, monkeypatch: pytest.MonkeyPatch, broken: int, often: bool
) -> None:
    """Of three busy hours or more, if arrivals vary; a server with room, or one that breaks by luck, is not asked."""
    fleet = Workload([Adapter(f"a{k}", 16, 0.3) for k in range(4)], arrivals=Arrivals("unpredictable"))
    bins = tuple(Bin((k,), server.settings(1, 16), server) for k in range(4))
    plan: Any = SimpleNamespace(bins=bins, rooms=[Room(LEVELS[2 - (k == 2)]) for k in range(4)])
    kept = KeptHours(fleet, fleet, 0, Hours())
    monkeypatch.setattr(kept, "broken_in", lambda some, hours: hours[:broken] if some == [bins[2]] else 1 / 0)
    assert often_broken(kept, plan) == (kept.busy(bins)[:3] if often else [])
    kept.unlucky[bins] = [1.0], [kept.given]
    assert often_broken(kept, plan) == []
    plan.rooms = [Room(LEVELS[2])] * 4
    assert often_broken(KeptHours(fleet, fleet, 0, Hours()), plan) == []


@pytest.mark.usefixtures("whole_hours")
@pytest.mark.parametrize("most", [None, 1])
def test_a_plan_that_busy_hours_break_too_often_is_made_again(
    server: Profile, monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    """It takes the GPUs that also keep the goal in the worst of these hours; without more GPUs at hand it stays."""
    fleet = Workload([Adapter(f"a{k}", 16, 0.4) for k in range(24)], arrivals=Arrivals("unpredictable"))
    usual = packer.recommend(fleet, server, max_gpus=most)
    assert usual.n_gpus == 1
    busy = Hour(fleet.scaled(2.5), 0)
    monkeypatch.setattr(recommend, "often_broken", lambda _kept, plan: [busy] * (plan.n_gpus == 1))
    plan = packer.recommend(fleet, server, max_gpus=most)
    assert plan.verified
    assert len(plan.rooms) == plan.n_gpus
    same = all(getattr(plan, each) == getattr(usual, each) for each in ("bins", "rooms", "decision", "lower_bound"))
    assert plan.n_gpus > 1 if most is None else same
