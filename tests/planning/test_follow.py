"""A plan from running servers has no more GPUs than one without them, and moves few adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

import packer
from packer import Adapter, Bin, Lengths, Workload
from packer.errors import IncompatibleError
from packer.moves import aligned, moved
from packer.plan import Plan, Status
from packer.planning.follow import REPAIRS, homeward, nearby, refitted, running
from packer.planning.kept import KeptHours
from packer.profile import Profile
from packer.twin.hours import Hours

LONG = Lengths.constant(500), Lengths.constant(460)  # Lengths with which few requests fill a server.


@pytest.fixture(scope="module")
def busy() -> Workload:
    """Adapters that take two servers."""
    rates = np.random.default_rng(5).gamma(1.0, 0.3, 44) + 0.02
    return Workload([Adapter(f"a{k}", (8, 16)[k % 2], rate, *LONG) for k, rate in enumerate(rates.tolist())])


@pytest.fixture(scope="module")
def old(busy: Workload, server: Profile) -> Plan:
    """Their running plan."""
    return packer.recommend(busy, server)


def test_running_servers_that_hold_stay(busy: Workload, old: Plan, server: Profile) -> None:
    """Rates that differ a little and one newcomer: the servers stay, nothing moves, and the decision says so."""
    noise = np.random.default_rng(1).uniform(0.9, 1.1, len(busy)).tolist()
    adapters = [replace(a, rate=a.rate * x) for a, x in zip(busy.adapters, noise, strict=True)]
    new = replace(busy, adapters=(*adapters, Adapter("new", 8, 0.1)))
    plan, free = packer.recommend(new, server, old_plan=old), packer.recommend(new, server)
    assert (plan.status, plan.verified) == (Status.FEASIBLE, True)
    assert plan.n_gpus <= free.n_gpus
    assert plan.moves is not None
    assert plan.moves.adapters == ()
    assert plan.decision.startswith(f"{plan.n_gpus} GPUs hold, 0 moved: {plan.n_gpus} × H100")


def test_a_plan_for_another_objective_says_that_it_breaks_the_goal(server: Profile) -> None:
    """GPUs of a plan that keeps no limits serve the load; where that breaks the fleet's goal, the decision says so."""
    fleet = Workload([Adapter("a", 8, 0.1)])
    running = packer.solve(fleet, server, with_headroom=False)
    plan = packer.solve(fleet.held_to("p95_ttft_ms=1"), server, old_plan=running)
    assert plan.decision == f"1 GPU serves the load, 0 moved; this breaks the goal: {plan.workload.slo}."
    assert packer.solve(fleet, server, old_plan=running).decision == "1 GPU serves the load, 0 moved."


def test_a_plan_for_an_objective_says_whether_a_goal_holds(server: Profile) -> None:
    """The first line of a plan for an objective names its servers, and the goal that it keeps or the load that it
    serves; one that does not hold claims nothing."""
    fleet = Workload([Adapter("a", 8, 0.1)])
    kept = packer.solve(fleet, server, "slo:mean_ttft_ms=500").decision.splitlines()
    assert re.fullmatch(r"1 × H100 64GB \(.*\): the goal holds to (about|over) \+\d+ %, \$2\.50 per hour\.", kept[0])
    assert kept[1:] == ["The goal: mean TTFT <= 500 ms for every adapter."]
    served = packer.solve(fleet.held_to("p95_ttft_ms=1"), server, with_headroom=False)
    lead = f"{served.hardware}: the load is served, $2.50 per hour"
    assert served.decision == f"{lead}; this breaks the goal: {served.workload.slo}."
    assert packer.solve(fleet, server, with_headroom=False).decision == f"{lead}."
    assert packer.solve(Workload([Adapter("a", 8, 1e4)]), server, with_headroom=False).decision == ""


