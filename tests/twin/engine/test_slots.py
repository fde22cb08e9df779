"""Slots are kept as vLLM keeps them: once all are in use, an adapter that joins evicts others of the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import Profile
from packer.twin.engine.slots import exclude, include
from packer.twin.engine.state import IN_WALK, N_INTS, WALK, WALKERS, sizes_of
from packer.twin.simulate import simulate
from packer.twin.thrash import relief, thrashes
from packer.workload import Workload


def _fleet(n: int, rate: float) -> Workload:
    adapters = [Adapter(f"a{i}", 8, rate) for i in range(n)]
    return Workload(adapters, Lengths.constant(200), Lengths.constant(150))


@pytest.fixture(scope="module")
def profile() -> Profile:
    """A shipped server."""
    return load_profile("h100-64gb/llama-3.1-8b-instruct")


def test_saturated_slots_load_adapters_of_the_batch_again(profile: Profile) -> None:
    """With all slots in use most loads are of adapters that were evicted while their requests ran."""
    fleet = _fleet(96, 0.06)
    spares = replace(profile, loading=replace(profile.loading, spares_batch=True))
    as_vllm = simulate(fleet, profile, max_loras=16, duration_s=600)
    sparing = simulate(fleet, spares, max_loras=16, duration_s=600)
    assert as_vllm.adapter_loads > 1.5 * sparing.adapter_loads
    assert sparing.loads_per_request <= 1.0
    assert as_vllm.disk_loads <= len(fleet)  # host memory holds them all
    assert thrashes(as_vllm)
    assert not thrashes(sparing)


def test_enough_slots_load_each_adapter_once(profile: Profile) -> None:
    """Where every adapter has a slot, the rule does not matter."""
    sim = simulate(_fleet(32, 0.1), profile, max_loras=32, duration_s=300)
    assert sim.adapter_loads == 32


def test_relief_is_a_number_of_slots_that_does_not_thrash(profile: Profile) -> None:
    """The advice is a simulated server: more slots, at most one load a request."""
    found = relief(simulate(_fleet(96, 0.06), profile, max_loras=16, duration_s=600))
    assert found is not None
    assert found.max_loras > 16
    assert found.loads_per_request <= 1.0


def test_host_memory_as_small_as_the_slots_is_read_from_disk(profile: Profile) -> None:
    """With max_cpu_loras = max_loras both caches hold the same: what leaves a slot is read from disk again."""
    small = replace(profile, engine=replace(profile.engine, max_cpu_loras=16))
    sim = simulate(_fleet(96, 0.04), small, max_loras=16, duration_s=300)
    assert sim.disk_loads == sim.adapter_loads > 96


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=80))
def test_order_of_the_walk_is_kept(changes: list[tuple[int, bool]]) -> None:
    """A row of `visits` holds what was put in and not taken out, in the order of the walk."""
    ranks = np.full(40, 8)
    sizes, _ = sizes_of(ranks, ranks, 1)
    ints, visits, members = np.zeros(N_INTS, dtype=np.int64), np.zeros((2, 40), dtype=np.int64), set()
    for a, joins in changes:
        if joins and a not in members:
            members.add(a)
            include(ints, sizes, visits, IN_WALK, a)
        elif not joins and a in members:
            members.remove(a)
            exclude(ints, sizes, visits, IN_WALK, a)
    places = sizes[visits[IN_WALK, : ints[WALKERS]], WALK].tolist()
    assert places == sorted(sizes[a, WALK] for a in members)


def test_walk_is_a_permutation_of_the_seed() -> None:
    """Every adapter has one place in the walk; the same seed gives the same order."""
    ranks = np.full(50, 8)
    first, again, other = (sizes_of(ranks, ranks, seed)[0][1:, WALK].tolist() for seed in (3, 3, 4))
    assert sorted(first) == list(range(50))
    assert first == again != other
