"""Solvers that only the papers' comparisons use: blind to what adapters cost, or random."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from packer.solvers.backbone import backbone_tok_s
from packer.solvers.base import MAX_LORAS_CANDIDATES, Problem, Solution
from packer.solvers.order import paper_order
from packer.solvers.reasons import out_of_gpus
from packer.solvers.slots import SlotSearch
from packer.solvers.support import chooses_gpus, gpus_to_use, one_type

_STAY_BONUS = 0.05
"""What it is worth that an adapter already runs on a GPU, as a share of the backbone's throughput."""


class RandomPlacement:
    """A uniform GPU for each adapter, and uniform `max_loras` in 1 … its adapters. Seeded.

    What any method must beat (a baseline of arXiv 2602.24044).
    """

    name = "random"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """Bins that got at least one adapter."""
        rng = np.random.default_rng(problem.seed)
        gpu = rng.integers(gpus_to_use(problem), size=len(problem.workload))
        slots = SlotSearch(problem)
        parts = [np.flatnonzero(gpu == k).tolist() for k in np.unique(gpu).tolist()]
        return Solution(tuple(slots.make(part, int(rng.integers(1, len(part) + 1))) for part in parts))


class MaxBase:
    """Next fit by offered load alone, up to what a GPU serves without adapters; every adapter has its slot.

    A baseline of arXiv 2602.24044. Blind to starvation and memory.
    """

    name = "maxbase"
    slots_per_adapter = 1.0

    def supports(self, problem: Problem) -> str | None:
        """Objectives that choose the number of GPUs, one GPU type."""
        return chooses_gpus(problem) or one_type(problem)

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order in which they were filled."""
        capacity = backbone_tok_s(problem.workload, problem.profile)
        loads = problem.workload.offered_tok_s_by_adapter
        parts: list[list[int]] = []
        room = 0.0
        for i in paper_order(problem.workload).tolist():
            if not parts or loads[i] > room:
                parts.append([])
                room = capacity
            parts[-1].append(i)
            room -= float(loads[i])
        limit = problem.max_gpus if problem.max_gpus is not None else len(parts)
        slots = SlotSearch(problem)
        share = self.slots_per_adapter
        bins = tuple(slots.make(part, max(1, round(len(part) * share))) for part in parts[:limit])
        left = tuple(i for part in parts[limit:] for i in part)
        reasons = out_of_gpus(problem, left, len(parts)) if left else ()
        return Solution(bins, left, reasons, details={"backbone_tok_s": capacity})


class MaxBaseHalf(MaxBase):
    """MaxBase with a slot for every second adapter."""

    name = "maxbase-half"
    slots_per_adapter = 0.5


class HrwPlacement:
    """Each adapter to its highest-scoring GPU that has a free slot and room for its load.

    Rendezvous hashing, as production routers place adapters (for example NVIDIA Dynamo's). The score of (adapter, GPU)
    is a stable hash of both names, so that few adapters move when GPUs come and go. A GPU has
    `MAX_LORAS_CANDIDATES[-1]` slots, and room for what the base model serves without adapters: the scheme is blind to
    what adapters cost. An adapter that fits nowhere goes to its first choice.
    """

    name = "hrw"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """Bins that got at least one adapter."""
        n = gpus_to_use(problem)
        capacity = backbone_tok_s(problem.workload, problem.profile)
        loads = problem.workload.offered_tok_s_by_adapter
        parts: list[list[int]] = [[] for _ in range(n)]
        used = np.zeros(n)
        for i, name in enumerate(problem.workload.names):
            ranking = np.argsort(-scores(name, n).astype(np.int64), kind="stable").tolist()
            free = (k for k in ranking if len(parts[k]) < MAX_LORAS_CANDIDATES[-1])
            k = next((k for k in free if used[k] + loads[i] <= capacity), ranking[0])
            parts[k].append(i)
            used[k] += loads[i]
        slots = SlotSearch(problem)
        return Solution(tuple(slots.make(part, len(part)) for part in parts if part))


def scores(name: str, n_gpus: int) -> npt.NDArray[np.uint64]:
    """Score of an adapter on each GPU, uint64 (n,): depends on nothing but the adapter's name and the GPU."""
    digests = [hashlib.blake2b(f"{k}\0{name}".encode(), digest_size=8).digest() for k in range(n_gpus)]
    return np.array([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=np.uint64)


class Flow:
    """Min-cost flow from adapters (as many units as replicas) to GPUs (cost: the load there) with free slots.

    As some routers in production balance load and limit churn. Adapters enter in rounds of as many units as there are
    GPUs, the heaviest first, each GPU taking one a round; the cost of a GPU is the load that it has so far, less a
    bonus where the adapter already runs. Blind to starvation and memory.
    """

    name = "flow"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """Bins that got at least one adapter."""
        n = gpus_to_use(problem)
        capacity = backbone_tok_s(problem.workload, problem.profile)
        loads = problem.workload.offered_tok_s_by_adapter
        copies = [min(n, problem.max_replicas, max(1, math.ceil(load / capacity))) for load in loads.tolist()]
        per_copy = loads / np.array(copies)
        units = sorted(
            (i for i, count in enumerate(copies) for _ in range(count)), key=lambda i: (-per_copy[i], i)
        )
        parts: list[list[int]] = [[] for _ in range(n)]
        used = np.zeros(n)
        for start in range(0, len(units), n):
            for i, k in _round(problem, units[start : start + n], used / capacity, parts):
                parts[k].append(i)
                used[k] += per_copy[i]
        slots = SlotSearch(problem)
        filled = [part for part in parts if part]
        return Solution(
            tuple(slots.make(part, len(part), shares=[1.0 / copies[i] for i in part]) for part in filled)
        )


def _round(
    problem: Problem, units: list[int], busy: npt.NDArray[np.float64], parts: list[list[int]]
) -> list[tuple[int, int]]:
    """(adapter, GPU) for each unit of a round: the flow through GPUs that take one unit each is an assignment."""
    from scipy.optimize import linear_sum_assignment

    cost = np.array([[math.inf if i in part else 0.0 for part in parts] for i in units]) + busy
    for k, old in enumerate(problem.old_bins[: len(parts)]):
        cost[[i in old.adapters for i in units], k] -= _STAY_BONUS
    rows, columns = linear_sum_assignment(cost)
    return [(units[row], column) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]
