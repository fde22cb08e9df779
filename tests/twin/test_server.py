"""A server keeps the limits of its client and its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.cluster import Cluster
from packer.errors import IncompatibleError
from packer.lengths import Lengths
from packer.profile import Profile
from packer.twin.arrivals import draw_requests
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload


def test_ranks_take_as_many_requests_each(make_profile: Callable[..., Profile]) -> None:
    """Two data-parallel ranks run twice as many requests and tokens in a step as one."""
    lengths = Lengths.gamma(80, 1.0), Lengths.gamma(40, 1.0)
    workload = Workload([Adapter(f"a{i}", 8, 4.0) for i in range(3)], *lengths)
    plain = make_profile()

    def finish_s(seqs: int, tokens: int, ranks: int) -> bytes:
        engine = replace(plain.engine, max_num_seqs=seqs, max_num_batched_tokens=tokens, data_parallel_size=ranks)
        run = simulate(workload, replace(plain, engine=engine), max_loras=3, duration_s=30.0, seed=1)
        return run.raw.finish_s.tobytes()

    assert finish_s(3, 64, 2) == finish_s(6, 128, 1) != finish_s(3, 64, 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_full_server_refuses(make_profile: Callable[..., Profile], ahead: bool) -> None:
    """A server with max_num_queued_reqs refuses what a client with as many places does, alone and in a cluster."""
    lengths = Lengths.gamma(80, 1.0), Lengths.gamma(40, 1.0)
    workload = Workload([Adapter(f"a{i}", 8, 4.0) for i in range(3)], *lengths)
    workload = workload.with_arrivals(Arrivals("trace", trace=draw_requests(workload, 30.0, 1)))
    plain = make_profile()
    engine = replace(plain.engine, version="0.32.0", async_scheduling=ahead, prefix_caching=ahead)
    plain = replace(plain, engine=engine)
    full = replace(plain, engine=replace(engine, max_num_queued_reqs=3))
    by_client = simulate(workload, plain, max_loras=3, duration_s=30.0, max_outstanding=3)
    by_server = simulate(workload, full, max_loras=3, duration_s=30.0)
    assert by_client.refused > 5
    assert by_server.refused == by_client.refused
    assert by_server.raw.finish_s.tobytes() == by_client.raw.finish_s.tobytes()
    cluster = Cluster.of(full, 1, max_loras=3)
    of_cluster = simulate_cluster(workload, cluster, router="round-robin", duration_s=30.0)
    for run in (of_cluster, of_cluster.servers[0]):
        assert (run.sent, run.completed, run.refused) == (
            by_server.sent, by_server.completed, by_server.refused,
        )  # fmt: skip
        assert run.sent_tokens == by_server.sent_tokens
        assert 0.0 < run.served_share == pytest.approx(by_server.served_share)
        assert not run.stable
    assert np.nansum(of_cluster.raw.finish_s) == pytest.approx(np.nansum(by_server.raw.finish_s))
    with pytest.raises(IncompatibleError, match="max_num_queued_reqs"):
        simulate(workload, full, max_loras=3, duration_s=30.0, concurrency=4)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limit", ["client", "server"])
def test_refusals_are_those_of_a_cluster_of_one(make_profile: Callable[..., Profile], ahead: bool, limit: str) -> None:
    """Drawn requests are refused or served as in a cluster of one; a ceiling that refuses none changes no byte."""
    lengths = Lengths.gamma(80, 1.0), Lengths.gamma(40, 1.0)
    workload = Workload([Adapter(f"a{i}", 8, 4.0) for i in range(3)], *lengths)
    plain = make_profile()
    engine = replace(plain.engine, version="0.32.0", async_scheduling=ahead, prefix_caching=ahead)
    plain = replace(plain, engine=engine)

    def runs(most: int | None) -> list[Run]:
        profile: Profile = plain
        how: dict[str, Any] = {"duration_s": 30.0, "seed": 2, "max_outstanding": most}
        if limit == "server":
            profile = replace(plain, engine=replace(engine, max_num_queued_reqs=most))
            del how["max_outstanding"]
        cluster = Cluster.of(profile, 1, max_loras=3)
        return [simulate(workload, profile, max_loras=3, **how), simulate_cluster(workload, cluster, **how)]

    one, cluster = runs(3)
    assert one.refused > 5
    assert (one.sent, one.refused, one.completed) == (cluster.sent, cluster.refused, cluster.completed)
    assert (one.sent_tokens, one.served_share) == (cluster.sent_tokens, cluster.served_share)
    assert one.slo_attainment == cluster.slo_attainment
    assert one.per_adapter.equals(cluster.per_adapter)
    assert runs(10**6)[0].raw.finish_s.tobytes() == runs(None)[0].raw.finish_s.tobytes()


def test_refusals_are_counted_by_who_refuses(make_profile: Callable[..., Profile]) -> None:
    """A request is refused by the client, or by a server whose queue limit is reached first; of a cluster either may
    refuse some, and its servers' views know their own. The summary counts the servers' where one has a limit."""
    workload = Workload([Adapter(f"a{i}", 8, 4.0) for i in range(3)])
    plain = make_profile(version="0.32.0")
    full = make_profile(version="0.32.0", max_num_queued_reqs=3)
    for profile, most, by_server in (
        (plain, 3, False),
        (full, None, True),
        (full, 9, True),
        (full, 2, False),
    ):
        run = simulate(workload, profile, max_loras=3, duration_s=30.0, max_outstanding=most)
        assert run.refused > 5
        assert (run.refused_by_server, run.refused_by_client) == ((run.refused, 0) if by_server else (0, run.refused))
        said = run.to_dict()
        assert (said["refused"], said["refused_by_client"]) == (run.refused, run.refused_by_client)
        assert said.get("refused_by_server") == (run.refused_by_server if profile is full else None)
    cluster = Cluster.of(full, 2, max_loras=3)
    run = simulate_cluster(workload, cluster, router="random", duration_s=30.0, max_outstanding=5)
    assert min(run.refused_by_client, run.refused_by_server) > 5
    assert run.refused_by_client + run.refused_by_server == run.refused
    assert sum(server.refused_by_server for server in run.servers) == run.refused_by_server
    assert run.to_dict()["refused_by_server"] == run.refused_by_server
