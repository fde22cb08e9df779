"""What routers keep of servers, so that few need a score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numba import njit

from packer.adapter import Adapter
from packer.cluster import Cluster, ServerKind
from packer.io.profiles import load_profile
from packer.twin.cluster.routers.affinity import Affinity
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.routers.most_idle import MostIdle
from packer.twin.cluster.routers.predicted import Predicted, latency_ms
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.state import Servers, on_gpu, outstanding
from packer.workload import Workload


@njit
def _requests(c: Servers, p: Any, s: int, r: int) -> float:
    """Requests of a server, counted anew."""
    return float(outstanding(c, s))


@njit
def _requests_and_slack(c: Servers, p: Any, s: int, r: int) -> float:
    """The same, and the slack where the adapter is not on the GPU."""
    return float(outstanding(c, s)) + (0.0 if on_gpu(c, s, c.adapter[r]) else p[0])


@dataclass(frozen=True)
class EveryIdle(ScoringRouter):
    """`most-idle`, which scores every server."""

    name, score = "every-idle", staticmethod(_requests)


class EveryAffinity(ScoringRouter):
    """`affinity` with its slack of 4."""

    name, score = "every-affinity", staticmethod(_requests_and_slack)

    def parameters(self, cluster: Cluster, workload: Workload) -> Any:
        """The slack."""
        return np.array([4.0])


@njit
def _latency_ms(c: Servers, p: Any, s: int, r: int) -> float:
    """Predicted latency, where each server is asked for the adapter."""
    return float(latency_ms(c, p[0], s, r, True))


class EveryPredicted(ScoringRouter):
    """`predicted`."""

    name, score = "every-predicted", staticmethod(_latency_ms)

    def parameters(self, cluster: Cluster, workload: Workload) -> Any:
        """The mean output tokens."""
        return self.numbers(workload)


@pytest.mark.parametrize(
    "routers", [(MostIdle(), EveryIdle()), (Affinity(), EveryAffinity()), (Predicted(), EveryPredicted())]
)
def test_what_routers_keep_changes_no_choice(routers: tuple[ScoringRouter, ScoringRouter]) -> None:
    """A router sends every request where it would if it scored all servers, several words of them or a few."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    for seed, per_server in enumerate((0.05, 1.0, 4.0)):
        rng = np.random.default_rng(seed)
        rates = rng.pareto(1.0, 120) + 0.1
        fleet = Workload(
            Adapter(f"a{i}", int(rng.choice([8, 32])), float(rate))
            for i, rate in enumerate(rates / rates.sum() * per_server * 27)
        )
        kinds = (ServerKind("one", profile, 8, 32), ServerKind("other", profile, 3, 32))
        servers = tuple(rng.choice(["one", "other"], size=27).tolist())
        held = rng.random((120, 27)) < 0.4
        held[:, seed] = True
        placement = tuple({f"a{i}": 1.0 for i in np.flatnonzero(own)} for own in held.T)
        for placed in (None, placement):
            runs = [
                simulate_cluster(fleet, Cluster(kinds, servers, placed), router=router, duration_s=30.0, seed=seed)
                for router in routers
            ]
            assert runs[0].requests.equals(runs[1].requests)
