"""An estimate by full servers is what servers of equal adapters need, and never more than the plan has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer import Adapter, Arrivals, Bin, Workload
from packer.plan import Plan
from packer.planning.explore import Frontier
from packer.planning.fullest import LEAST, MOST, SOURCE, STEP, _Sample, by_full_servers, fewest_servers
from packer.planning.kept import Hour
from packer.planning.settle import with_best_slots
from packer.profile import Profile
from packer.search import reach


def most_on_one(job: Frontier) -> int:
    """How many adapters of a fleet of equal ones a server takes within the goal, by halving."""

    def holds(n: int) -> bool:
        alone = Bin(tuple(range(n)), job.profile.settings(n, 16), job.profile)
        return job.kept.used(with_best_slots(job.kept, [alone], job.kept.hours, job.over, tight=1.0))[0] <= 1.0

    return reach(holds, 1, len(job.workload), 40, 8)[0]


@pytest.fixture(scope="module")
def job(server: Profile) -> Frontier:
    """Equal adapters for five servers and more."""
    return Frontier(Workload([Adapter(f"a{k}", 16, 0.9) for k in range(150)]), server)


def test_equal_adapters_need_what_full_servers_say(job: Frontier) -> None:
    """Within the step in which sizes are tried; what is known already or above the plan is no estimate."""
    fair, most = len(job.workload) / most_on_one(job), job.at(8).plan
    found = by_full_servers(job, most)
    assert found is not None
    assert found.source == SOURCE
    assert not found.proven
    assert fair / STEP**2 <= found.value <= fair + 1.0
    assert by_full_servers(job, replace(most, lower_bound=found.value)) is None
    assert by_full_servers(job, replace(most, bins=most.bins[:4])) is None  # small plans take less time


def test_equal_servers_give_no_more_fresh_hours_to_samples(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample server has its own draws: it needs no further hours where all servers of a plan share theirs, of
    which 16 had 48."""
    looked = list[int]()

    def most(_job: Frontier, _plan: Plan, held: Sequence[Hour], *_: object) -> float:
        looked.append(sum(hour.apart for hour in held))
        return 1.0

    monkeypatch.setattr("packer.planning.fullest._most_tok_s", most)
    job = Frontier(Workload([Adapter("a", 16, 10.0)], arrivals=Arrivals("unpredictable")), server)
    plan = replace(job.at(1).plan, bins=(Bin((0,), server.settings(1, 16), server, (1 / 16,)),) * 16, verified=True)
    by_full_servers(job, plan)
    assert looked == [3]


def test_copies_fill_a_server_where_a_rank_is_rare(job: Frontier, server: Profile) -> None:
    """A few adapters of a large rank take a part of a server, not a whole one."""
    adapters = [replace(each, rank=64 if k < 3 else 16) for k, each in enumerate(job.workload.adapters)]
    mixed = Frontier(replace(job.workload, adapters=tuple(adapters)), server)
    alone, both = (by_full_servers(each, each.at(8).plan) for each in (job, mixed))
    assert alone is not None
    assert both is not None
    assert both.value <= alone.value + 1.0


def test_a_rank_of_idle_adapters_takes_no_sample(job: Frontier, server: Profile) -> None:
    """Millions of copies of an adapter without traffic would fill a server: the estimate is that without it."""
    quiet = Frontier(replace(job.workload, adapters=(*job.workload.adapters, Adapter("idle", 64, 1e-6))), server)
    alone, beside = (by_full_servers(each, each.at(8).plan) for each in (job, quiet))
    assert alone is not None
    assert beside is not None
    assert alone.value <= beside.value <= alone.value + 1.0


@given(
    st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(1.0, 3.0)), min_size=1, max_size=3),
)
def test_what_is_left_over_of_a_rank_goes_to_larger_slots_or_has_a_server(
    loads: list[tuple[float, float]],
) -> None:
    """As few servers as a search over all numbers of each rank finds, where small ranks may go to larger slots."""
    offered, carried = zip(*loads, strict=True)
    most = sorted(carried, reverse=True)

    def enough(numbers: tuple[int, ...]) -> bool:
        left = 0.0
        for load, each, n in zip(offered, most, numbers, strict=True):
            left = max(0.0, left + load - n * each)
        return left <= 1e-6

    found = fewest_servers(offered, most)
    highest = [math.ceil(sum(offered) / each) for each in most]
    every = product(*(range(n + 1) for n in highest))
    assert found == min(sum(numbers) for numbers in every if enough(numbers))


@pytest.mark.parametrize("breaks", [(5, 9, 7, 8), (5, 3, 9, 1), (30, 30, 4, 30), (30, 30, 30, 30), (-12, 9, -12, 9)])
def test_the_weakest_hour_of_the_weakest_sample_is_found_in_few_hours(breaks: tuple[int, ...]) -> None:
    """An hour, or a sample, that breaks no sooner than those before it is simulated once."""
    simulated: list[tuple[int, int]] = []

    def at(step: int, held: list[int]) -> tuple[SimpleNamespace, int]:
        simulated.append((held[0], step))
        return SimpleNamespace(holds_one=lambda _: step < breaks[held[0]]), step

    found = list[int]()
    for hours in ([0, 1], [2, 3]):  # of two samples
        sample = object.__new__(_Sample)
        sample.__dict__.update(held=hours, job=SimpleNamespace(over=lambda: False), at=at)
        most = min(found, default=MOST + 1) - 1
        sample.search(LEAST, most if found else 0, 1, most)
        found.append(sample.broken)
    assert min(found) == min(*breaks, MOST + 1)
    later = {hour: sum(hour == k for k, _ in simulated) for hour in (1, 2, 3)}
    weakest = MOST + 1
    for hour, at_step in enumerate(breaks):
        if hour and at_step >= weakest:
            assert later[hour] == (weakest > LEAST)
        weakest = min(weakest, at_step)
