"""A server changes its settings only where none that it may have hold in two successive periods."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.operate.day import Period, with_steady_settings
from packer.plan import Plan, Status
from packer.testing.analytic import small_profile
from packer.workload import Workload

PROFILE = small_profile()
FLEET = Workload([Adapter("low", 8, 0.3), Adapter("high", 16, 0.3)])


def period(t: int, settings: dict[int, tuple[int, int]], adapters: tuple[int, ...] = (0, 1)) -> Period:
    """An hour with servers of these slots and ranks by place."""
    bins = tuple(Bin(adapters, PROFILE.settings(*pair), PROFILE) for pair in settings.values())
    plan = Plan(FLEET, bins, Evaluations.of([]), Status.FEASIBLE, "all-day", "replan", "analytic")
    return Period((str(t),), t * 3600.0, (t + 1) * 3600.0, plan, tuple(settings))


def changes(chosen: Sequence[object]) -> int:
    """Changes in a day that repeats."""
    return sum(a != b for a, b in pairwise([*chosen, chosen[0]]))


@pytest.mark.parametrize("seed", range(30))
def test_fewest_changes(seed: int) -> None:
    """Against every choice of the settings that hold in each period."""
    rng = np.random.default_rng(seed)
    own = [(int(rng.integers(1, 4)), 16) for _ in range(6)]
    every = sorted(set(own))
    holding = [{pair for pair in every if pair == mine or rng.random() < 0.4} for mine in own]

    def holds(each: Period, bins: Sequence[Bin]) -> list[bool]:
        return [(item.max_loras, item.max_lora_rank) in holding[int(each.names[0])] for item in bins]

    found = with_steady_settings([period(t, {3: pair}) for t, pair in enumerate(own)], holds)
    settings = [(each.plan.bins[0].max_loras, each.plan.bins[0].max_lora_rank) for each in found]
    assert all(pair in each for pair, each in zip(settings, holding, strict=True))
    assert changes(settings) == min(changes(chosen) for chosen in product(*holding))
    numbers = [each.servers[0] for each in found]
    assert changes(numbers) == changes(settings)
    assert set(numbers) == set(range(len(set(settings))))


def test_servers_that_never_change_are_not_evaluated() -> None:
    """Where all periods have the same settings there is nothing to choose and nothing to simulate."""

    def holds(_each: Period, bins: Sequence[Bin]) -> list[bool]:
        raise AssertionError(bins)

    found = with_steady_settings([period(t, {0: (2, 16)}) for t in range(3)], holds)
    assert [each.plan.bins[0].settings for each in found] == [PROFILE.settings(2, 16)] * 3


def test_no_slot_is_smaller_than_an_adapter() -> None:
    """Slots of rank 8, which an hour without the high adapter has, are not taken where that runs."""
    periods = [period(0, {0: (1, 8)}, (0,)), period(1, {0: (1, 16)}, (0, 1))]
    found = with_steady_settings(periods, lambda _each, bins: [True] * len(bins))
    assert [each.plan.bins[0].max_lora_rank for each in found] == [16, 16]
    assert found[0].servers == found[1].servers


def test_a_server_that_was_off_may_have_other_settings() -> None:
    """Two runs of a place are two servers if no settings are common, one if they are; other places don't count."""
    off = {1: (2, 16)}
    periods = [period(0, {0: (1, 16), **off}), period(1, off), period(2, {0: (3, 16), **off}), period(3, off)]
    found = with_steady_settings(periods, lambda _each, bins: [False] * len(bins))
    assert [each.servers for each in found] == [(0, 2), (2,), (1, 2), (2,)]


def test_a_server_without_a_choice_is_not_evaluated() -> None:
    """Servers of one place with one pair of slots and rank are kept, and nobody is asked whether they hold."""

    def holds(each: Period, bins: Sequence[Bin]) -> Sequence[bool]:
        raise AssertionError(f"{bins} of {each.names} have no other settings")

    found = with_steady_settings([period(0, {0: (2, 16)}), period(1, {0: (2, 16)})], holds)
    assert [each.plan.bins[0].max_loras for each in found] == [2, 2]
