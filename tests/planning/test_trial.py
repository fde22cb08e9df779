"""Proposals for a number of GPUs are tried in turn until one keeps the limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest

from packer import Adapter, Bin, Workload
from packer.arrival import Arrivals, Bursts
from packer.planning.kept import KeptHours
from packer.planning.trial import Trial
from packer.profile import Profile
from packer.twin.hours import Hours

BURSTS = Bursts(1.5, ((900.0, 1.0),))


def held(server: Profile, *counts: int) -> list[Bin]:
    """Servers of so many adapters, one after the other."""
    starts = [sum(counts[:k]) for k in range(len(counts))]
    return [
        Bin(tuple(range(start, start + n)), server.settings(n, 8), server)
        for start, n in zip(starts, counts, strict=True)
    ]


def tried_with(
    server: Profile, monkeypatch: pytest.MonkeyPatch, arrivals: Arrivals, goal: str, used: Sequence[float], more: bool
) -> tuple[Trial, int]:
    """A trial of two proposals that break the goal, whose servers use so much of it, and how many were looked at."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.1) for k in range(4)], arrivals=arrivals).held_to(goal)
    kept = KeptHours(fleet, fleet, 0, Hours(0))
    monkeypatch.setattr("packer.planning.trial.with_best_slots", lambda _kept, bins, *_args, **_options: bins)
    monkeypatch.setattr(kept, "used", lambda *_: list(used))
    monkeypatch.setattr(kept, "holds", lambda *_: False)
    trial, looked = Trial(kept, 0, lambda: False, more=more), list[Sequence[Bin]]()
    trial.go_on(looked.append(bins) or bins for bins in (held(server, 2, 2), held(server, 1, 3)))
    return trial, len(looked)


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


@pytest.mark.parametrize(
    ("goal", "used", "more", "tried"),
    [
        ("p95_ttft_ms=2000", (15.0, 16.0), True, 1),
        ("p95_ttft_ms=2000", (15.0, 16.0), False, 2),  # the best plan on these GPUs is wanted
        ("p95_ttft_ms=2000", (15.0, 12.0), True, 2),  # another split may take one percent less time
        ("p95_ttft_ms=2000", (15.0, 1.0), True, 2),  # the other server has room
        ("p95_ttft_ms=2000", (15.0, math.inf), True, 2),  # with fewer slots or other ranks it may start
        ("p95_ttft_ms=200", (15.0, 15.0), True, 2),  # requests wait for a short time
        ("p95_ttft_ms=2000,adapter_share=0.5", (15.0, 15.0), True, 2),  # one server may break them for the others
    ],
)
def test_too_much_load_on_every_server_is_too_much_for_any_split(
    server: Profile, monkeypatch: pytest.MonkeyPatch, goal: str, used: tuple[float, ...], more: bool, tried: int
) -> None:
    """No further proposal is tried once requests wait for long on all servers of one, and every adapter counts."""
    trial, looked = tried_with(server, monkeypatch, Arrivals(), goal, used, more)
    assert looked == tried
    assert trial.ended == (tried == 1)
    assert [len(item.adapters) for item in trial.best] == [2, 2]


@pytest.mark.parametrize(
    ("arrivals", "tried"),
    [
        (Arrivals("bursty", common=BURSTS), 1),
        (Arrivals("bursty", own=BURSTS), 2),
        (Arrivals("bursty", common=BURSTS, own=BURSTS), 2),
        (Arrivals("unpredictable"), 2),
    ],
)
def test_bursts_of_single_adapters_may_level_out_in_another_split(
    server: Profile, monkeypatch: pytest.MonkeyPatch, arrivals: Arrivals, tried: int
) -> None:
    """Servers whose adapters burst at different times may all be overloaded in one split, and none in the next."""
    _, looked = tried_with(server, monkeypatch, arrivals, "p95_ttft_ms=2000", (15.0, 15.0), more=True)
    assert looked == tried
