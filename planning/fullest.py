"""Estimate the fewest GPUs that keep a goal if each server is as full as a server of a single slot rank can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from packer.adapter import changed
from packer.arrays import IntArray, distinct
from packer.bin import Bin
from packer.plan import Plan
from packer.planning.explore import Frontier
from packer.planning.kept import Hour, KeptHours
from packer.planning.settle import with_best_slots, with_most_slots
from packer.search import reach
from packer.solvers.base import Bound
from packer.solvers.candidates import slot_ranks
from packer.solvers.order import golden
from packer.twin.hours import FRESH_HOURS, Hours
from packer.workload import Workload

WORTH_GPUS = 5  # Plans with fewer GPUs get no such estimate, which takes as long as three to five more servers.
WORTH_FRESH_GPUS = 10  # With fewer GPUs, full servers are not simulated in fresh hours: that takes half a second.
STEP = 1.02  # Ratio of successive loads: the load that breaks the goal is at most this factor above one that keeps it.
LEAST, MOST = -12, 20  # Steps from the load of a server of the plan: from 0.79 to 1.49 of it.
SAMPLES = 3  # Sample servers of each rank. The weakest decides, because every server of a plan must keep the goal.
FEW = 0.05  # A rank below this share of a load is not sampled: a sample could take millions of quiet copies.
MANY = 1 << 20  # More slots than a server has adapters: each adapter gets a slot.
SOURCE = "estimate: full servers of one slot rank keep the goal, if none of mixed ranks or other rates carries more"


def by_full_servers(job: Frontier, plan: Plan) -> Bound | None:
    """An estimate of the GPUs that a fleet needs; None if it is no higher than the known bound, or cannot be made.

    For each slot rank, `SAMPLES` servers get a fair sample of the rank's adapters, repeated if they are few. A sample
    begins with the load of the fullest server of that rank in the plan, and rates are scaled to exactly that load.
    Samples grow or shrink until they break the goal in an hour that the plan must keep; the weakest sample, also with
    other slots, gives the load that a server of the rank carries. Servers that mix ranks are assumed to carry what
    servers of their largest rank carry. It is not known whether the best mix of hot and quiet adapters, or of ranks,
    carries more than the samples.
    """
    fleet, known = job.parts.fleet, plan.lower_bound or 1.0
    every = job.kept.all_count and not job.replayed
    if not every or plan.n_gpus < WORTH_GPUS or known >= plan.n_gpus or job.over():
        return None
    ranks, loads = slot_ranks(fleet.ranks, job.profile), fleet.offered_tok_s_by_adapter
    fresh = job.kept.fresh(plan.bins, job.number) if plan.verified and plan.n_gpus >= WORTH_FRESH_GPUS else []
    fresh = fresh[:FRESH_HOURS]  # each sample server has its own draws, while equal servers take further hours
    _, unlucky = job.kept.by_luck(plan.bins)
    held = [*dict.fromkeys([*job.kept.hours, job.kept.given, *(hour for hour in fresh if hour not in unlucky)])]
    offered_tok_s, most_tok_s = [], []
    for rank in distinct(ranks).tolist():
        members = np.flatnonzero(ranks == rank)
        most = _most_tok_s(job, plan, held, members, rank)
        if most is None:
            return None
        offered_tok_s.append(float(loads[members].sum()))
        most_tok_s.append(most)
    gpus = min(fewest_servers(offered_tok_s, most_tok_s) * job.size, plan.n_gpus)
    return Bound(float(gpus), SOURCE) if known < gpus else None


def fewest_servers(offered_tok_s: Sequence[float], most_tok_s: Sequence[float]) -> int:
    """The fewest servers for the offered load of each slot rank, ascending; a server of it carries `most_tok_s`. The
    load of a rank that does not fill a server gets its own server, or goes to servers of the next larger rank."""
    last, fewest = len(most_tok_s) - 1, math.inf
    for passed_on in product((False, True), repeat=last):
        servers, left = 0, 0.0
        for k, (offered, carried) in enumerate(zip(offered_tok_s, most_tok_s, strict=True)):
            number = (left + offered) / carried
            whole = math.floor(number + 1e-6) if k < last and passed_on[k] else math.ceil(number - 1e-6)
            servers, left = servers + whole, max(0.0, left + offered - whole * carried)
        fewest = min(fewest, servers)
    return int(fewest)


def _most_tok_s(job: Frontier, plan: Plan, held: Sequence[Hour], members: IntArray, rank: int) -> float | None:
    """The load, tok/s, at which the weakest sample server of a slot rank breaks the goal in these hours, or that of the
    fullest server of the plan for a rank with little load; None if the search was cut short."""
    loads = job.parts.fleet.offered_tok_s_by_adapter
    falling = members[np.argsort(-loads[members], kind="stable")]
    # Any consecutive part of this order has a fair share of hot and of quiet adapters.
    order = falling[np.argsort(golden(len(falling)), kind="stable")]
    like = [item for item in plan.bins if item.max_lora_rank == rank] or plan.bins
    full = max(like, key=lambda item: item.offered_tok_s(job.workload))
    own = _Sample(job, held, order, full, rank)
    if loads[members].sum() < FEW * own.full_tok_s:
        return own.full_tok_s
    # Each further sample begins with the adapters that come after those of the one before.
    rolled = [np.roll(order, -k * own.size(0)) for k in range(1, SAMPLES)]
    own.search(LEAST, 0, 2)
    least = own
    for other in rolled:  # samples are much alike, and only the weakest decides
        sample = _Sample(job, held, other, full, rank)
        sample.search(LEAST, least.broken - 1, 1, least.broken - 1)
        least = min(least, sample, key=lambda each: each.broken)
    least.search_slots()
    return None if job.over() else least.tok_s(least.broken)


class _Sample:
    """A server with a sample of adapters, whose load grows until the server breaks the goal. `held`: the hours in which
    the server must keep the goal. `order`: rows of the adapters in the fleet; the first n are a fair sample for any n,
    and repeat beyond the last. `full`: the plan's server whose load is that of step 0."""

    def __init__(self, job: Frontier, held: Sequence[Hour], order: IntArray, full: Bin, rank: int) -> None:
        self.job, self.held, self.order, self.rank = job, held, order, rank
        self.hours = Hours(job.seed, job.over)
        self.slots = MANY if full.max_loras >= len(full.adapters) else full.max_loras
        self.full_tok_s = full.offered_tok_s(job.workload)
        self.broken = LEAST  # The lowest step found so far at which the server breaks the goal.
        self._fleets: dict[int, Workload] = {}

    def tok_s(self, step: int) -> float:
        """The offered load of a step."""
        return self.full_tok_s * STEP**step

    def size(self, step: int) -> int:
        """The number of adapters that offer the load of a step on average."""
        loads = self.job.parts.fleet.offered_tok_s_by_adapter[self.order]
        return max(1, round(self.tok_s(step) / float(loads.mean())))

    def at(self, step: int, held: Sequence[Hour]) -> tuple[KeptHours, Bin]:
        """Hours of the plan's, with the sample as fleet; and the server at exactly the step's load."""
        job, fleet = self.job, self.job.parts.fleet
        if step not in self._fleets:
            rows = np.resize(self.order, self.size(step))
            adapters = (changed(fleet.adapters[i], name=f"{k}") for k, i in enumerate(rows.tolist()))
            sample = replace(fleet, adapters=tuple(adapters))
            self._fleets[step] = sample.scaled(self.tok_s(step) / sample.offered_tok_s)
        sample = self._fleets[step]
        kept = KeptHours(sample, self.hours.at(sample, 1.0 + (job.margin or 0.0)), job.seed, self.hours)
        kept.hours = [hour._replace(fleet=kept.raised if hour.fleet is job.raised else sample) for hour in held]
        every = Bin(tuple(range(len(sample))), job.profile.settings(1, self.rank), job.profile)
        return kept, with_most_slots([every], self.slots)[0]

    def search(self, low: int, start: int, step: int, most: int = MOST) -> None:
        """Find the lowest step up to `most` that breaks the goal, else `most` + 1, from `start` in steps that double.
        The first hour is searched so; each further one only below the step that breaks the hours before it."""

        def holds(hour: Hour, at: int) -> bool:
            kept, server = self.at(at, [hour])
            return kept.holds_one(server)

        self.broken = most + 1
        for hour in self.held:
            self.broken = reach(partial(holds, hour), low, self.broken - 1, start, step, self.job.over)[1]
            start, step = self.broken - 1, 1

    def search_slots(self) -> None:
        """Search on with other slots as long as they keep the goal at the step that broke it."""
        while self.broken <= MOST and not self.job.over():
            kept, server = self.at(self.broken, self.held)
            (other,) = with_best_slots(kept, [server], kept.hours, self.job.over, tight=1.0)
            if not kept.holds_one(other):
                return
            self.slots = other.max_loras
            self.search(self.broken, self.broken, 1)
