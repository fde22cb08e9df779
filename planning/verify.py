"""The independent checker: every plan that `packer.planning.solve` returns is checked, whichever solver made it. It
shares nothing with the solvers but the evaluator: it reads the bins and has the twin simulate them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from packer.bin import Bin, indices
from packer.errors import ValidationError, VerificationError
from packer.evaluation import Evaluation, Evaluations
from packer.objectives.base import Objective
from packer.placement import check_placement
from packer.plan import SAID, Plan
from packer.predictors.twin import TwinPredictor
from packer.seeds import fresh
from packer.solvers.base import Problem, Solution, used_gpus
from packer.solvers.confirm import holding
from packer.solvers.evaluator import Evaluator
from packer.twin.margin import LATENCY_SLACK
from packer.twin.memory.policy import memory_error
from packer.twin.stability import stability
from packer.workload import Workload

FRESH = "in the twin with a fresh seed"


def check(problem: Problem, solution: Solution) -> None:
    """Raise unless the solution keeps the rules of a plan.

    Each adapter is in one bin, or its shares sum to 1 over at most `max_replicas` bins, or it is unplaced;
    ranks fit the slots; GPU types are in the problem; there are at most `max_gpus` GPUs,
    and of each kind no more than are at hand; details have none of the names in `packer.plan.SAID`.

    Raises `VerificationError`: naming the rule, the bin and the adapter.
    """
    workload = problem.workload
    if taken := sorted(solution.details.keys() & SAID):
        raise VerificationError(f"Expected details of other names than the plan's own, got {taken[0]!r}.")
    try:
        bins = [replace(item) for item in solution.bins]  # a search makes bins without checks
        check_placement(workload, bins, solution.unplaced)
    except ValidationError as error:
        raise VerificationError(str(error)) from None
    copies = np.zeros(len(workload), dtype=np.int64)
    for k, bin_ in enumerate(solution.bins):
        if bin_.profile not in problem.profiles:
            raise VerificationError(f"server {k} is a {bin_.profile.name!r}, which the problem does not offer.")
        copies[indices(bin_.adapters)] += 1
    for i in np.flatnonzero(copies > problem.max_replicas).tolist():
        rule = f"Adapter {workload.adapters[i].name!r} is on {copies[i]} GPUs,"
        raise VerificationError(f"{rule} more than the {problem.max_replicas} allowed.")
    gpus = sum(item.gpus for item in solution.bins)
    if problem.max_gpus is not None and gpus > problem.max_gpus:
        raise VerificationError(f"The plan has {gpus} GPUs, more than {problem.max_gpus}.")
    used = used_gpus(solution.bins)
    for name, most in problem.stock.items():
        if used.get(name, 0) > most:
            raise VerificationError(f"The plan has {used[name]} GPUs {name}, more than the {most} at hand.")


def verified(plan: Plan, objective: Objective | None = None, *, figures: bool = False, number: int = 0) -> Plan:
    """The plan, `verified` by the twin with a fresh seed at the rates as given and at the loads of the objective.

    Without an objective (a plan in a file has only its name), only starvation and memory are checked.
    `figures`: replace the plan's figures by the twin's at the rates as given, except for which servers starve.
    `number`: number of plans judged before. If it is not 0, the plan must also hold in one more fresh hour.
    """
    twin = TwinPredictor(seed=fresh(plan.seed))
    failures = twin_failures(plan.workload, plan.bins, twin=twin, objective=objective)
    if number and not failures:
        another = TwinPredictor(seed=fresh(plan.seed, 1 + number))
        failures = twin_failures(plan.workload, plan.bins, twin=another, objective=objective)
    if figures:
        known = {name: getattr(plan.evaluations, name) for name in ("starved", "memory_error", "stable")}
        plan = replace(plan, evaluations=replace(twin.evaluate(plan.workload, plan.bins), **known))
    return replace(plan, verified=not failures, reasons=(*plan.reasons, *failures.values()))


def twin_failures(
    workload: Workload, bins: Sequence[Bin], *, twin: TwinPredictor, objective: Objective | None = None
) -> dict[int, str]:
    """Which bins fail in the twin with a seed that no search has used (`packer.seeds.fresh`): bin → why, a sentence.

    Every scenario of the objective is simulated without a margin, the rates as given first; limits may be exceeded by
    `LATENCY_SLACK`. If the objective demands stable servers, each is simulated until it is clear whether its queue
    grows. Without an objective (a plan from a file has only its name), starvation and memory are checked at the given
    rates.
    """
    evaluator = Evaluator(twin, objective)
    found = evaluator.scaled(workload, bins)
    failed = {k: _broken(k, bins[k], workload, row) for k, row in enumerate(found) if not row.feasible}
    if objective is not None:
        if objective.stable:
            for k in sorted({*range(len(bins))} - failed.keys()):
                server, started = bins[k].workload(workload), asdict(bins[k].settings)
                queue = stability(server, bins[k].profile, seed=twin.seed, **started)
                if not queue.stable:
                    more = f"its queue grows by {3600.0 * max(0.0, queue.growth_req_s):,.0f} requests an hour"
                    failed[k] = _breaks(k, objective, more)
        for scenario in evaluator.scenarios(workload):
            rows = evaluator.scaled(scenario.workload, bins, scenario.factor)
            for k in np.flatnonzero(~rows.feasible).tolist():
                share = f"{scenario.name}, {rows[k].served_share:.0%} of the load is served"
                failed.setdefault(k, _breaks(k, objective, share))
        failed = beyond_limits(objective, evaluator.evaluate(workload, bins), FRESH) | failed
    return dict(sorted(failed.items()))


def beyond_limits(objective: Objective, rows: Evaluations, when: str) -> dict[int, str]:
    """Which of the servers with these figures the objective refuses, apart from `LATENCY_SLACK`: server → why, a
    sentence. `when`: where the figures come from."""
    return {
        k: _breaks(k, objective, _exceeded(objective, rows[k]) or "it does not hold", when)
        for k in np.flatnonzero(~holding(objective, rows)).tolist()
    }


def _broken(gpu: int, bin_: Bin, fleet: Workload, row: Evaluation) -> str:
    if row.memory_error:
        why = memory_error(bin_.profile, bin_.settings, bin_.workload(fleet))
        return f"server {gpu} does not start in the twin: {why}"
    return f"server {gpu} starves in the twin with a fresh seed: {row.served_share:.0%} of its load served"


def _breaks(gpu: int, objective: Objective, why: str, when: str = FRESH) -> str:
    return f"server {gpu} breaks the objective {objective.name!r} {when}: {why}"


def _exceeded(objective: Objective, row: Evaluation) -> str:
    """Which latency limits of the objective a bin exceeds, with its figures."""
    over = {
        key: limit
        for key, limit in objective.limits.items()
        if not getattr(row, key) <= limit * LATENCY_SLACK  # NaN, too, is beyond every limit
    }
    return ", ".join(f"{key} is {getattr(row, key):,.0f}, at most {over[key]:g} allowed" for key in over)
