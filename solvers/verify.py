"""The independent checker: no plan leaves `packer.solvers.api` unseen, whoever made it.

It shares nothing with the solvers: it reads the bins, and asks the predictor and the twin itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluation, Evaluations
from packer.checks import slot_rank_for
from packer.errors import VerificationError
from packer.objectives.base import Objective
from packer.predictors.base import Predictor
from packer.predictors.twin import TwinPredictor
from packer.solvers.base import Problem, Solution
from packer.twin.memory.policy import memory_error
from packer.workload import Workload

_SHARE_TOLERANCE = 1e-6
FRESH_SEED = 1_000_003
"""Added to the plan's seed for the twin's verdict, far from the seeds that any predictor uses."""

LATENCY_SLACK = 1.02
"""Latencies differ by a percent or so from seed to seed: a limit breaks where it is exceeded by more than 2 %."""


def check(problem: Problem, solution: Solution) -> None:
    """Raise unless the solution keeps the rules of a plan.

    Each adapter is in one bin, or its shares sum to 1 over at most `max_replicas` bins, or it is unplaced;
    ranks fit the slots; GPU types are those of the problem; there are at most `max_gpus` bins.

    Raises
    ------
    VerificationError
        Naming the rule, the bin and the adapter.
    """
    workload = problem.workload
    placed = np.zeros(len(workload))
    copies = np.zeros(len(workload), dtype=np.int64)
    for k, bin_ in enumerate(solution.bins):
        _check_bin(problem, k, bin_)
        index = list(bin_.adapters)
        placed[index] += np.array(bin_.shares)
        copies[index] += 1
    expected = np.ones(len(workload))
    if not all(0 <= i < len(workload) for i in solution.unplaced):
        raise VerificationError(f"An unplaced adapter is not one of the {len(workload)} of the workload.")
    expected[list(solution.unplaced)] = 0.0
    for i in np.flatnonzero(np.abs(placed - expected) > _SHARE_TOLERANCE).tolist():
        name = workload.adapters[i].name
        want = "unplaced" if expected[i] == 0 else "placed once (its shares sum to 1)"
        raise VerificationError(f"Adapter {name!r} is to be {want}, but its shares sum to {placed[i]:g}.")
    for i in np.flatnonzero(copies > problem.max_replicas).tolist():
        raise VerificationError(
            f"Adapter {workload.adapters[i].name!r} is on {copies[i]} GPUs, more than the "
            f"{problem.max_replicas} allowed."
        )
    if problem.max_gpus is not None and len(solution.bins) > problem.max_gpus:
        raise VerificationError(f"The plan has {len(solution.bins)} GPUs, more than {problem.max_gpus}.")


def _check_bin(problem: Problem, k: int, bin_: Bin) -> None:
    if max(bin_.adapters) >= len(problem.workload):
        raise VerificationError(f"GPU {k} holds adapter number {max(bin_.adapters)}, which does not exist.")
    rank = int(problem.workload.ranks[list(bin_.adapters)].max())
    if bin_.max_lora_rank < slot_rank_for(rank):
        raise VerificationError(
            f"GPU {k} has slots of rank {bin_.max_lora_rank} for an adapter of rank {rank}."
        )
    if bin_.profile not in problem.profiles:
        raise VerificationError(f"GPU {k} is a {bin_.profile.name!r}, which the problem does not offer.")


def ask_twin(
    workload: Workload, bins: Sequence[Bin], *, seed: int, objective: Objective | None = None
) -> dict[int, str]:
    """Why which bins fail, by the twin and with a seed that no search has seen; see `failures`."""
    return failures(TwinPredictor(seed=seed + FRESH_SEED), workload, bins, objective)


def failures(
    judge: Predictor, workload: Workload, bins: Sequence[Bin], objective: Objective | None = None
) -> dict[int, str]:
    """Why which bins fail, by the twin: bin → one sentence, in order of the bins.

    Starvation and memory at the nominal rates; then what the objective wants beyond, at its own loads: which of
    its `limits` (name of a figure → ms) are exceeded by more than `LATENCY_SLACK`, or what its method `explain`
    says, where it has them.
    A plan that was read from a file knows the objective by name alone: without one only the first is checked.
    """
    found = judge.evaluate(workload, bins)
    failed = {}
    for k, row in enumerate(found):
        if row.memory_error:
            why = memory_error(bins[k].profile, bins[k].settings)
            failed[k] = f"GPU {k} does not start in the twin: {why}"
        elif row.starved:
            share = f"{row.served_share:.0%} of its load served"
            failed[k] = f"GPU {k} starves in the twin with a fresh seed: {share}"
    if objective is not None:
        failed = {**_broken_limits(judge, workload, bins, objective), **failed}
    return dict(sorted(failed.items()))


def _broken_limits(
    judge: Predictor, workload: Workload, bins: Sequence[Bin], objective: Objective
) -> dict[int, str]:
    found = judge_for(objective, judge).evaluate(workload, bins)
    broken = np.flatnonzero(~keeps_limits(objective, found)).tolist()
    if not broken:
        return {}
    explain = getattr(objective, "explain", None)
    known: dict[int, str] = {} if explain is None else explain(judge, workload, bins)
    return {
        k: f"GPU {k} breaks the objective {objective.name!r} in the twin with a fresh seed: "
        + (known.get(k) or _exceeded(objective, found[k]) or "it is not admissible")
        for k in broken
    }


def _exceeded(objective: Objective, row: Evaluation) -> str:
    """Which latency limits of the objective a bin exceeds, with its figures."""
    limits: Mapping[str, float] = getattr(objective, "limits", {})
    over = {
        key: limit
        for key, limit in limits.items()
        if not getattr(row, key, 0.0) <= limit * LATENCY_SLACK  # NaN, too, is beyond every limit
    }
    return ", ".join(f"{key} is {getattr(row, key):,.0f}, at most {over[key]:g} allowed" for key in over)


def judge_for(objective: Objective, predictor: Predictor) -> Predictor:
    """The predictor as the objective wants it asked, for instance at several loads."""
    wrap = getattr(objective, "judge", None)
    judge: Predictor = predictor if wrap is None else wrap(predictor)
    return judge


def keeps_limits(objective: Objective, found: Evaluations) -> npt.NDArray[np.bool_]:
    """Which bins the objective admits when latencies may exceed its limits by the slack, bool (n,)."""
    latencies = [item.name for item in fields(found) if item.name.endswith("_ms")]
    eased = {name: getattr(found, name) / LATENCY_SLACK for name in latencies}
    return objective.admissible(replace(found, **eased))
