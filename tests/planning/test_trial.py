"""Proposals for a number of GPUs are tried in turn; remedies where they are asked for, and at the edge of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from packer import Adapter, Bin, Workload
from packer.planning.explore import Frontier
from packer.planning.kept import KeptHours
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


def test_a_proposal_that_can_not_be_worse_is_better_than_none(
    server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something is shown for every number of GPUs, also where servers of all proposals do not start."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.1) for k in range(4)])
    kept = KeptHours(fleet, fleet, 0, Hours(0))
    monkeypatch.setattr("packer.planning.trial.with_best_slots", lambda _kept, bins, *_args, **_options: bins)
    monkeypatch.setattr(kept, "used", lambda bins, *_: [math.inf] * len(bins))
    monkeypatch.setattr(kept, "holds", lambda *_: False)
    trial = Trial(kept, 0, lambda: False)
    trial.go_on([held(server, 2, 2), held(server, 1, 3)])
    assert [len(item.adapters) for item in trial.best] == [2, 2]


@pytest.mark.parametrize("remedied", [3, 4, 7, 9])
def test_the_search_finds_what_remedies_hold_on_fewer_gpus(
    server: Profile, monkeypatch: pytest.MonkeyPatch, remedied: int
) -> None:
    """Where proposals hold from 7 GPUs and remedies from fewer, the fewest with remedies are found, with remedies tried
    at as few numbers as a search outwards from 7 takes."""
    job, tried = Frontier(Workload([Adapter(f"a{k}", 8, 0.1) for k in range(30)]), server), []
    point = job.at(1)

    def at(n_gpus: int, _following: Any = None, *, plain: bool = False) -> Any:
        if not plain:
            tried.append(n_gpus)
        return replace(point, holds=n_gpus >= (7 if plain else min(7, remedied)))

    monkeypatch.setattr(job, "at", at)
    assert job.first_that_holds(2, 20) == min(7, remedied)
    assert len(set(tried)) <= 4
    job.stop = lambda: True
    job._points = {n: SimpleNamespace(holds=n >= 8) for n in (6, 8, 12)}  # type: ignore[misc]
    assert job.first_that_holds(2, 20) == 8
