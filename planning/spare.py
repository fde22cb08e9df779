"""Plans that hold when any one server is lost, with all of its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from packer.bin import Bin
from packer.failover import with_slots_for_loss, without_server
from packer.plan import Plan, Status
from packer.planning.apart import cheapest
from packer.planning.assemble import assemble
from packer.planning.replicas import Replicas
from packer.planning.splits import even_in_time
from packer.solvers.base import Problem, Solution
from packer.solvers.candidates import candidates_of
from packer.solvers.greedy.solver import Greedy
from packer.solvers.slots import Climb, SlotSearch, search
from packer.solvers.spread_refined import SpreadRefined
from packer.words import counted

MORE = 4  # The search ends at this multiple of the servers of the plan without a spare server, plus one.
LEAST_APART = 4  # Fewest servers with classes apart: two groups, each with a spare server.
APART = 0.5  # Share of the time left for servers of which each has classes with similar limits only.


def with_spare(problem: Problem, plan: Plan, *, spread: bool = False) -> Plan:
    """The plan with the fewest servers, more than the given one has, that holds when any one of them is lost. `spread`:
    the given one takes all servers at hand, as the plan may.

    Adapters are spread over the servers whole, or those with more load than a server's share in as many parts as they
    may have. The slots of every server fit the largest rank, and suffice for the adapters that the server receives when
    another one is lost (`packer.failover`). The plan is infeasible if none is found on the GPUs of the problem
    (`max_gpus`, `stock`).

    Raises `VerificationError`: the plan breaks a rule of plans.
    """
    size, name, copies = problem.profile.engine.gpus, problem.profile.gpu.name, problem.max_replicas
    most = min(len(problem.workload) * copies, MORE * (len(plan.bins) + 1))
    at_hand = min(most, problem.stock.get(name, most * size) // size)
    allowed = at_hand if problem.max_gpus is None else min(at_hand, problem.max_gpus // size)
    low = max(2, len(plan.bins) + (not spread))
    bins = _fewest(problem, low, min(LEAST_APART, allowed))
    if not bins:
        apart, low = _apart(problem.with_share(APART), allowed), max(low, LEAST_APART + 1)
        bins = _fewest(problem, low, len(apart) - 1 if apart else allowed) or apart
    if bins:
        without = {} if spread else {"gpus_without_spare": plan.n_gpus}
        solution = Solution(tuple(bins), details={**plan.statistics, "spare": 1, **without})
        return assemble(problem, solution, plan.solver, problem.elapsed_s())
    why = "The search ended before a plan was found that holds when any GPU is lost: a longer --time-limit."
    if not problem.out_of_time():
        more = "more GPUs at hand" if allowed == at_hand < most else "more GPUs"
        more = f"--max-replicas {copies + 1} or more" if allowed == most else more
        none = f"No plan on up to {counted(allowed * size, 'GPU')} holds when any of them is lost."
        why = f"{none} What would help: {more}"
    return replace(plan, status=Status.INFEASIBLE, reasons=(*plan.reasons, why))


def _fewest(problem: Problem, low: int, high: int) -> list[Bin] | None:
    """The fewest servers from `low` to `high` that hold when any one is lost; None if none are found in time."""
    for n, parts in ((k, parts) for k in range(low, high + 1) for parts in _divided(problem, k)):
        if problem.out_of_time():
            break
        problem.progress(f"simulating {counted(n, 'server')}, one of them lost", 0, 0)
        for split in _splits(replace(problem, workload=parts.fleet, max_gpus=n, max_replicas=1), n):
            bins = _with_slots(problem, parts.joined(split)) if len(split) == n else None
            if bins is not None and _survives(problem, bins):
                return bins
    return None


def _splits(problem: Problem, n: int) -> Iterator[Sequence[Bin]]:
    """Yield the running servers if there are `n` with all adapters, the solver's split on `n` servers, and one that is
    even after the loss of any one."""
    placed = sorted(i for item in problem.old_bins for i in item.adapters)
    if len(problem.old_bins) == n and placed == [*range(len(problem.workload))]:
        yield problem.old_bins
    yield SpreadRefined().solve(problem).bins
    if not problem.out_of_time():
        yield from even_in_time(problem.workload, problem.profile, n, 1, problem.seed)


def _apart(problem: Problem, most: int) -> list[Bin]:
    """Up to `most` servers, those of classes with other limits apart, each group with its own spare server; [] if none
    are found."""
    fleet, copies, order = problem.workload, problem.max_replicas, problem.workload.slo.order(problem.workload)

    def found(start: int, end: int) -> list[Bin] | None:
        own = np.flatnonzero((order >= start) & (order < end)).tolist()
        posed, high = replace(problem, workload=fleet.subset(own), max_gpus=None), min(most, len(own) * copies)
        bins = _fewest(posed, len(Greedy().solve(posed).bins) + 1, high)
        return None if bins is None else [item.under(own) for item in bins]

    bins = [item for group in cheapest(int(order.max()) + 1, found, len) for item in group]
    return bins if 0 < len(bins) <= most and _survives(problem, bins) else []


def _divided(problem: Problem, n: int) -> Iterator[Replicas]:
    """Yield the fleet with whole adapters, and with those in parts that have more load than a share of `n` servers."""
    fleet, copies = problem.workload, problem.max_replicas
    yield Replicas(fleet, {})
    loads = fleet.offered_tok_s_by_adapter
    hot = np.flatnonzero(loads * n > loads.sum()).tolist()
    if hot and copies > 1 and fleet.arrivals.trace is None:
        yield Replicas(fleet, dict.fromkeys(hot, min(copies, n)))


def _with_slots(problem: Problem, bins: Sequence[Bin]) -> list[Bin] | None:
    """The bins with the slots that they need with and without any other bin; None if no number is enough."""
    rank = max(item.max_lora_rank for item in bins)
    wide = [replace(item, settings=item.profile.settings(item.max_loras, rank)) for item in bins]

    def slotted(left: Sequence[Bin]) -> list[Bin] | None:
        """The bins with the fewest slots, from their own upwards, with which each holds; None if one never does."""
        climbs = []
        for item in left:
            rising = [[n] for n in candidates_of(item) if n > item.max_loras]
            climbs.append(Climb(item, 0, [[item.max_loras], *rising], until_holds=True))
        found = search(climbs, SlotSearch(problem).rated)
        made = [item for item in found if item is not None]
        return made if len(made) == len(left) else None

    return with_slots_for_loss(problem.workload, wide, slotted)


def _survives(problem: Problem, bins: Sequence[Bin]) -> bool:
    """Whether the whole predictor admits the bins, and the remaining bins after the loss of any one."""
    states = [tuple(bins), *(without_server(problem.workload, bins, lost)[0] for lost in range(len(bins)))]
    for state in states:
        found = problem.evaluator.judged(problem.workload, state)
        if problem.out_of_time() or not problem.objective.holds(found).all():
            return False
    return True