def test_a_spare_gpu_stays_unless_it_is_given_up(server: Profile) -> None:
    """A plan that follows one with a spare GPU has one, too, also of several kinds, unless told otherwise."""
    fleet = Workload([Adapter("a", 8, 0.1), Adapter("b", 8, 0.1)])
    old = packer.recommend(fleet, server, spare=1)
    plans = [packer.recommend(fleet, server, old_plan=old, spare=spare) for spare in (None, 0)]
    assert [(plan.spare, plan.n_gpus) for plan in (old, *plans)] == [(1, 2), (1, 2), (0, 1)]
    kinds = packer.recommend(fleet, [server, replace(server, name="other/name")], spare=1)
    assert (kinds.spare, kinds.n_gpus) == (1, 2)


def test_fewer_gpus_go_before_fewer_moves(busy: Workload, old: Plan, server: Profile) -> None:
    """Once less is to be served, servers are closed as in a plan made without them; what stays keeps its place."""
    assert old.n_gpus > 1
    few = busy.subset(range(4))
    plan = packer.recommend(few, server, old_plan=old)
    assert plan.n_gpus == packer.recommend(few, server).n_gpus == 1
    assert plan.moves is not None
    assert 0 < len(plan.moves.adapters) < len(few)


def test_no_more_adapters_move_than_in_a_plan_made_without_the_servers(
    busy: Workload, old: Plan, server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan near the running servers is not taken if the one made without them, matched to them, moves fewer."""
    one, other = old.bins
    names = {one.adapters[-1]: other.adapters[-1], other.adapters[-1]: one.adapters[-1]}
    exchanged = [item.under({i: names.get(i, i) for i in item.adapters}) for item in old.bins]
    monkeypatch.setattr("packer.planning.recommend.nearby", lambda *_: [exchanged])
    plan = packer.recommend(busy, server, old_plan=old)
    assert plan.status is Status.FEASIBLE
    assert plan.moves is not None
    assert plan.moves.adapters == ()


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_candidates_have_every_adapter_once(servers: int, busy: Workload, server: Profile) -> None:
    """Newcomers, adapters of closed servers and those that a server gives away have a place on one of the servers."""
    old = [Bin(tuple(part), server.settings(4, 8), server) for part in (range(10), range(10, 30))]
    found = list(nearby(busy, old, servers, lambda item: item.offered_tok_s(busy) < 2000.0))
    assert 2 <= len(found) <= 2 + REPAIRS
    for bins in found:
        assert sorted(i for item in bins for i in item.adapters) == list(range(len(busy)))
        assert len(bins) <= max(1, servers)
        assert all(item.max_lora_rank == 16 for item in bins)
    assert found[0][0].adapters[:10] == tuple(range(10)) or servers == 1
    assert aligned(old, found[0][::-1]) == found[0]


def test_what_a_server_cannot_carry_goes_to_those_that_can(server: Profile) -> None:
    """A server that holds less load than others, since it has more adapters, is not given the rest again: the others
    take it, and what they hold moves no further."""
    rates = [0.5] * 4 + [0.1] * 20
    fleet = Workload([Adapter(f"a{k}", 8, rate) for k, rate in enumerate(rates)])
    old = [Bin(tuple(part), server.settings(4, 8), server) for part in (range(4), range(4, 24))]
    *_, last = nearby(fleet, old, 2, lambda item: len(item.adapters) <= 16)
    assert sorted(i for item in last for i in item.adapters) == list(range(24))
    assert all(len(item.adapters) <= 16 for item in last)
    assert set(range(4)) <= set(last[0].adapters)
    assert len(last[1].adapters) == 16


def test_a_running_plan_on_other_servers_is_refused(busy: Workload, server: Profile) -> None:
    """Servers of another kind can't be continued, and a plan without servers gives nothing to stay close to."""
    old = packer.recommend(busy.subset(range(3)), server)
    other = packer.load_profile("h100-64gb/qwen-2.5-7b-instruct")
    with pytest.raises(IncompatibleError, match="one kind"):
        packer.recommend(replace(busy), other, old_plan=old)
    tight = replace(server, engine=replace(server.engine, max_num_seqs=64))
    with pytest.raises(IncompatibleError, match="one kind"):
        packer.recommend(busy, [server, tight], old_plan=old)
    with pytest.raises(IncompatibleError, match="no GPUs"):
        running(replace(old, bins=()), busy)


def test_a_plan_that_cannot_start_from_the_running_one_says_so(busy: Workload, old: Plan, server: Profile) -> None:
    """On other servers every adapter moves and every server is new: the plan has a reason, and these moves."""
    other = replace(server, engine=replace(server.engine, max_num_seqs=64))
    plan = packer.solve(busy, other, old_plan=old)
    assert plan.reasons[-1] == "Planned without the running servers: the running plan has GPUs of another type."
    assert plan.moves is not None
    assert plan.moves.adapters == tuple(range(len(busy)))
    assert set(plan.moves.servers) == {None}
    greedy = packer.solve(busy, server, solver="greedy", old_plan=old).moves
    assert greedy is not None
    assert 0 in greedy.servers


@pytest.mark.parametrize("solver", [None, "replan"])
def test_servers_keep_the_numbers_of_the_running_plan(
    solver: str | None, busy: Workload, old: Plan, server: Profile
) -> None:
    """Where every adapter of the first server is gone, the others go on under their own numbers."""
    left = sorted(set(range(len(busy))) - set(old.bins[0].adapters))
    fleet = busy.subset(left)
    plan = (
        packer.recommend(fleet, server, old_plan=old)
        if solver is None
        else packer.solve(fleet, server, solver=solver, old_plan=old)
    )
    assert plan.moves is not None
    assert 0 not in plan.moves.servers
    for k, j in enumerate(plan.moves.servers):
        now = {plan.workload.names[i] for i in plan.bins[k].adapters}
        assert j is None or now & {busy.names[i] for i in old.bins[j].adapters}


def test_a_rank_that_grows_while_servers_are_added(busy: Workload, old: Plan, server: Profile) -> None:
    """An adapter whose rank no slot of its running server takes gets larger slots, also where it takes more servers."""
    adapters = [
        replace(each, rank=64 if k == 3 else each.rank, rate=2.0 * each.rate) for k, each in enumerate(busy.adapters)
    ]
    plan = packer.recommend(replace(busy, adapters=tuple(adapters)), server, old_plan=old)
    assert plan.status is Status.FEASIBLE
    assert plan.n_gpus > old.n_gpus
    (home,) = [item for item in plan.bins if 3 in item.adapters]
    assert home.max_lora_rank == 64


def test_servers_without_room_exchange_adapters(server: Profile) -> None:
    """Where no other server has room for what one can't carry, it gives an adapter for a lighter one, and no other
    adapter moves; of servers that are split, or whose slots are too small, nothing is exchanged."""
    rates = (0.6, 0.5, 0.5, 0.42, 0.45, 0.47)
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)])
    old = [Bin((k, k + 1), server.settings(2, 8), server) for k in (0, 2, 4)]
    most = 1.03 / fleet.rate * fleet.offered_tok_s

    def holds(item: Bin) -> bool:
        return item.offered_tok_s(fleet) <= most

    assert [holds(item) for item in old] == [False, True, True]
    found = [bins for bins in nearby(fleet, old, 3, holds) if all(map(holds, bins))]
    assert found
    moved = {i for item, was in zip(found[0], old, strict=True) for i in {*item.adapters} - {*was.adapters}}
    assert len(moved) == 2
    large = replace(fleet, adapters=(replace(fleet.adapters[0], rank=64), *fleet.adapters[1:]))
    wider = [replace(old[0], settings=server.settings(2, 64)), *old[1:]]
    kept = [bins for bins in nearby(large, wider, 3, holds) if all(map(holds, bins))]
    assert all(0 in bins[0].adapters for bins in kept)


