"""Min-cost flow from adapters to GPUs: balances load and limits churn, as some routers in production do."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from packer.bin import Bin
from packer.solvers.backbone import backbone_tok_s
from packer.solvers.base import Problem, Solution
from packer.solvers.counts import gpus_to_use
from packer.solvers.slots import SlotSearch
from packer.solvers.support import one_type

_STAY_BONUS = 0.05
"""What it is worth that an adapter already runs on a GPU, as a share of the backbone's throughput."""

_COST_UNIT = 1e-4


class Flow:
    """Flow from adapters (as many units as replicas) to GPUs (cost: the load there) with free slots.

    Adapters enter in rounds of as many units as there are GPUs, the heaviest first, each GPU taking one a
    round; the cost of a GPU is the load that it has so far, less a bonus where the adapter already runs.
    Blind to starvation and memory.
    """

    name = "flow"
    spreads = True

    def supports(self, problem: Problem) -> str | None:
        """One GPU type."""
        return one_type(problem)

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
        shares = [[1.0 / copies[i] for i in part] for part in parts]
        pairs = [(part, share) for part, share in zip(parts, shares, strict=True) if part]
        return Solution(tuple(slots.make(part, len(part), shares=share) for part, share in pairs))


def _round(
    problem: Problem, units: list[int], busy: npt.NDArray[np.float64], parts: list[list[int]]
) -> list[tuple[int, int]]:
    """(adapter, GPU) for each unit of a round, by the network simplex method."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_node("source", demand=-len(units))
    graph.add_node("sink", demand=len(units))
    for i in set(units):
        graph.add_edge("source", ("adapter", i), capacity=units.count(i), weight=0)
        for k in range(len(parts)):
            if i not in parts[k]:
                stays = _STAY_BONUS if _runs_on(problem.old_bins, i, k) else 0.0
                cost = round((float(busy[k]) - stays) / _COST_UNIT)
                graph.add_edge(("adapter", i), ("gpu", k), capacity=1, weight=cost)
    for k in range(len(parts)):
        graph.add_edge(("gpu", k), "sink", capacity=1, weight=0)
    _, flow = nx.network_simplex(graph)
    return [
        (node[1], target[1])
        for node, targets in flow.items()
        if node[0] == "adapter"
        for target, amount in targets.items()
        if amount
    ]


def _runs_on(old: tuple[Bin, ...], adapter: int, gpu: int) -> bool:
    return gpu < len(old) and adapter in old[gpu].adapters
