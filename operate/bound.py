"""How many GPUs any plan that keeps the latency goal needs at the least."""

from __future__ import annotations

from dataclasses import replace

from packer.arrival import Arrivals
from packer.objectives.slo import Slo
from packer.operate.explore import Frontier, search_predictor
from packer.plan import Plan
from packer.solvers.assemble import ONE_GPU
from packer.solvers.backbone import load_bound
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.solvers.exact.estimate import estimated

_SECONDS = 5.0
"""For the estimate, which takes tenths of one for hundreds of adapters: whatever is cut depends on the machine."""


def bounded(job: Frontier, plan: Plan) -> Plan:
    """The plan with the higher of two bounds on its GPUs.

    Proven relative to the twin: what the load takes of engines that answer all requests. An estimate: a search with
    trained trees, for Poisson arrivals, found no fuller servers whose median TTFT and mean ITL are within the goal.
    """
    limits_ttft_ms, limits_itl_ms = (float(each.max()) for each in job.workload.slo.columns(job.workload))
    every, margin = job.kept.required == len(job.workload), job.margin or 0.0
    servers = load_bound(job.workload, job.profile, margin, simulated=False, stable=True)
    proven, source = True, ONE_GPU if servers == 1 else "load on GPUs without adapters, by the twin"
    size = job.profile.engine.tensor_parallel_size
    if servers < len(plan.bins) and every and not job.over():
        goal = Slo(median_ttft_ms=limits_ttft_ms, mean_itl_ms=limits_itl_ms, stable=True)
        calm = job.parts.fleet.with_arrivals(Arrivals())
        evaluator = Evaluator(search_predictor(job.profile, job.seed), goal, margin)
        limit_s = min(_SECONDS, job.remaining_s())
        found = estimated(
            Problem(calm, (job.profile,), goal, evaluator, seed=job.seed, time_limit_s=limit_s, stop=job.stop)
        )
        if servers < found.value <= len(plan.bins):
            servers, proven = found.value, False
            source = "estimate: trained trees find no fuller servers within these limits"
    if servers > len(plan.bins):  # the plan refutes it: 5 % were not enough for chance
        return plan
    return replace(plan, lower_bound=float(servers * size), bound_proven=proven, bound_source=source)
