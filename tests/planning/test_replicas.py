"""Split adapters have as many parts as the GPUs they are spread over are of use for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import packer
from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts
from packer.bin import Bin
from packer.cluster import Cluster
from packer.planning.explore import Frontier
from packer.planning.kept import KeptHours
from packer.planning.replicas import MOST_REPLICAS, Replicas, hot_alone, least_parts, needed
from packer.planning.starving import PlannedHours
from packer.profile import Profile
from packer.sessions import Sessions
from packer.twin.hours import Hours
from packer.twin.parts import MOST_PARTS, parts_s
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload


@pytest.mark.parametrize("rates", [(60.0, 0.1), (1.0, 1.0, 1.0), (500.0,), (3.0, 2.0, 1.0)])
@pytest.mark.parametrize("parts", [{}, {0: 3}, {0: None}])
@pytest.mark.parametrize("allowed", [None, 8])
def test_every_gpu_has_a_part(rates: tuple[float, ...], parts: dict[int, int | None], allowed: int | None) -> None:
    """Up to the most GPUs of use there is a part for each, beyond it there is not."""
    fleet = Workload([Adapter(f"a{k}", 8, rate) for k, rate in enumerate(rates)])
    replicas = Replicas(fleet, parts)
    most = replicas.most_gpus(allowed)
    assert len(fleet) <= most
    for n in range(1, most + 1):
        assert len(replicas.spread_over(n, allowed).fleet) >= min(n, len(fleet))
    assert len(replicas.spread_over(most, allowed).fleet) == most
    assert len(replicas.spread_over(most + 1, allowed).fleet) < most + 1


@pytest.mark.parametrize("parts", [{}, {1: 2, 3: 3}, {1: 2, 2: None}])
@pytest.mark.parametrize("allowed", [None, 4])
def test_hot_adapters_have_servers_of_their_own(
    server: Profile, parts: dict[int, int | None], allowed: int | None
) -> None:
    """Each part has a server of its own, and each adapter all of its requests, on no more servers than there are."""
    fleet = Workload([Adapter(f"a{k}", 8, 1.0 + k) for k in range(4)])

    def placed(cool: Workload, n: int) -> list[Bin]:
        return [Bin(tuple(range(len(cool))), server.settings(1, 8), server)] if n else []

    for n in range(1, 30):
        found = list(hot_alone(fleet, server, parts, n, allowed, placed))
        fewest = sum(count for count in parts.values() if count) + 1
        assert len(found) == (bool(parts) and n >= fewest)
        for bins in found:
            shares: dict[int, list[float]] = {}
            for item in bins:
                for i, share in zip(item.adapters, item.shares, strict=True):
                    shares.setdefault(i, []).append(share)
            assert {i: sum(own) for i, own in shares.items()} == pytest.approx(dict.fromkeys(range(4), 1.0))
            assert all(len(shares[i]) >= count for i, count in parts.items() if count)
            hot = sum(count is not None for count in parts.values())
            assert len(bins) == min(n, 1 + hot * (allowed or MOST_REPLICAS))


def test_hot_adapters_of_far_ranks_take_the_servers_that_they_take_alone(server: Profile) -> None:
    """A goal on the ITL, which a large rank breaks at fewer tokens, does not cost a server."""
    lengths = {"input_tokens": packer.Lengths.gamma(mean=1500.0, cv=0.5)}
    lengths["output_tokens"] = packer.Lengths.gamma(mean=800.0, cv=1.0)
    fleet = Workload([Adapter("small", 8, 5.0), Adapter("large", 256, 1.75)], **lengths)
    job = Frontier(fleet.held_to("p95_ttft_ms=1000,mean_itl_ms=40"), server)
    assert job.parts.parts == {0: 2, 1: 2}
    assert job.at(4).holds
    for n in (4, 6):  # the solvers divide them by load, and then into no more parts than they need
        *by_load, fewest = job.proposed(n)
        assert by_load
        assert {share for item in fewest for share in item.shares} == {0.5}


def test_parts_of_adapters_with_long_names_have_names() -> None:
    """Two names that begin alike for 200 characters get parts of different names."""
    adapters = [Adapter("x" * 250 + end, 8, 1.0) for end in "ab"]
    found = Replicas(Workload(adapters), {0: 3, 1: 3}).fleet.names
    assert len(set(found)) == 6


@pytest.mark.usefixtures("whole_hours")
@pytest.mark.parametrize(
    ("shares", "arrivals", "hours"),
    [
        ((0.25,), Arrivals(), 4),
        ((0.5, 0.25), Arrivals(), 2),
        ((0.001,), Arrivals(), MOST_PARTS),
        ((0.5, 1.0), Arrivals(), 1),
        ((1.0,), Arrivals(), 1),
        ((0.25,), Arrivals("unpredictable"), 1),
        ((0.25,), Arrivals("bursty", common=Bursts(0.5, ((60.0, 1.0),))), 1),
    ],
)
def test_a_part_is_seen_for_as_long_as_the_adapter_has_requests(
    shares: tuple[float, ...], arrivals: Arrivals, hours: int, toy_profile: Profile
) -> None:
    """A server with a k-th of its adapters is simulated for k hours: as many requests as they have in one. One hour
    where another adapter is whole, and where hours differ, which all its servers see at once."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.05) for k in range(len(shares))], arrivals=arrivals)
    item = Bin(tuple(range(len(shares))), toy_profile.settings(1, 8), toy_profile, shares)
    assert (parts_s(item, item.workload(fleet)) or 3600.0) == hours * 3600.0
    (hour,) = Hours().all([item], fleet, requests=True)
    assert hour.ttft_ms is not None
    if arrivals == Arrivals() and hours < MOST_PARTS:
        sent = simulate(item.workload(fleet), toy_profile, max_loras=1, duration_s=3600.0 * hours).sent
        assert len(hour.ttft_ms) == pytest.approx(sent, abs=10)


