"""Slots are kept as vLLM keeps them: once all are in use, an adapter that joins evicts others of the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.lengths import Lengths
from packer.profile import Profile
from packer.twin.limits import relief, thrashes
from packer.twin.simulate import simulate
from packer.workload import Workload


def _fleet(n: int, rate: float) -> Workload:
    adapters = [Adapter(f"a{i}", 8, rate) for i in range(n)]
    return Workload(adapters, Lengths.constant(200), Lengths.constant(150))


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
    client: dict[str, Any] = {"duration_s": 120.0, "concurrency": 96}
    found = relief(simulate(_fleet(96, 0.01), profile, max_loras=24, **client))
    assert found is not None
    as_advised = simulate(_fleet(96, 0.01), profile, max_loras=found.max_loras, **client)
    assert found.loads_per_request == as_advised.loads_per_request, "the client sends as before"


def test_host_memory_as_small_as_the_slots_is_read_from_disk(profile: Profile) -> None:
    """With max_cpu_loras = max_loras both caches hold the same: what leaves a slot is read from disk again."""
    small = replace(profile, engine=replace(profile.engine, max_cpu_loras=16))
    sim = simulate(_fleet(96, 0.04), small, max_loras=16, duration_s=300)
    assert sim.disk_loads == sim.adapter_loads > 96


def test_host_memory_starts_with_the_adapters_loaded_last(profile: Profile) -> None:
    """Without a cold start the last `max_cpu_loras` adapters are at hand, the last `max_loras` of them in slots."""
    engine = replace(profile.engine, max_cpu_loras=8)
    warm = replace(profile, engine=engine, loading=replace(profile.loading, cold_start=False))
    times = np.arange(16) * 10.0
    for first, disk_loads in ((0, 16), (8, 0)):  # 0 … 15, or 8 … 15 and 8 … 15 again
        adapter = first + np.arange(16) % (16 - first)
        trace = RequestTrace(times, adapter, np.full(16, 20), np.full(16, 5))
        fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(16)], arrivals=Arrivals("trace", trace=trace))
        sim = simulate(fleet, warm, max_loras=4, duration_s=200.0)
        assert (sim.disk_loads, sim.adapter_loads) == (disk_loads, 16)
    trace = RequestTrace(times[:4], np.arange(12, 16), np.full(4, 20), np.full(4, 5))
    resident = simulate(fleet.with_arrivals(Arrivals("trace", trace=trace)), warm, max_loras=4, duration_s=100.0)
    assert resident.adapter_loads == 0
