"""AIBrix' schedulers of adapters, against their rules."""

from __future__ import annotations

import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.errors import ValidationError
from packer.io.profiles import load_profile
from packer.twin.cluster.adapter_scheduler import AdapterScheduler
from packer.twin.cluster.simulate import simulate_cluster
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{i}", 8, 0.2) for i in range(7)])


def _counts(policy: AdapterScheduler) -> list[list[str]]:
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=8, max_lora_rank=8)
    placed = policy.place(FLEET, cluster, 0).placement
    assert placed is not None
    return [list(held) for held in placed]


def test_policies_place_as_their_source_says() -> None:
    """The fewest adapters: in turn. Bin packing: one server is filled after the other. Each adapter has one server."""
    assert _counts(AdapterScheduler()) == [["a0", "a3", "a6"], ["a1", "a4"], ["a2", "a5"]]
    packed = _counts(AdapterScheduler("bin-pack", capacity=4))
    assert packed == [["a0", "a1", "a2", "a3"], ["a4", "a5", "a6"], []]
    assert sorted(name for held in _counts(AdapterScheduler("random")) for name in held) == list(FLEET.names)
    with pytest.raises(ValidationError, match="at most 6 adapters to bin-pack on 3 servers"):
        _counts(AdapterScheduler("bin-pack", capacity=2))


def test_the_system_sends_each_adapter_to_its_server() -> None:
    """Behind AIBrix' controller all requests of an adapter go to the one server that it was given."""
    cluster = Cluster.of(load_profile("h100-64gb/llama-3.1-8b-instruct"), 3, max_loras=8, max_lora_rank=8)
    frame = simulate_cluster(FLEET, cluster, system="aibrix-model-adapter", duration_s=60.0).requests
    homes = {name: set(rows["server"]) for (name,), rows in frame.group_by("adapter")}
    assert homes == {f"a{i}": {i % 3} for i in range(7)}