@pytest.mark.usefixtures("whole_hours")
def test_a_hot_adapter_near_its_limit_takes_the_gpus_that_its_requests_need() -> None:
    """Prompts that use two thirds of the limit alone: the plan holds for its requests to all servers together, drawn at
    random, and so do hardly fewer. Servers held to the limit one by one took almost four times as many."""
    server = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    long = packer.Lengths.constant(30_000)
    fleet = packer.Workload([packer.Adapter("a", 8, 0.5, long, packer.Lengths.constant(100))])
    plan = packer.recommend(fleet, server)
    assert plan.status is packer.Status.FEASIBLE

    def used(n: int, seed: int) -> float:
        return packer.simulate_cluster(fleet, cluster(server, n), router="random", seed=seed).slo_used

    seeds = range(1, 7)
    assert sum(used(plan.n_gpus, seed) > 1.0 for seed in seeds) <= 1
    assert sum(used(plan.n_gpus - 2, seed) > 1.0 for seed in seeds) >= 5


def cluster(server: Profile, n: int) -> Cluster:
    """So many equal servers."""
    return Cluster.of(server, n, max_loras=1, max_lora_rank=8)


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """The traffic of every hour of a server that is simulated from here on."""
    seen: list[Workload] = []

    def counted(own: Workload, *given: Any, **more: Any) -> Run:
        seen.append(own)
        return simulate(own, *given, **more)

    for name in ("packer.twin.hours.UNCHECKED", "packer.planning.starving.simulate"):
        monkeypatch.setattr(name, counted)
    return seen


def kept_of(fleet: Workload, stop: Callable[[], bool] = lambda: False) -> KeptHours:
    """The first hour, of servers at the rates as given."""
    return KeptHours(fleet, fleet, 0, PlannedHours(0, stop))


def test_a_hot_adapter_has_as_many_parts_as_it_needs(toy_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of the user's, an adapter gets more than 64 parts where its load takes more."""
    monkeypatch.setattr("packer.twin.parts.HOUR_S", 10.0)
    fleet = Workload([Adapter("hot", 8, 11_000.0)])
    (parts,) = needed(kept_of(fleet), toy_profile, None).values()
    assert parts is not None
    assert parts > MOST_REPLICAS
    assert Replicas(fleet, {0: parts}).most_gpus(None) > parts
    assert needed(kept_of(fleet), toy_profile, parts - 2) == {0: None}


@pytest.mark.parametrize("more", [{}, {"arrivals": Arrivals("unpredictable")}, {"sessions": Sessions(turns=4)}])
def test_parts_that_are_far_too_large_are_not_simulated(
    more: dict[str, Any], toy_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of parts with more load than any server can serve is refused without a simulated hour."""
    fleet, seen = Workload([Adapter("hot", 8, 1e6)], **more), count_runs(monkeypatch)
    assert needed(kept_of(fleet), toy_profile, None) == {0: None}
    assert needed(kept_of(fleet), toy_profile, 2) == {0: None}
    assert not seen


@pytest.mark.parametrize("hours", [0, 1, 2])
def test_the_search_for_parts_ends_with_its_time(
    hours: int, toy_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the time is over no hour is simulated, and an adapter has the parts that its load takes or more."""
    monkeypatch.setattr("packer.twin.parts.HOUR_S", 10.0)
    fleet, seen = Workload([Adapter("hot", 8, 1000.0)]), count_runs(monkeypatch)
    found = needed(kept_of(fleet, lambda: len(seen) >= hours), toy_profile, None)
    assert len(seen) == hours
    assert found.keys() == {0}
    assert (found[0] or 0) >= least_parts(fleet, toy_profile, 0) > 1


def test_without_limits_no_idle_server_is_asked(toy_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests one at a time break no limit if there is none, and such a run of up to a day is not simulated."""
    monkeypatch.setattr(KeptHours, "lone", lambda *_: pytest.fail("simulated"))
    fleet = Workload([Adapter("a", 8, 60.0), Adapter("b", 8, 0.1)]).held_to("none")
    assert needed(kept_of(fleet), toy_profile, None) == {}
