"""The controller on servers with more adapters than slots, which hold less load with them, as after a loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.operate.capacity import load_of
from packer.operate.keeper import Keeper, Observation
from tests.operate.test_keeper import FLEET, KIND, keeper, seen


def slotted(servers: int, on: int) -> Keeper:
    """A controller on servers of four slots, which hold a tenth with more adapters."""
    control = keeper(servers, on)
    control.kinds[:] = [replace(KIND, max_loras=4)] * servers

    def of(server: int, own: dict[int, float]) -> float:
        return 1000.0 if len(own) <= control.kinds[server].max_loras else 100.0

    control.capacity.of = of  # type: ignore[method-assign,assignment]
    return control


def test_a_server_that_returns_gets_adapters_until_all_have_slots() -> None:
    """A server that was lost left more adapters than slots to the other one, which holds little with them: once it is
    back, each has as many as it has slots, and no server more is needed."""
    control = slotted(2, 2)
    load = np.array([300.0, 300.0, 250.0, 200.0, 60.0, 50.0, 30.0, 10.0])
    for at_s, ready in ((0.0, [True, True]), (60.0, [True, False]), (120.0, [True, True])):
        control.on |= np.array(ready)
        made = control.decide(at_s, Observation(load, 1200.0, 1200.0, np.array(ready)))
    assert [each.loads for each in made] == [4]
    assert [sum(map(bool, own.values())) for own in control.held] == [4, 4]
    assert control.caps([0, 1]).tolist() == [1000.0, 1000.0]
    assert control.missing == 0


@pytest.mark.parametrize("slots", [(4, 4), (5, 3)])
def test_a_loss_starts_as_many_servers_as_hold_all(slots: tuple[int, int]) -> None:
    """What a server holds with more adapters than slots says nothing of one that has its part of them."""
    control = slotted(8, 2)
    control.kinds[:] = [replace(KIND, max_loras=own) for own in (slots[0], *slots[1:] * 7)]
    control.decide(0.0, seen(1200.0, [True, True, *[False] * 6]))
    for at_s in (60.0, 120.0):
        control.decide(at_s, seen(1200.0, [True, *[False] * 7]))
        assert len(control.starting) == 1
        assert control.missing == 0


def test_what_servers_hold_is_that_of_their_own_mix() -> None:
    """A placement that the twin refuses leaves no trace in what servers hold: a server more would not be started."""
    control = keeper(3, 2)
    control.capacity.of = lambda _server, own: 1000.0 if len(own) <= 4 else 100.0  # type: ignore[method-assign]
    skewed = Observation(np.array([260.0, 60.0] * 4), 1280.0, 1280.0, np.array([True, True, False]))
    assert control.decide(0.0, skewed) == []
    assert control.caps([0, 1]).tolist() == [1000.0, 1000.0]


@pytest.mark.parametrize("seed", [22, 32, 45])
def test_what_servers_hold_is_that_of_the_placement_that_is_made(seed: int) -> None:
    """Of several placements that are judged for one decision, the last one counts, for all servers."""
    rng = np.random.default_rng(seed)
    control, load = slotted(3, 3), rng.exponential(300.0, 8)
    control.capacity.of = lambda _server, own: 1000.0 if len(own) < 4 else 200.0 + 100.0 * (len(own) % 3)  # type: ignore[method-assign]
    control.held = [{a: 1.0 for a, s in enumerate(rng.integers(3, size=8)) if s == k} for k in range(3)]
    assert control.decide(0.0, Observation(load, load.sum(), load.sum(), np.ones(3, dtype=bool)))
    wanted = [control.capacity.of(s, load_of(own, load)) for s, own in enumerate(control.held)]
    assert control.caps(range(3)).tolist() == wanted


def test_a_server_with_too_many_adapters_keeps_no_other_one_overloaded() -> None:
    """Where moving adapters beyond slots helps nobody, an overloaded server gives load to any other one."""
    control = slotted(3, 3)
    control.capacity.of = lambda _server, own: 1000.0 if len(own) <= 4 else 600.0  # type: ignore[method-assign]
    control.held, control.refused = (
        [dict.fromkeys(range(5), 1.0), {5: 1.0}, {6: 1.0, 7: 1.0}],
        {(1, a) for a in range(8)},
    )
    load = np.array([5.0, 5.0, 5.0, 5.0, 5.0, 200.0, 600.0, 500.0])
    assert control.decide(0.0, Observation(load, 1325.0, 1325.0, np.ones(3, dtype=bool)))
    assert control.held[0].keys() > set(range(5))


def test_an_overload_that_no_other_server_can_relieve_is_said() -> None:
    """Adapters of a rank that the others' slots do not take stay on a server that holds less than their load: that is
    said, and not that a server could be stopped, although all servers together hold more than enough."""
    small = keeper(3, 2)
    adapters = tuple(replace(each, rank=8 if k % 2 else 32) for k, each in enumerate(FLEET.adapters))
    control = Keeper(
        replace(FLEET, adapters=adapters),
        [replace(KIND, max_lora_rank=32), KIND, KIND], small.held, np.array([True, True, True]),
    )  # fmt: skip
    control.capacity.of = lambda server, load: 1000.0  # type: ignore[method-assign]
    load = np.array([350.0, 10.0] * 4)
    for at_s in range(0, 1800, 60):
        control.decide(float(at_s), Observation(load, 1440.0, 1440.0, np.ones(3, dtype=np.bool_)))
    assert control.waiting == "a server has 140% of what it holds, and no other one can take more"
