"""Judging a finished plan again: another predictor, seed, duration or load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.evaluation import Evaluations
from packer.plan import Plan, Status
from packer.solvers.evaluator import Evaluator
from packer.solvers.verify import FRESH_SEED
from packer.strategies import Predictor
from packer.twin.simulate import simulate
from packer.twin.until_clear import evaluation_of
from packer.workload import Workload


def evaluate_plan(
    plan: Plan,
    predictor: str | Predictor = "twin",
    *,
    seed: int | None = None,
    duration_s: float | None = None,
    rate_factor: float = 1.0,
) -> Plan:
    """The same bins with new evaluations, at the rates as given times `rate_factor`, without a margin.

    Parameters
    ----------
    plan
        A plan with at least one bin.
    predictor
        Who judges.
    seed
        Of the judge; None takes one that no search has used.
    duration_s
        Simulated time of each server, for the twin only; None: as long as a clear verdict needs.
    rate_factor
        Every rate times this.

    Raises
    ------
    IncompatibleError
        The plan has no bins, or a duration was given for a predictor that does not simulate.
    """
    if not plan.bins:
        raise IncompatibleError("The plan has no GPUs, so there is nothing to evaluate.")
    workload = plan.workload if rate_factor == 1.0 else plan.workload.scaled(rate_factor)
    used = plan.seed + FRESH_SEED if seed is None else seed
    profiles = list(dict.fromkeys(item.profile for item in plan.bins))
    judge = Evaluator.load(predictor, profiles, seed=used)
    if duration_s is None:
        found = judge.evaluate(workload, plan.bins)
    elif judge.name == "twin":
        found = _simulated(workload, plan.bins, used, duration_s)
    else:
        raise IncompatibleError(f"A duration needs the predictor 'twin': {judge.name!r} does not simulate.")
    whole = not plan.unplaced and bool(found.feasible.all())
    return replace(
        plan,
        workload=workload,
        evaluations=found,
        status=Status.FEASIBLE if whole else Status.INFEASIBLE,
        predictor=judge.name,
        objective_value=(),
        lower_bound=None,
        bound_proven=False,
        bound_source="",
        margin=None,
        headroom=(),
        moves=None,
        interrupted=False,
        time_limit_reached=False,
        reasons=(),
        verified=whole if judge.name == "twin" else None,
        seed=used,
        details={"evaluated": True, "rate_factor": rate_factor, "duration_s": duration_s},
    )


def _simulated(workload: Workload, bins: Sequence[Bin], seed: int, duration_s: float) -> Evaluations:
    rows = []
    for item in bins:
        result = simulate(
            item.workload(workload),
            item.profile,
            max_loras=item.max_loras,
            max_lora_rank=item.max_lora_rank,
            duration_s=duration_s,
            seed=seed,
            timeline_bin_s=duration_s,
        )
        rows.append(evaluation_of([result]))
    return Evaluations.of(rows)
