"""Build a plan from a solver's solution: evaluate it again, and add its status, bound and provenance."""

from __future__ import annotations

import platform
from collections.abc import Sequence

import numpy as np

from packer.bin import Bin, indices
from packer.errors import PluginError, VerificationError
from packer.evaluation import STARVATION_THRESHOLD, Evaluation
from packer.objectives.base import Objective
from packer.plan import Plan, Status
from packer.planning.prove import closed, rounded
from packer.planning.verify import check
from packer.profile import Profile, labelled
from packer.solvers.base import Problem, Solution
from packer.solvers.candidates import beyond_measured
from packer.solvers.confirm import holding
from packer.solvers.headroom import MOST_GPUS
from packer.twin.memory.policy import memory_error
from packer.twin.memory.starts import what_starts
from packer.version import __version__
from packer.words import counted


def assemble(problem: Problem, solution: Solution, solver: str, runtime_s: float, *, verify: bool = False) -> Plan:
    """The plan of a solution, which is checked, and evaluated again at the rates as given.

    `verify`: the plan is verified later. Until then the figures of a plan that is `simulated_once` include the margin.

    Raises `VerificationError`: the solution breaks a rule (`verify.check`), or its proven bound is above its own plan;
    `PluginError`: the objective's key of a plan that holds is empty or has NaN.
    """
    try:
        check(problem, solution)
    except VerificationError as error:
        raise VerificationError(f"The solver {solver!r}: {error}") from None
    evaluator, goal = problem.evaluator, problem.objective
    once = verify and not solution.unplaced and simulated_once(problem, solution.bins)
    evaluations = (evaluator.judged if once else evaluator.report)(problem.workload, solution.bins)
    if once and not goal.holds(evaluations).all():
        evaluations = evaluator.report(problem.workload, solution.bins)
    holds = goal.holds(evaluations)
    if not holds.all():  # a bin that holds with the margin may be a percent slower without it
        held = goal.holds(evaluator.judged(problem.workload, solution.bins))
        holds |= held & holding(goal, evaluations)
    key = goal.key(problem.workload, solution.bins, evaluations) if solution.bins else ()
    status = Status.FEASIBLE if all(holds) and not solution.unplaced else Status.INFEASIBLE
    if status is Status.FEASIBLE and solution.bins and (not len(key) or np.isnan(key).any()):
        raise PluginError(f"Expected a key of numbers of the objective {goal.name!r}, got {key}.")
    claimed = solution.lower_bound
    slack = 1e-6 * max(1.0, abs(key[0])) if status is Status.FEASIBLE else 0.0  # a linear program's bound
    if solution.proven and status is Status.FEASIBLE and not (claimed is None or claimed <= key[0] + slack):
        rule = f"The solver {solver!r} says that no plan has less than {claimed:g}"
        raise VerificationError(f"{rule}, and its own has {key[0]:g}.")
    bound = None if claimed is None else rounded(problem, claimed)
    return closed(
        problem,
        Plan(
            workload=problem.workload,
            bins=solution.bins,
            evaluations=evaluations,
            status=status,
            objective=goal.name,
            solver=solver,
            predictor=evaluator.name,
            objective_value=key,
            lower_bound=bound,
            bound_proven=solution.proven and bound is not None,
            bound_source=solution.bound_source,
            margin=evaluator.largest_margin(solution.bins),
            moves=solution.moves,
            interrupted=problem.stop(),
            time_limit_reached=problem.remaining_s() <= 0,
            reasons=(
                *solution.reasons,
                *beyond_measured(problem.workload, solution.bins)[:8],
                *(
                    f"server {k} {_broken(problem, solution.bins[k], evaluations[k])}"
                    for k in np.flatnonzero(~holds).tolist()
                ),
            ),
            unplaced=solution.unplaced,
            runtime_s=runtime_s,
            seed=problem.seed,
            versions=versions(problem.profiles),
            limits=dict(goal.limits),
            statistics=solution.details,
        ),
    )


def without_idle_slots(problem: Problem, bins: Sequence[Bin]) -> tuple[Bin, ...]:
    """The bins without slots for which they have no adapter, where they hold like that, too: requests to the base model
    take no slot. Bins with more slots than adapters of any rank keep these, which were chosen."""
    ranks, fewer = problem.workload.ranks, {}
    for k, item in enumerate(bins):
        loras = max(1, int(np.count_nonzero(ranks[indices(item.adapters)])))
        if loras < item.max_loras <= len(item.adapters):
            fewer[k] = item.with_slots(loras)
    tried = list(fewer.values())
    holds = problem.objective.holds(problem.evaluator.judged(problem.workload, tried)) if tried else ()
    kept = {k: item for (k, item), ok in zip(fewer.items(), holds, strict=True) if ok}
    return tuple(kept.get(k, item) for k, item in enumerate(bins))


def simulated_once(problem: Problem, bins: Sequence[Bin]) -> bool:
    """Whether only the verification simulates a plan's servers at the rates as given, because the plan is large. The
    twin must have admitted the servers with the margin, and the objective must not need their figures."""
    goal = problem.objective
    plain = type(goal).key is Objective.key and not (goal.figures or goal.fixed_gpus or goal.spare)
    return plain and problem.evaluator.confirms and len(bins) > MOST_GPUS


def _broken(problem: Problem, item: Bin, row: Evaluation) -> str:
    """Why a server may not be part of a plan, and what would help, as words that follow its number."""
    name = problem.objective.name
    if row.memory_error:
        server = item.profile, item.settings, item.workload(problem.workload)
        why, ways = memory_error(*server), what_starts(*server)
        return f"does not start: {why or 'memory error'}. What would start: {ways}"
    if row.starved:
        several = len(problem.evaluator.scenarios(problem.workload)) > 1
        beyond = f"at a load of the objective {name!r}" if several else "with rates raised by the margin"
        where, given = (f" {beyond}", " as given") if row.served_share >= STARVATION_THRESHOLD else ("", "")
        said = f"starves{where}: the load of {counted(len(item.adapters), 'adapter')} is {row.offered_tok_s:,.0f}"
        return f"{said} tok/s{given}, {row.total_token_throughput:,.0f} are served. What would help: more GPUs"
    broken = [
        f"{key} {value:,.{0 if top >= 10.0 else 2}f} > {top:g}"
        for key, top in problem.objective.limits.items()
        if (value := getattr(row, key)) > top
    ]
    broken = [text for text in broken if not text.startswith("slo_used")] or broken
    return f"breaks a limit of the objective {name!r}{': ' * bool(broken)}{', '.join(broken)}"


def versions(profiles: Sequence[Profile]) -> dict[str, str]:
    """The versions that determine a result: packer, Python, and each profile's fingerprint."""
    prints = {f"profile {label}": profile.fingerprint for profile, label in labelled(profiles).items()}
    return {"packer": __version__, "python": platform.python_version(), **prints}
