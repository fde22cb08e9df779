"""Routers that need no state of the servers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from packer import registry
from packer.adapter import Adapter
from packer.cluster import Cluster, ServerKind
from packer.errors import ValidationError
from packer.profile import Profile
from packer.twin.cluster.candidates import Candidates, candidates_of
from packer.workload import Workload

STATIC = ("random", "round-robin", "hrw", "plan")


@pytest.fixture
def fleet() -> Workload:
    """Six adapters, two of them of rank 64."""
    return Workload([Adapter(f"a{i}", 64 if i in (2, 5) else 8, 1.0) for i in range(6)])


@pytest.fixture
def mixed(toy_profile: Profile) -> Cluster:
    """Three servers, of which the last alone takes rank 64; a0 is split 1 : 3 over the first two."""
    kinds = (ServerKind("small", toy_profile, 4, 8), ServerKind("large", toy_profile, 4, 64))
    placement = ({"a0": 0.25, "a1": 1.0}, {"a0": 0.75, "a3": 1.0}, {"a2": 1.0, "a4": 1.0, "a5": 1.0})
    return Cluster(kinds, ("small", "small", "large"), placement)


def _routed(router: str, cluster: Cluster, fleet: Workload, adapter: list[int], seed: int = 0) -> list[int]:
    candidates = candidates_of(cluster, fleet, [cluster.kind(s).max_lora_rank or 64 for s in range(len(cluster))])
    found = registry.make("router", router).assign(np.array(adapter), fleet, candidates, seed)
    servers: list[int] = found.tolist()
    return servers


@pytest.mark.parametrize("router", STATIC)
def test_only_servers_that_may_serve_the_adapter(router: str, mixed: Cluster, fleet: Workload) -> None:
    """No request goes to a server outside the placement, or whose slots are too small."""
    adapter = np.random.default_rng(0).integers(6, size=500).tolist()
    assert mixed.placement is not None
    for a, server in zip(adapter, _routed(router, mixed, fleet, adapter), strict=True):
        assert f"a{a}" in mixed.placement[server]


def test_round_robin_takes_servers_in_turn(toy_profile: Profile, fleet: Workload) -> None:
    """With equal servers the k-th request goes to server k mod n, whatever its adapter."""
    cluster = Cluster.of(toy_profile, 3, max_loras=4, max_lora_rank=64)
    assert _routed("round-robin", cluster, fleet, [5, 0, 0, 3, 3, 3, 2]) == [0, 1, 2, 0, 1, 2, 0]


def test_random_is_uniform_and_seeded(toy_profile: Profile, fleet: Workload) -> None:
    """Each server gets its share within four standard errors; the seed decides."""
    cluster = Cluster.of(toy_profile, 4, max_loras=4, max_lora_rank=64)
    found = _routed("random", cluster, fleet, [0] * 40_000)
    for count in Counter(found).values():
        assert abs(count - 10_000) < 4 * np.sqrt(40_000 * 0.25 * 0.75)
    assert found == _routed("random", cluster, fleet, [0] * 40_000)
    assert found != _routed("random", cluster, fleet, [0] * 40_000, seed=1)


def test_hrw_keeps_adapters_when_a_server_leaves(toy_profile: Profile) -> None:
    """Adapters have one home; removing the last server moves only its own adapters."""
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(2000)])
    homes = [_routed("hrw", Cluster.of(toy_profile, n, max_loras=4), fleet, list(range(2000))) for n in (5, 4)]
    moved = [before for before, after in zip(*homes, strict=True) if before != after]
    assert set(moved) == {4}
    for count in Counter(homes[0]).values():
        assert abs(count - 400) < 4 * np.sqrt(2000 * 0.2 * 0.8)


def test_plan_follows_shares_smoothly(mixed: Cluster, fleet: Workload) -> None:
    """Replicas get their shares in every prefix, as smooth weighted round robin has it: 1 of 4 and 3 of 4."""
    found = _routed("plan", mixed, fleet, [0] * 12)
    assert found == [1, 0, 1, 1] * 3
    assert _routed("plan", mixed, fleet, [1, 2, 3, 4, 5]) == [0, 2, 1, 2, 2]


def test_plan_needs_a_placement(toy_profile: Profile, fleet: Workload) -> None:
    """Router "plan" refuses a cluster in which every server may serve every adapter, and says why."""
    reason = registry.make("router", "plan").supports(Cluster.of(toy_profile, 2, max_loras=4), fleet)
    assert "no placement" in reason


def test_an_adapter_that_no_server_may_serve(toy_profile: Profile, fleet: Workload) -> None:
    """The adapter is named."""
    cluster = Cluster.of(toy_profile, 2, max_loras=4, max_lora_rank=8)
    with pytest.raises(ValidationError, match=r"none may serve 'a2' \(rank 64\)"):
        candidates_of(cluster, fleet, [8, 8])


def test_a_placement_of_another_fleet_is_named_as_such(mixed: Cluster, fleet: Workload) -> None:
    """Whoever gives the plan of another fleet learns that, and how many adapters differ; of a larger fleet, which
    adapter the placement lacks."""
    with pytest.raises(ValidationError, match=r"got one of another: the workload lacks 2 of its 6 adapters, as 'a0'"):
        candidates_of(mixed, fleet.subset((1, 2, 3, 4)), [8, 8, 64])
    larger = Workload([*fleet.adapters, Adapter("new", 16, 1.0)])
    with pytest.raises(ValidationError, match=r"the placement has none for 'new' \(rank 16\)"):
        candidates_of(mixed, larger, [8, 8, 64])


def test_candidates_form_groups(mixed: Cluster, fleet: Workload) -> None:
    """Adapters with the same servers share a group, and shares stand beside the servers."""
    found: Candidates = candidates_of(mixed, fleet, [8, 8, 64])
    assert found.of(0).tolist() == [0, 1]
    assert found.of(5).tolist() == [2]
    assert found.group[2] == found.group[4] == found.group[5]
    k = found.group[0]
    assert found.share[found.start[k] : found.start[k + 1]].tolist() == [0.25, 0.75]
