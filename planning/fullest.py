"""How many GPUs a goal takes at the least if each server is as full as one of a single slot rank: an estimate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

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
STEP = 1.02
"""Rates of servers differ by this factor: what breaks the goal is at most so much more than what keeps it."""
LEAST, MOST = -12, 20
"""Steps from the load of a server of the plan: from 0.79 to 1.49 of it."""
SAMPLES = 3
"""Servers of each rank: what the middle one of them carries is less chance."""
SOURCE = "estimate: full servers of one slot rank keep the goal, if none of mixed ranks or other rates carries more"


def by_full_servers(job: Frontier, plan: Plan) -> Bound | None:
    """An estimate of the GPUs that a fleet needs; None if the known bound is as high.

    For each slot rank a few servers get a fair sample of the rank's adapters each, with copies if they are few, as much
    load as a server of the plan. The rates of a sample are raised, or lowered, until it breaks the goal, with any
    slots, in one of the hours that the plan is held to: the middle one of these says what a server of that rank
    carries. Servers that mix ranks carry what those of their largest one do. It is not known whether the
    best mix of hot and quiet adapters, or of ranks, carries more than the samples.
    """
    fleet, known = job.parts.fleet, plan.lower_bound or 1.0
    every = job.kept.all_count and not job.replayed
    if not every or plan.n_gpus < WORTH_GPUS or known >= plan.n_gpus or job.over():
        return None
    ranks, loads = slot_ranks(fleet.ranks), fleet.offered_tok_s_by_adapter
    offered_tok_s, most_tok_s = [], []
    for rank in np.unique(ranks).tolist():
        members = np.flatnonzero(ranks == rank)
        most = _most_tok_s(job, plan, members, rank)
        if most is None:
            return None
        offered_tok_s.append(float(loads[members].sum()))
        most_tok_s.append(most)
    gpus = min(fewest_servers(offered_tok_s, most_tok_s) * job.size, plan.n_gpus)
    return Bound(float(gpus), SOURCE) if known < gpus else None


def fewest_servers(offered_tok_s: Sequence[float], most_tok_s: Sequence[float]) -> int:
    """The fewest servers for loads by rising slot rank, of which a server of each rank carries so much.

    What is left over of a rank has a server of its own, or goes to servers of the next rank, which carry no more.
    """
    last, fewest = len(most_tok_s) - 1, math.inf
    for passed_on in product((False, True), repeat=last):
        servers, left = 0, 0.0
        for k, (offered, carried) in enumerate(zip(offered_tok_s, most_tok_s, strict=True)):
            number = (left + offered) / carried
            whole = math.floor(number + 1e-6) if k < last and passed_on[k] else math.ceil(number - 1e-6)
            servers, left = servers + whole, max(0.0, left + offered - whole * carried)
        fewest = min(fewest, servers)
    return int(fewest)


def _most_tok_s(job: Frontier, plan: Plan, members: IntArray, rank: int) -> float | None:
    """The load that a server of adapters of one slot rank carries, tok/s; None if the search was cut short."""
    loads = job.parts.fleet.offered_tok_s_by_adapter
    falling = members[np.argsort(-loads[members], kind="stable")]
    like = [item for item in plan.bins if item.max_lora_rank == rank] or plan.bins
    full = max(like, key=lambda item: item.offered_tok_s(job.workload))
    guess_tok_s = full.offered_tok_s(job.workload)
    times = math.ceil(SAMPLES * guess_tok_s / float(loads[members].sum())) + 1
    order = np.tile(falling[np.argsort(golden(len(falling)), kind="stable")], times)
    ends = np.searchsorted(np.cumsum(loads[order]), guess_tok_s * np.arange(SAMPLES + 1)).tolist()
    samples = [_Sample(job, order[a : max(b, a + 1)], full.max_loras, rank) for a, b in pairwise(ends)]
    samples[0].search(LEAST, 0, 2)
    for last, sample in pairwise(samples):  # samples are much alike
        sample.search(LEAST, last.broken - 1, 1)
    middle = sorted(samples, key=lambda sample: sample.least_tok_s)[SAMPLES // 2]
    middle.search_slots()
    return None if job.over() else middle.least_tok_s


class _Sample:
    """A server of some adapters, by their rows in the fleet, whose rates rise until it breaks the goal."""

    def __init__(self, job: Frontier, own: IntArray, slots: int, rank: int) -> None:
        fleet, every = job.parts.fleet, tuple(range(len(own)))
        adapters = (replace(fleet.adapters[i], name=f"{k}") for k, i in enumerate(own.tolist()))
        self.job, self.hours = job, Hours(job.seed, job.over)
        self.fleet = replace(fleet, adapters=tuple(adapters))
        (self.server,) = with_most_slots([Bin(every, job.profile.settings(1, rank), job.profile)], slots)
        self.broken = LEAST
        """The fewest steps up at which it breaks the goal."""

    @property
    def least_tok_s(self) -> float:
        """The least offered load with which it breaks the goal, as far as was looked."""
        return float(self.fleet.offered_tok_s * STEP**self.broken)

    def kept_at(self, step: int) -> KeptHours:
        """The hours that the plan is held to, with so many steps more of each rate."""
        job, fleet = self.job, self.hours.at(self.fleet, STEP**step)
        kept = KeptHours(
            fleet, self.hours.at(self.fleet, STEP**step * (1.0 + (job.margin or 0.0))), job.seed, self.hours
        )
        kept.hours = [(kept.raised if load is job.raised else fleet, seed) for load, seed in job.kept.hours]
        return kept

    def search(self, low: int, start: int, step: int) -> None:
        """Find where it breaks the goal with its slots, from `start` in steps that double."""

        def holds(step: int) -> bool:
            return self.kept_at(step).used([self.server], most=[1.0])[0] <= 1.0

        self.broken = reach(holds, low, MOST, start, step, self.job.over)[1]

    def search_slots(self) -> None:
        """With other slots it may carry more."""
        while self.broken <= MOST and not self.job.over():
            kept = self.kept_at(self.broken)
            (other,) = with_best_slots(kept, [self.server], kept.hours, self.job.over, tight=1.0)
            if kept.used([other], most=[1.0])[0] > 1.0:
                return
            self.server = other
            self.search(self.broken, self.broken, 1)
