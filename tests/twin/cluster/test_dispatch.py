"""One compiled event loop serves all requests, wherever they come from."""

from __future__ import annotations

from dataclasses import replace

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.cluster import Cluster, ServerKind
from packer.io.profiles import load_profile
from packer.papers.cache.top_k import TopK
from packer.twin.arrivals import draw_requests
from packer.twin.cluster.events import pass_on, route
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.engine.advance import advance
from packer.twin.simulate import simulate
from packer.workload import Workload

LLAMA = load_profile("h100-64gb/llama-3.1-8b-instruct")
FLEET = Workload([Adapter(f"a{i}", 8, 0.5) for i in range(4)])
TRACE = replace(FLEET, arrivals=Arrivals("trace", trace=draw_requests(FLEET, 20.0, 0)))
CLUSTER = Cluster((ServerKind("h100", LLAMA, 4, 8),), ("h100", "h100"))


def test_replayed_requests_need_no_kernels_of_their_own() -> None:
    """A replayed trace, whose arrays are read-only, is served by the kernels that serve drawn requests."""
    simulate(FLEET, LLAMA, max_loras=4, duration_s=20.0)
    simulate_cluster(FLEET, CLUSTER, "affinity", duration_s=20.0)
    known = set(advance.signatures), set(route.signatures), set(pass_on.signatures)
    simulate(TRACE, LLAMA, max_loras=4, duration_s=20.0)
    simulate_cluster(TRACE, CLUSTER, "affinity", duration_s=20)
    assert (set(advance.signatures), set(route.signatures), set(pass_on.signatures)) == known


def test_whole_seconds_as_a_period_need_no_kernels_of_their_own() -> None:
    """A cache policy may act every so many whole seconds."""
    simulate_cluster(FLEET, CLUSTER, "s-lora", duration_s=20.0, cache=TopK(period_s=5.0))
    known = set(route.signatures), set(pass_on.signatures)
    simulate_cluster(FLEET, CLUSTER, "s-lora", duration_s=20.0, cache=TopK(period_s=5))
    assert (set(route.signatures), set(pass_on.signatures)) == known
