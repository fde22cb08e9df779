"""Router "rank-aware": the smallest rise of the time per token over all requests."""

from __future__ import annotations

from dataclasses import dataclass

from numba import njit

from packer.arrays import FloatArray
from packer import checks
from packer.cluster import Cluster
from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.routers.step_cost import adapters_with, ranks_of, step_ms
from packer.twin.cluster.state import Servers, outstanding
from packer.twin.flags import INLINED
from packer.workload import Workload


@njit(**INLINED)
def _score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """The total cost, ms; 0 for an idle server."""
    tpot_ms, penalty_ms, linear, outputs = p[0], p[1], p[2] > 0.0, p[3]
    server, n, a = c.servers[s], float(outstanding(c, s)), c.adapter[r]
    rank = float(c.ranks[a])
    adapters, ranks = adapters_with(c, s, a)
    all_ranks, queued_ranks, largest = ranks_of(c, s)
    most = max(largest, rank)
    queue, queued = float(server.waiting_prompt), n - server.running
    prefill = step_ms(c, s, 0.0, queue + c.prompt[r], adapters, ranks, queued_ranks + rank, (queued + 1.0) * most)
    if queue > 0.0 or linear:
        prefill -= step_ms(c, s, 0.0, queue, adapters, ranks, queued_ranks, queued * largest)
    decode = step_ms(c, s, n + 1.0, 0.0, adapters, ranks, all_ranks + rank, (n + 1.0) * most)
    before = step_ms(c, s, n, 0.0, float(server.active), float(server.active_ranks), all_ranks, n * largest)
    cost = prefill / outputs + decode - before
    if decode > tpot_ms:
        cost += penalty_ms
    total: float = cost * n
    return total


@dataclass(frozen=True)
class RankAware(ScoringRouter):
    """CaraServe's router (arXiv 2401.11240, Algorithm 1), with the step law of each server.

    The cost of a request is what it adds to the prefill of the queue, per output token, and to a decode step; a
    decode step beyond `tpot_ms` costs `penalty_ms` more. The total is that cost times the server's requests.
    `prefill` "step": the first request of a queue pays for a whole step; "linear": for its tokens only. The
    paper gives neither the penalty nor the form of the prefill's cost.
    """

    name = "rank-aware"
    score = staticmethod(_score)
    tpot_ms: float = 100.0
    penalty_ms: float = 1000.0
    prefill: str = "step"

    def __post_init__(self) -> None:
        checks.real("tpot_ms", self.tpot_ms, low=0.0, open_low=True)
        checks.real("penalty_ms", self.penalty_ms, low=0.0)
        checks.choice("prefill", self.prefill, ("step", "linear"))

    def parameters(self, cluster: Cluster, workload: Workload) -> FloatArray:
        """The fields, "linear" as 1, then the mean output tokens of a request."""
        return self.numbers(workload, self.tpot_ms, self.penalty_ms, float(self.prefill == "linear"))
