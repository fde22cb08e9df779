"""Slots that thrash: a server that spends its time on loading adapters again and again, and the slots that end it."""

from __future__ import annotations

import math

from packer.twin.memory.policy import memory_error
from packer.twin.result import Simulation
from packer.twin.simulate import simulate

MOST_LOADS = 1.0
"""Loads per request that a cold cache explains; vLLM needs more where it evicts adapters of the batch."""
GROWTH = 1.5


def thrashes(sim: Simulation) -> bool:
    """Whether an average request makes the server load more than one adapter."""
    return sim.status == "ok" and sim.loads_per_request > MOST_LOADS


def relief(sim: Simulation) -> Simulation | None:
    """The same run with the fewest slots, in steps of half as many more, that do not thrash; None without any."""
    slots, n = sim.max_loras, len(sim.workload)
    while slots < n:
        slots = min(math.ceil(GROWTH * slots), n)
        settings = sim.profile.settings(slots, sim.max_lora_rank)
        if memory_error(sim.profile, settings) is not None:
            return None
        again = simulate(
            sim.workload, sim.profile, max_loras=slots, max_lora_rank=sim.max_lora_rank,
            duration_s=sim.duration_s, seed=sim.seed,
        )  # fmt: skip
        if again.status == "ok" and not thrashes(again):
            return again
    return None