def test_a_server_that_goes_on_keeps_its_settings_if_they_suffice(busy: Workload, old: Plan, server: Profile) -> None:
    """Where adapters leave, or come to slots that suffice for all, no running server starts again; one whose slots
    would break the goal with those that come does, and the decision counts it."""
    few = busy.subset(sorted(np.argsort(busy.rates)[6:].tolist()))
    more = replace(busy, adapters=(*busy.adapters, *(Adapter(f"new-{k}", 8, 0.001) for k in range(6))))
    for fleet in (few, more):
        plan = packer.recommend(fleet, server, old_plan=old)
        assert plan.n_gpus == old.n_gpus
        assert [item.settings for item in plan.bins] == [item.settings for item in old.bins]
        assert plan.decision.startswith(f"{plan.n_gpus} GPUs hold, 0 moved: ")
    tight = tuple(item.with_slots(1) for item in old.bins)
    plan = packer.recommend(busy, server, old_plan=replace(old, bins=tight))
    assert min(item.max_loras for item in plan.bins) > 1
    assert f" 0 moved, {old.n_gpus} restarted: " in plan.decision


def test_only_servers_that_break_the_goal_get_other_settings(server: Profile) -> None:
    """Of the servers that go on, the first proposal changes those that break the limits with their own settings."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.2) for k in range(40)])
    kept = KeptHours(fleet, fleet, 0, Hours())
    old = [Bin(tuple(range(20)), server.settings(16, 16), server), Bin((20,), server.settings(1, 16), server)]
    bins = [old[0].with_slots(20), Bin(tuple(range(20, 40)), server.settings(20, 16), server)]
    first, second = refitted(kept, old, bins, lambda: False)
    assert first[0].settings == old[0].settings
    assert first[1].max_loras > 1
    assert [item.adapters for item in first] == [item.adapters for item in second]
    assert second[0].max_loras == 20


def test_an_adapter_too_hot_for_one_server_is_spread_and_others_stay(server: Profile) -> None:
    """An adapter whose rate grows beyond what a server carries gets parts on running and new servers: it alone moves;
    when it grows further, its shares follow without a move while its servers hold."""
    rates = (2.0 / np.arange(1, 13)).tolist()
    fleet = Workload([Adapter(f"a{k}", (16, 8)[k % 2], rate, *LONG) for k, rate in enumerate(rates)])
    old = packer.recommend(fleet, server)
    hot = replace(fleet, adapters=(replace(fleet.adapters[0], rate=12.5), *fleet.adapters[1:]))
    plan, free = packer.recommend(hot, server, old_plan=old), packer.recommend(hot, server)
    assert (plan.status, plan.verified) == (Status.OPTIMAL, True)
    assert plan.n_gpus <= free.n_gpus
    assert plan.moves is not None
    assert plan.moves.adapters == (0,)
    assert plan.moves.servers[: old.n_gpus] == tuple(range(old.n_gpus))
    assert sum(0 in item.adapters for item in plan.bins) > 1
    hotter = replace(fleet, adapters=(replace(fleet.adapters[0], rate=12.8), *fleet.adapters[1:]))
    again = packer.recommend(hotter, server, old_plan=plan)
    assert again.n_gpus == plan.n_gpus
    assert again.moves is not None
    assert again.moves.adapters == ()


@pytest.mark.parametrize(("servers", "most"), [(2, 64), (3, 64), (5, 64), (5, 2)])
def test_spread_adapters_get_all_of_their_requests(servers: int, most: int, busy: Workload, server: Profile) -> None:
    """Every candidate has every adapter, with shares that sum to 1; a hot one is on at most as many servers as are
    allowed, also where it was alone on its server, and with parts before on a server that closes."""
    shares = (0.5, *(1.0,) * 20)
    old = [
        Bin((0,), server.settings(1, 8), server),
        Bin((1, *range(2, 22)), server.settings(4, 16), server, shares),
        Bin((1, *range(22, 42)), server.settings(4, 16), server, shares),
    ]
    hot = replace(busy, adapters=(*(replace(a, rate=40.0) for a in busy.adapters[:2]), *busy.adapters[2:]))
    most_tok_s = hot.offered_tok_s / servers * 1.05
    found = list(nearby(hot, old, servers, lambda item: item.offered_tok_s(hot) < most_tok_s, {0: 2, 1: 2}, most))
    for bins in found:
        assert len(bins) <= servers
        total = np.zeros(len(hot))
        for item in bins:
            total[list(item.adapters)] += item.shares
        assert total == pytest.approx(np.ones(len(hot)))
        assert max(sum(i in item.adapters for item in bins) for i in (0, 1)) <= most
    full = [max(item.offered_tok_s(hot) for item in bins) for bins in found]
    assert most < servers or min(full) < most_tok_s


def test_a_hot_adapter_stays_where_it_is_and_is_joined_by_the_idlest_server(server: Profile) -> None:
    """An adapter to spread keeps its own server, though others have less load, and the next is the one with the least;
    of several, the hottest is spread first, and the others see its load."""
    fleet = Workload([Adapter(f"a{k}", 8, rate, *LONG) for k, rate in enumerate((6.0, 4.0, 3.0, 1.0, 2.0))])

    def spread(parts: dict[int, int], *held: tuple[int, ...]) -> list[dict[int, float]]:
        old = [Bin(own, server.settings(4, 8), server) for own in held]
        first = next(nearby(fleet, old, 3, lambda _: True, parts))
        return [dict(zip(item.adapters, (round(share, 2) for share in item.shares), strict=True)) for item in first]

    assert spread({0: 2}, (0, 1, 4), (2,), (3,)) == [{1: 1.0, 4: 1.0, 0: 0.08}, {2: 1.0}, {3: 1.0, 0: 0.92}]
    assert spread({1: 2, 0: 2}, (0, 1), (2,), (3, 4)) == [
        {0: 0.75, 1: 0.31},
        {2: 1.0, 0: 0.25},
        {3: 1.0, 4: 1.0, 1: 0.69},
    ]


@pytest.mark.parametrize("plan", [packer.recommend, packer.solve])
def test_a_server_without_lora_starts_again_for_its_first_adapter(plan: Callable[..., Plan], server: Profile) -> None:
    """A running server of the base model alone has slots once it holds an adapter, and goes on as it is until then."""
    base = Workload([Adapter("base", 0, 1.0)])
    old = plan(base, server)
    off = replace(old, bins=tuple(replace(item, settings=server.settings(0, 8)) for item in old.bins))
    assert plan(base.scaled(1.1), server, old_plan=off).bins == off.bins
    (found,) = plan(replace(base, adapters=(*base.adapters, Adapter("first", 8, 0.5))), server, old_plan=off).bins
    assert (found.adapters, found.max_loras > 0) == ((0, 1), True)


def test_moved_adapters_go_back_as_far_as_servers_hold_them(server: Profile) -> None:
    """Light adapters that a new plan moves are put back first; servers that hold no more keep the heavy ones, an
    adapter whose rank does not fit stays, and no server is left without one."""
    ranks = [8] * 19 + [32]
    fleet = Workload([Adapter(f"a{k}", rank, 0.01 + 0.05 * k) for k, rank in enumerate(ranks)])

    def servers(*parts: Sequence[int]) -> list[Bin]:
        return [Bin(tuple(part), server.settings(4, max(ranks[i] for i in part)), server) for part in parts]

    old, bins = servers(range(10), range(10, 20)), servers(range(0, 20, 2), range(1, 20, 2))
    assert homeward(fleet, old, bins, lambda _: False) == bins
    for most, away in ((20, {9}), (11, set(range(20)))):
        found = homeward(fleet, old, bins, lambda item, most=most: len(item.adapters) <= most)  # type: ignore[misc]
        assert sorted(i for item in found for i in item.adapters) == list(range(20))
        assert len(moved(old, found)) < len(moved(old, bins))
        assert set(moved(old, found)) <= away
    exchanged = servers(range(10, 20), range(10))
    assert homeward(fleet, old, exchanged, lambda _: True) == exchanged
    low = servers([*range(0, 18, 2), 19], [*range(1, 19, 2), 18])
    assert moved(old, homeward(fleet, old, low, lambda _: True)) == [19]
