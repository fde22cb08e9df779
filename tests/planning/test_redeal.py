"""Servers that break the goal by chance get other adapters, and all adapters keep a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.planning.kept import Hour, KeptHours
from packer.planning.redeal import NEAR, _hottest, dealt_anew
from packer.profile import Profile
from packer.twin.hours import Hours
from packer.workload import Workload


class _Unlucky(KeptHours):
    """Hours in which a server breaks its limits if it holds both adapters of one of the pairs."""

    pairs: Sequence[set[int]] = ()
    by = 1.1

    def used(self, bins: Sequence[Bin], *_: object, **__: object) -> list[float]:
        return [self.by if any(pair <= {*item.adapters} for pair in self.pairs) else 0.8 for item in bins]


def _plan(server: Profile, n: int, each: int) -> tuple[Workload, list[Bin]]:
    rates = np.random.default_rng(n).lognormal(-3.0, 1.0, n * each)
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates.tolist())])
    parts = [tuple(range(k * each, (k + 1) * each)) for k in range(n)]
    return fleet, [Bin(part, server.settings(each, 8), server) for part in parts]


def _hours(fleet: Workload, *pairs: set[int]) -> _Unlucky:
    kept = _Unlucky(fleet, fleet, 1, Hours())
    kept.pairs = pairs
    return kept


def test_a_server_that_breaks_its_limits_deals_with_another_one(server: Profile) -> None:
    """All adapters keep a place, with a slot each where they had one; the two servers get equal loads, others stay."""
    fleet, bins = _plan(server, 6, 40)
    kept = _hours(fleet, {3, 7})
    hours: list[Hour] = [(fleet, 1)]
    made = dealt_anew(kept, [bins], hours, lambda: False)
    assert made is not None
    assert max(kept.used(made)) <= 1.0
    assert sorted(i for item in made for i in item.adapters) == list(range(len(fleet)))
    new = [item for item in made if item not in bins]
    loads = [item.offered_tok_s(fleet) for item in new]
    assert len(new) == 2
    assert max(loads) < 1.2 * min(loads)
    assert all(item.max_loras == len(item.adapters) for item in made)
    assert dealt_anew(kept, [bins], hours, lambda: False) == made


def test_servers_keep_their_kind_when_adapters_are_dealt_anew(server: Profile) -> None:
    """Two servers of unlike kinds do not pool their adapters, of which each would get half: one gives some away."""
    fleet, bins = _plan(server, 3, 8)
    kinds = [replace(server, name=name) for name in ("broken", "a", "b")]
    bins = [replace(item, profile=kind) for item, kind in zip(bins, kinds, strict=True)]
    pair = {int(fleet.rates[:8].argmax()), int(fleet.rates[:8].argmin())}
    made = dealt_anew(_hours(fleet, pair), [bins], [(fleet, 1)], lambda: False)
    assert made is not None
    assert [item.profile for item in made] == kinds


def test_the_plan_with_the_fewest_such_servers_is_dealt_anew(server: Profile) -> None:
    """A plan with none is taken as it is."""
    fleet, bins = _plan(server, 6, 40)
    other = bins[::-1]
    kept = _hours(fleet, {3, 7})
    mixed = dealt_anew(kept, [bins], [(fleet, 1)], lambda: False)
    assert mixed is not None
    assert dealt_anew(kept, [other, mixed], [(fleet, 1)], lambda: False) == mixed


@pytest.mark.parametrize(("broken", "by"), [(3, 1.1), (1, NEAR)])
def test_servers_that_carry_too_much_are_not_dealt_anew(server: Profile, broken: int, by: float) -> None:
    """Where many servers break their limits, or one by much, there are too few of them."""
    fleet, bins = _plan(server, 6, 40)
    kept = _hours(fleet, *({40 * k, 40 * k + 1} for k in range(broken)))
    kept.by = by
    assert dealt_anew(kept, [bins], [(fleet, 1)], lambda: False) is None


def test_no_deal_is_made_once_the_time_is_over(server: Profile) -> None:
    """The plans stay as they are."""
    fleet, bins = _plan(server, 6, 40)
    assert dealt_anew(_hours(fleet, {3, 7}), [bins], [(fleet, 1)], lambda: True) is None


class _Loaded(KeptHours):
    """Hours in which a server uses its load, as a share of 1,000 tok/s, of its limits."""

    def used(self, bins: Sequence[Bin], *_: object, **__: object) -> list[float]:
        return [item.offered_tok_s(self.workload) / 1000.0 for item in bins]


@pytest.mark.parametrize(("copies", "held"), [(1, None), (2, [{0: 0.875}, {1: 1.0, 0: 0.125}])])
def test_an_adapter_alone_on_its_server_gets_no_copies_beyond_those_allowed(
    server: Profile, copies: int, held: list[dict[int, float]] | None
) -> None:
    """A server with one adapter has no other to give: it gives a part only if the adapter may have another copy."""
    tokens = float(Workload([Adapter("a", 8, 1.0)]).mean_tokens[0])
    fleet = Workload([Adapter("hot", 8, 1100.0 / tokens), Adapter("calm", 8, 300.0 / tokens)])
    bins = [Bin((i,), server.settings(1, 8), server) for i in range(2)]
    made = dealt_anew(_Loaded(fleet, fleet, 1, Hours()), [bins], [Hour(fleet, 1)], lambda: False, copies)
    assert (made and [dict(zip(item.adapters, item.shares, strict=True)) for item in made]) == held


@pytest.mark.parametrize(
    ("copies", "held"),
    [
        (1, [{0: 1.0, 4: 1.0}, {2: 1.0, 1: 1.0}, {3: 1.0}]),
        (2, [{0: 0.75, 1: 1.0, 4: 1.0}, {2: 1.0, 0: 0.25}, {3: 1.0}]),
    ],
)
def test_a_server_gives_part_of_a_hot_adapter_away(server: Profile, copies: int, held: list[dict[int, float]]) -> None:
    """Servers that cannot divide all their adapters anew may divide one: the smallest part of the hottest one that
    suffices goes to the server with the most room; a whole adapter goes if it may have no copies."""
    loads, ranks = (700.0, 330.0, 500.0, 990.0, 100.0), (8, 8, 16, 16, 8)
    tokens = float(Workload([Adapter("a", 8, 1.0)]).mean_tokens[0])
    fleet = Workload(
        [Adapter(f"a{i}", rank, load / tokens) for i, (rank, load) in enumerate(zip(ranks, loads, strict=True))]
    )
    bins = [
        Bin(part, server.settings(len(part), rank), server) for part, rank in (((0, 1, 4), 8), ((2,), 16), ((3,), 16))
    ]
    made = dealt_anew(_Loaded(fleet, fleet, 1, Hours()), [bins], [Hour(fleet, 1)], lambda: False, copies)
    assert made is not None
    assert [dict(zip(item.adapters, item.shares, strict=True)) for item in made] == held
    assert [item.max_loras for item in made] == [len(each) for each in held]


@pytest.mark.parametrize(("rank", "order"), [(8, [2, 0, 1]), (16, [1, 2, 0])])
def test_adapters_that_need_larger_slots_are_given_away_last(server: Profile, rank: int, order: list[int]) -> None:
    """The slots of the other server stay as small as they are if another hot adapter suffices."""
    fleet = Workload([Adapter(f"a{rate}", 16 if rate == 3 else 8, rate) for rate in (1, 3, 2, 4)])
    one, other = Bin((0, 1, 2), server.settings(3, 16), server), Bin((3,), server.settings(1, rank), server)
    assert _hottest(fleet, one, other) == order
