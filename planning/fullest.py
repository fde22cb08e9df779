"""How many GPUs a goal takes at the least if each server is as full as one of a single slot rank: an estimate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.plan import Plan
from packer.planning.explore import Frontier
from packer.planning.kept import KeptHours
from packer.planning.settle import with_best_slots, with_most_slots
from packer.search import reach
from packer.solvers.bound import Bound
from packer.solvers.candidates import slot_ranks
from packer.solvers.order import golden
from packer.twin.hours import Hours

WORTH_GPUS = 5
"""Smaller plans get no such estimate, which takes as long as three to five more servers."""
STEP = 1.04
"""Sizes of servers differ by this factor: what breaks the goal is at most so much more than what keeps it."""
_STEPS = 40
SOURCE = "estimate: full servers of one slot rank keep the goal, if none of mixed ranks or other rates carries more"


def by_full_servers(job: Frontier, plan: Plan) -> Bound | None:
    """An estimate of the GPUs that a fleet needs; None if the known bound is as high.

    For each slot rank one server is filled with a fair sample of the rank's adapters, and with copies if they are few,
    until it breaks the goal, with any slots, in one of the hours that the plan is held to. The rank takes as many
    servers as its load is times the server's load. Servers that mix ranks have slots of the largest one for all. It is
    not known whether the best mix of hot and quiet adapters, or of ranks, carries more than the sample.
    """
    fleet, known = job.parts.fleet, plan.lower_bound or 1.0
    every = job.kept.all_count and not job.replayed
    if not every or plan.n_gpus < WORTH_GPUS or known >= plan.n_gpus or job.over():
        return None
    ranks = slot_ranks(fleet.ranks)
    servers = 0.0
    for rank in np.unique(ranks).tolist():
        share = _part_of_a_server(job, plan, np.flatnonzero(ranks == rank), rank)
        if share is None:
            return None
        servers += share
    gpus = math.ceil(servers - 1e-6) * job.size
    return Bound(float(gpus), SOURCE) if known < gpus <= plan.n_gpus else None


def _part_of_a_server(job: Frontier, plan: Plan, members: IntArray, rank: int) -> float | None:
    """How many servers, at the least, adapters of one slot rank take; None where that is not found."""
    fleet, profile = job.parts.fleet, job.profile
    loads = fleet.offered_tok_s_by_adapter
    falling = members[np.argsort(-loads[members], kind="stable")]
    like = [item for item in plan.bins if item.max_lora_rank == rank] or plan.bins
    full = max(like, key=lambda item: item.offered_tok_s(job.workload))
    guess_tok_s, slots = full.offered_tok_s(job.workload), full.max_loras
    times = math.ceil(STEP**_STEPS * guess_tok_s / float(loads[members].sum())) + 1
    order = np.tile(falling[np.argsort(golden(len(falling)), kind="stable")], times)
    sums = np.cumsum(loads[order])
    near = int(np.searchsorted(sums, guess_tok_s)) + 1
    order = order[: math.ceil(near * STEP**_STEPS)]
    sample = replace(
        fleet, adapters=tuple(replace(fleet.adapters[i], name=f"{k}") for k, i in enumerate(order.tolist()))
    )
    kept = KeptHours(sample, sample.scaled(1.0 + (job.margin or 0.0)), job.seed, Hours(job.seed, job.over))
    kept.hours = [(kept.raised if load is job.raised else sample, seed) for load, seed in job.kept.hours]

    def size(step: int) -> int:
        return max(1, min(len(order), round(near * STEP**step)))

    def holds(step: int) -> bool:
        nonlocal slots
        made = Bin(tuple(range(size(step))), profile.settings(1, rank), profile)
        (best,) = with_best_slots(kept, with_most_slots([made], slots), kept.hours, job.over, tight=1.0)
        if kept.used([best], most=[1.0])[0] > 1.0:
            return False
        slots = max(slots, best.max_loras)
        return True

    _, broken = reach(holds, -_STEPS, _STEPS, 0, 1, job.over)
    if broken > _STEPS or job.over():
        return None
    return float(loads[members].sum() / sums[size(broken) - 1])
