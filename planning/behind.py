"""Whether a router that sees the queues of servers would keep the goal on fewer servers than a plan."""

from __future__ import annotations

from packer.cluster import Cluster
from packer.plan import Plan
from packer.planning.explore import Frontier
from packer.planning.kept import SERVER_HOURS
from packer.solvers.candidates import most_slots_of
from packer.twin.hours import FRESH_HOURS
from packer.words import counted

ROUTER = "affinity:slack=16"
SLOTS = (32, 16, 64)


def fewer_behind_router(job: Frontier, plan: Plan) -> tuple[str, ...]:
    """A sentence if one server fewer, with every adapter on each server, keeps the goal behind `ROUTER` in hours
    of the plan, fresh ones included (`_held`); () otherwise.

    Simulated only if adapters are busy at different times: no fleet with constant rates, or rates that rise and fall
    together, was found to need fewer servers behind a router. The first hour that breaks the goal ends a simulation.
    """
    arrivals, servers = job.workload.arrivals, len(plan.bins) - 1
    apart = arrivals.kind == "unpredictable" or arrivals.own is not None
    if not apart or servers < 1 or plan.verified is not True or job.spare:
        return ()
    rank = max(item.max_lora_rank for item in plan.bins)
    most = min(len(job.workload), most_slots_of(job.profile, rank))
    for slots in dict.fromkeys(min(most, each) for each in SLOTS):
        if n := _held(job, plan, Cluster.of(job.profile, servers, max_loras=slots, max_lora_rank=rank)):
            gpus = counted(servers * job.size, "GPU")
            return (
                f"{gpus} keep the goal in all {n} hours tried with every adapter on each server (max_loras {slots}) "
                f"behind a router that sees their queues: packer simulate --cluster … --router {ROUTER}.",
            )
    return ()


def _held(job: Frontier, plan: Plan, cluster: Cluster) -> int:
    """The number of hours in which these servers were found to keep the goal: the hours that the plan was made for, and
    as many fresh ones as take `SERVER_HOURS`, at least `FRESH_HOURS`; 0 if one breaks it or the time runs out first."""
    from packer.twin.cluster.simulate import simulate_cluster

    fresh = job.kept.tried(plan.bins, job.number)[: max(FRESH_HOURS, -(-SERVER_HOURS // len(cluster.servers)))]
    hours = dict.fromkeys((*job.kept.hours, job.kept.given, *fresh))
    for hour in hours:
        if job.over() or simulate_cluster(hour.fleet, cluster, router=ROUTER, seed=hour.seed).slo_used > 1.0:
            return 0
    return len(hours)
