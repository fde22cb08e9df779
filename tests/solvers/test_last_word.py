"""The twin's last word on plans that a learned judge found."""

from __future__ import annotations

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.objectives.base import Objective
from packer.objectives.gpus import Gpus
from packer.objectives.headroom import Headroom
from packer.objectives.latency import Latency
from packer.objectives.slo import Slo
from packer.predictors.twin import TwinPredictor
from packer.settings import Slots
from packer.solvers.base import Problem
from packer.solvers.last_word import confirmed, lowest_latency
from packer.workload import Workload

PROFILE = load_profile("h100-64gb/llama-3.1-8b-instruct")
FLEET = Workload([Adapter(f"a{i}", rank=8, rate=1.6) for i in range(32)])


def _problem(objective: Objective, gpus: int | None) -> Problem:
    return Problem(FLEET, (PROFILE,), objective, TwinPredictor(), max_gpus=gpus)


def _bins(*parts: range, slots: int) -> tuple[Bin, ...]:
    return tuple(Bin(tuple(part), Slots(min(slots, len(part)), 8), PROFILE) for part in parts)


@pytest.mark.parametrize(("parts", "holds"), [((range(32),), False), ((range(16), range(16, 32)), True)])
def test_overloaded_bins_are_not_confirmed(parts: tuple[range, ...], holds: bool) -> None:
    """Twice the load that a server takes is refused, half of that is confirmed."""
    assert confirmed(_problem(Gpus(), None), _bins(*parts, slots=32)) is holds


@pytest.mark.parametrize(
    ("objective", "holds"),
    [
        (Headroom(1.01), True),
        (Headroom(3.0), False),
        (Slo(mean_ttft_ms=1e6), True),
        (Slo(mean_ttft_ms=1.0), False),
    ],
)
def test_the_objective_says_what_is_confirmed(objective: Objective, holds: bool) -> None:
    """Loads and limits of the objective are asked of the twin, not just the nominal rates."""
    assert confirmed(_problem(objective, None), _bins(range(16), range(16, 32), slots=32)) is holds


def test_a_plan_that_falls_behind_a_rival_is_not_chosen() -> None:
    """Two slots for sixteen busy adapters make requests wait: the rival with a slot each is taken."""
    halves = (range(16), range(16, 32))
    plans = [_bins(*halves, slots=2), _bins(*halves, slots=16)]
    assert lowest_latency(_problem(Latency(), 2), plans, rivals=1) == 1


def test_a_starving_plan_comes_last() -> None:
    """A plan with a bin that starves loses against one without, whoever is the rival."""
    plans = [_bins(range(2), range(2, 32), slots=32), _bins(range(16), range(16, 32), slots=16)]
    assert lowest_latency(_problem(Latency(), 2), plans, rivals=1) == 1
    assert lowest_latency(_problem(Latency(), 2), plans[::-1], rivals=1) == 0
