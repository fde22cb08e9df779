"""Rendezvous hashing, as production routers place adapters (for example NVIDIA Dynamo's)."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from packer.solvers.backbone import backbone_tok_s
from packer.solvers.base import MAX_LORAS_CANDIDATES, Problem, Solution
from packer.solvers.slots import SlotSearch
from packer.solvers.support import gpus_to_use, one_type


class HrwPlacement:
    """Each adapter to its highest-scoring GPU that has a free slot and room for its load.

    The score of (adapter, GPU) is a stable hash of the adapter's name and the GPU's number, so that few adapters
    move when the number of GPUs changes. A GPU has `MAX_LORAS_CANDIDATES[-1]` slots, and capacity for the load that
    the base model serves without adapters: the scheme ignores the cost of adapters. An adapter that fits on no GPU
    goes to the GPU with its highest score.
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
            fits = (k for k in ranking if len(parts[k]) < MAX_LORAS_CANDIDATES[-1] and used[k] + loads[i] <= capacity)
            k = next(fits, ranking[0])
            parts[k].append(i)
            used[k] += loads[i]
        slots = SlotSearch(problem)
        return Solution(tuple(slots.make(part, len(part)) for part in parts if part))


def scores(name: str, n_gpus: int) -> npt.NDArray[np.uint64]:
    """Score of an adapter on each GPU, uint64 (n,). It depends only on the adapter's name and the GPU's number."""
    digests = [hashlib.blake2b(f"{k}\0{name}".encode(), digest_size=8).digest() for k in range(n_gpus)]
    return np.array([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=np.uint64)
