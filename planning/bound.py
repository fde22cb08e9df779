"""How many GPUs any plan that keeps the latency goal needs at the least."""

from __future__ import annotations

from dataclasses import replace

from packer.goal import Goal
from packer.objectives.slo import Slo
from packer.plan import Plan
from packer.planning.assemble import ONE_GPU
from packer.planning.explore import Frontier
from packer.solvers.backbone import load_bound
from packer.solvers.base import Problem, limit_of
from packer.solvers.columns.estimate import with_estimate
from packer.solvers.evaluator import Evaluator


def bounded(job: Frontier, plan: Plan) -> Plan:
    """The plan with the higher of two bounds on its GPUs.

    Proven relative to the twin: what the load takes of engines that answer all requests. An estimate: a search with
    trained trees, for Poisson arrivals, found no fuller servers whose median TTFT and mean ITL are within the goal.
    """
    limits_ttft_ms, limits_itl_ms = (float(each.max()) for each in job.workload.slo.columns(job.workload))
    margin = job.margin or 0.0
    servers = load_bound(job.workload, job.profile, margin, simulated=False, stable=True)
    source = ONE_GPU if servers == 1 else "load alone, by the twin"
    if servers > len(plan.bins):  # the plan refutes it: 5 % were not enough for chance
        return plan
    gpus = float(servers * job.profile.engine.tensor_parallel_size)
    known = replace(plan, lower_bound=gpus, bound_proven=True, bound_source=source)
    if job.kept.required < len(job.workload) or job.over():
        return known
    limits = {"server.median_ttft_ms": limits_ttft_ms, "server.mean_itl_ms": limits_itl_ms}
    goal = Slo(stable=True).within(Goal.only(limits))
    evaluator = Evaluator(job.predictor, goal, margin)
    posed = Problem(
        job.parts.calm, (job.profile,), goal, evaluator, seed=job.seed, stop=job.stop,
        time_limit_s=limit_of(job.remaining_s()),
    )  # fmt: skip
    return with_estimate(posed, known)
