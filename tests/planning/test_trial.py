"""Proposals for a number of GPUs are tried in turn until one keeps the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest

from packer import Adapter, Bin, Workload
from packer.planning import settle
from packer.planning.kept import Hour, KeptHours
from packer.planning.trial import Trial
from packer.profile import Profile
from packer.twin.hours import Hours


def held(server: Profile, *counts: int) -> list[Bin]:
    """Servers of so many adapters, one after the other."""
    starts = [sum(counts[:k]) for k in range(len(counts))]
    return [
        Bin(tuple(range(start, start + n)), server.settings(n, 8), server)
        for start, n in zip(starts, counts, strict=True)
    ]


def test_the_first_proposal_that_holds_is_the_last_that_is_tried(server: Profile) -> None:
    """One that breaks its limits is kept among those tried, and is the best only until another one holds."""
    fleet = Workload([Adapter(f"a{k}", 8, 1.8) for k in range(24)])
    kept = KeptHours(fleet, fleet, 0, Hours(0))
    trial, looked = Trial(kept, 0, lambda: False), []

    def proposals() -> Iterator[Sequence[Bin]]:
        for counts in ((22, 2), (12, 12), (10, 14)):
            looked.append(counts)
            yield held(server, *counts)

    trial.go_on(proposals())
    assert looked == [(22, 2), (12, 12)]
    assert [len(item.adapters) for item in trial.best] == [12, 12]
    assert trial.holds
    assert [[len(item.adapters) for item in bins] for bins in trial.tried] == [[22, 2]]


def test_a_proposal_that_can_not_be_worse_is_better_than_none(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is shown for every number of GPUs, also where servers of all proposals do not start."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.1) for k in range(4)])
    kept = KeptHours(fleet, fleet, 0, Hours(0))
    monkeypatch.setattr("packer.planning.trial.with_best_slots", lambda _kept, bins, *_args, **_options: bins)
    monkeypatch.setattr(kept, "used", lambda bins, *_: [math.inf] * len(bins))
    monkeypatch.setattr(kept, "holds", lambda *_: False)
    trial = Trial(kept, 0, lambda: False)
    trial.go_on([held(server, 2, 2), held(server, 1, 3)])
    assert [len(item.adapters) for item in trial.best] == [2, 2]


def test_proposals_follow_one_whose_servers_are_all_far_beyond_the_goal(server: Profile) -> None:
    """A queue that grows uses any multiple of the limits on servers that are overloaded by little: a part of each
    adapter on each of 2 servers kept a goal for which 3 were taken."""
    fleet = Workload([Adapter(f"a{k}", 8, 4.0) for k in range(24)])
    trial = Trial(KeptHours(fleet, fleet, 0, Hours(0)), 0, lambda: False)
    trial.go_on([held(server, 12, 12), held(server, *[3] * 8)])
    assert min(trial.kept.used(trial.tried[0], [trial.kept.given])) > 2.0
    assert trial.holds
    assert len(trial.best) == 8


def test_one_loss_that_is_too_much_is_enough(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots for losses are looked for until the others can't hold the adapters of a lost server, fullest ones first."""
    fleet, after = Workload([Adapter(f"a{k}", 8, 3.2) for k in range(24)]), []
    real = settle.with_best_slots

    def noted(kept: KeptHours, bins: Sequence[Bin], hours: Sequence[Hour], over: Callable[[], bool]) -> list[Bin]:
        after.append([len(item.adapters) for item in bins])
        return real(kept, bins, hours, over)

    monkeypatch.setattr(settle, "with_best_slots", noted)
    kept, bins = KeptHours(fleet, fleet, 0, Hours(0)), held(server, 2, 10, 12)
    assert settle.with_spare_slots(kept, bins, lambda: False) == bins
    assert after == [[12, 12]]


def test_a_proposal_that_makes_too_many_adapters_late_is_not_simulated_further(
    server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a share of adapters that keep the goal, too, only proposals that may hold are tried in all hours. Two of
    twenty adapters may be late: those of one server that breaks its limits, not those of three."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.1) for k in range(20)]).held_to("adapter_share=0.9")
    kept, tried = KeptHours(fleet, fleet, 0, Hours(0)), list[list[int]]()
    few, many = held(server, 10, 5, 5), held(server, 2, 6, 6, 6)
    broken = {*many[1:], few[0]}

    def best(_kept: KeptHours, bins: Sequence[Bin], hours: Sequence[Hour], *_: object, **__: object) -> list[Bin]:
        if hours is kept.hours:
            tried.append([len(item.adapters) for item in bins])
        return list(bins)

    monkeypatch.setattr("packer.planning.trial.with_best_slots", best)
    monkeypatch.setattr(kept, "used", lambda bins, *_: [1.5 if item in broken else 0.5 for item in bins])
    monkeypatch.setattr(kept, "holds", lambda *_: False)
    hours = [*kept.hours, kept.given]
    monkeypatch.setattr(kept, "hours", hours)
    Trial(kept, 0, lambda: False).go_on([held(server, 20), many, few])
    assert tried == [[20], [10, 5, 5]]


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_a_proposal_that_loses_the_goal_with_any_slots_is_simulated_in_no_later_hour(
    server: Profile, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Servers with a slot for each adapter have no other slots that help: once too many adapters are late in a further
    hour, the others tell nothing. If each adapter must keep its limits, the proposal may be changed, and all do."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.1) for k in range(20)]).held_to(f"adapter_share={share}")
    kept, hours = KeptHours(fleet, fleet, 0, Hours(0)), [Hour(fleet, seed) for seed in range(4)]
    asked = set[Hour]()

    def used(bins: Sequence[Bin], some: Sequence[Hour], *_: object) -> list[float]:
        asked.update(some)
        return [1.5 if hours[1] in some else 0.5] * len(bins)

    monkeypatch.setattr(kept, "used", used)
    monkeypatch.setattr(kept, "short_of_cache", lambda bins, _hour: [False] * len(bins))
    settle.with_best_slots(kept, held(server, 5, 5, 5, 5), hours, lambda: False)
    assert asked == set(hours[: 2 if share < 1.0 else 4])
