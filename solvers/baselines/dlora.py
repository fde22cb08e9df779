"""dLoRA's proactive placement (Wu et al., OSDI '24): maximise the smallest burst tolerance.

An engine holds adapters in its memory; M_e is the memory that is left. The burst tolerance of an adapter is the
free memory of all engines that hold it, over its share of the expected traffic, which splits evenly over its
replicas. The loop takes the adapter whose share of the replicas placed so far is furthest below its share of the
traffic (adapters without a replica first, the busiest first), tries engines in order of fewest adapters, and keeps
the replica if the smallest burst tolerance does not fall. It stops when a whole pass adds nothing. dLoRA does not
model starvation or slots: `max_loras` is the number of adapters held.

dLoRA's reactive part, which needs live requests, is `packer.papers.routers.migration`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray
from packer.solvers.base import Problem, Solution
from packer.solvers.slots import SlotSearch
from packer.solvers.support import gpus_to_use, one_type

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Engines:
    """The task: adapter sizes (bytes, (n,)), shares of the traffic ((n,), sum 1), bytes per engine."""

    sizes: FloatArray
    shares: FloatArray
    capacity: float
    engines: int
    max_replicas: int


class DLora:
    """Proactive placement of dLoRA on a given number of GPUs, with up to `max_replicas` of an adapter."""

    name = "dlora"
    spreads = True
    supports = staticmethod(one_type)

    def solve(self, problem: Problem) -> Solution:
        """Bins that got at least one adapter; adapters that fit no engine's memory are unplaced."""
        profile, workload = problem.profile, problem.workload
        task = Engines(
            sizes=workload.ranks.astype(np.float64) * profile.model.lora_bytes_per_rank,
            shares=workload.rates / workload.rate,
            capacity=profile.memory.kv_budget_bytes,
            engines=gpus_to_use(problem, problem.max_replicas),
            max_replicas=problem.max_replicas,
        )
        holds = place(task)
        copies = holds.sum(axis=1)
        slots = SlotSearch(problem)
        bins = []
        for k in range(task.engines):
            part = np.flatnonzero(holds[:, k]).tolist()
            if part:
                bins.append(slots.make(part, len(part), shares=(1.0 / copies[part]).tolist()))
        left = tuple(np.flatnonzero(copies == 0).tolist())
        reasons = (f"dlora: the GPUs' memory is full; {len(left)} adapters are not placed",) if left else ()
        return Solution(tuple(bins), left, reasons)


def place(task: Engines) -> BoolArray:
    """Which engine holds which adapter, bool (n, engines).

    Adding adapter a to engine e lowers the tolerance of each adapter x on e by size(a) / share(x), and raises the
    tolerance of a. One number per engine therefore decides whether the smallest tolerance m falls: the memory that can
    be taken from e until some adapter on it reaches m. A trial takes O(1), a placement O(n × engines).
    """
    n = len(task.sizes)
    holds = np.zeros((n, task.engines), dtype=bool)
    free = np.full(task.engines, task.capacity)
    copies = np.zeros(n, dtype=np.int64)
    failed = np.zeros(n, dtype=bool)
    spare, held = free, np.zeros(task.engines, dtype=np.int64)

    def give(adapter: int) -> bool:
        """Add a replica on the engine with the fewest adapters among engines with room; False if none has room."""
        # A replica must not lower the smallest tolerance (`_spare`), which the placement maximises.
        room = np.minimum(free, spare) + _TOLERANCE * task.capacity
        fitting = np.flatnonzero(~holds[adapter] & (task.sizes[adapter] <= room))
        if not fitting.size:
            return False
        engine = fitting[held[fitting].argmin()]
        holds[adapter, engine] = True
        held[engine] += 1
        free[engine] -= task.sizes[adapter]
        copies[adapter] += 1
        return True

    # Room only shrinks until each adapter has a replica: an adapter without room now has none later.
    for adapter in np.argsort(-task.shares, kind="stable").tolist():
        give(adapter)
    spare = _spare(task, holds, free) if copies.all() else free
    while (adapter := next_adapter(task, copies, failed)) is not None:
        if not give(adapter):
            failed[adapter] = True
            continue
        failed[:] = False
        spare = _spare(task, holds, free) if copies.all() else free
    return holds


def next_adapter(task: Engines, copies: IntArray, failed: BoolArray) -> int | None:
    """The adapter to give a replica to, among those that may have one and did not fail in this pass."""
    open_ = ~failed & (copies < min(task.max_replicas, task.engines))
    if not open_.any():
        return None
    without = open_ & (copies == 0)
    if without.any():
        return int(np.argmax(np.where(without, task.shares, -np.inf)))
    below = task.shares - copies / copies.sum()
    return int(np.argmax(np.where(open_, below, -np.inf)))


def _spare(task: Engines, holds: BoolArray, free: FloatArray) -> FloatArray:
    """Memory that can be taken from each engine before the smallest tolerance falls, float64 (engines,). While some
    adapter has no replica the smallest tolerance is 0 and nothing can lower it."""
    tolerance = burst_tolerance(task, holds, free)
    smallest = tolerance.min()
    if smallest <= 0.0:
        return free
    slack = (tolerance - smallest) * task.shares
    found: FloatArray = np.where(holds, slack[:, None], np.inf).min(axis=0)
    return found


def burst_tolerance(task: Engines, holds: BoolArray, free: FloatArray) -> FloatArray:
    """Free memory of the engines that hold each adapter over its traffic share, bytes, float64 (n,)."""
    reached: FloatArray = holds @ free
    return reached / task.shares
