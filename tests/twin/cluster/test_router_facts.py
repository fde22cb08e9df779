"""What must hold of routers whatever the load is (cluster twin, facts that need no reference)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.lengths import Lengths
from packer.profile import LatencySpec, Profile
from packer.twin.cluster.routers.step_cost import ranks_of
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.run import Run
from packer.workload import Workload

# Multiples of powers of two: scores are exact, so that ties are ties.
MBGMV = {"base_ms": 32.0, "per_request_rank_ms": 2.0**-9, "per_prefill_token_ms": 0.125}
FLEET = Workload([Adapter(f"a{i}", 8 << i % 4, 0.6) for i in range(12)], Lengths.constant(32), Lengths.gamma(64, 0.8))


@pytest.fixture(scope="module")
def profile(toy_profile: Profile) -> Profile:
    """A server with S-LoRA's kernel and room for everything."""
    memory = replace(toy_profile.memory, kv_budget_bytes=1e12)
    return replace(toy_profile, latency=LatencySpec("linear", MBGMV), memory=memory)


def _run(profile: Profile, router: str, servers: int = 4) -> Run:
    cluster = Cluster.of(profile, servers, max_loras=12, max_lora_rank=64)
    return simulate_cluster(FLEET, cluster, "vllm", router, duration_s=120.0, seed=3)


def test_rank_aware_without_penalty_is_most_idle(profile: Profile) -> None:
    """Where each server adds the same for a request, the smallest rise is on the server with the fewest requests."""
    rank_aware = _run(profile, "rank-aware:penalty_ms=0,prefill=linear")
    most_idle = _run(profile, "most-idle")
    assert rank_aware.state is not None
    assert most_idle.state is not None
    assert rank_aware.state.server.tolist() == most_idle.state.server.tolist()


@pytest.mark.parametrize("router", ["most-idle", "rank-aware"])
def test_an_idle_server_is_chosen_if_there_is_one(profile: Profile, router: str) -> None:
    """A request joins others only where every server has some."""
    run = _run(profile, router, servers=16)
    assert run.state is not None
    server, sent, finish = run.state.server, run.raw.requests.time_s, run.raw.finish_s
    joined = 0
    for r in range(len(server)):
        there = (sent[:r] < sent[r]) & ~(finish[:r] <= sent[r])
        busy = np.bincount(server[:r][there], minlength=16)
        if (busy == 0).any():
            assert busy[server[r]] == 0
        joined += busy[server[r]] > 0
    assert 0 < joined < len(server)


def test_first_fit_without_a_limit_fills_the_first_server(profile: Profile) -> None:
    """Room for everything: nothing is left for the others."""
    run = _run(profile, "first-fit:max_batch=1000000")
    assert run.state is not None
    assert set(run.state.server.tolist()) == {0}


def test_ranks_of_those_that_wait_are_those_outside_the_batch() -> None:
    """Two requests of rank 8 and one of 64, of which one of 8 and that of 64 run: 8 waits, 64 is the largest."""
    classes = np.zeros((1, 4), dtype=[("rank", "i8"), ("unfinished", "i8")]).view(np.recarray)
    classes.rank[0], classes.unfinished[0] = (0, 8, 64, 128), (0, 2, 1, 0)
    servers = np.array([(72,)], dtype=[("request_ranks", "i8")]).view(np.recarray)
    state = SimpleNamespace(classes=classes, servers=servers)
    assert ranks_of.py_func(state, 0) == (80.0, 8.0, 64.0)
