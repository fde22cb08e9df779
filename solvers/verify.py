"""The independent checker: no plan leaves `packer.solvers.api` unseen, whoever made it.

It shares nothing with the solvers: it reads the bins, and asks the predictor and the twin itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.errors import VerificationError
from packer.predictors.twin import TwinPredictor
from packer.solvers.base import Problem, Solution
from packer.twin.memory import memory_error
from packer.workload import Workload

_SHARE_TOLERANCE = 1e-6
FRESH_SEED = 1_000_003
"""Added to the plan's seed for the twin's verdict, far from the seeds that any predictor uses."""


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
        placed[index] += 1.0 if bin_.shares is None else np.array(bin_.shares)
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


def ask_twin(workload: Workload, bins: Sequence[Bin], *, seed: int) -> dict[int, str]:
    """Why which bins fail, by the twin at the nominal rates and with a seed that no search has seen."""
    found = TwinPredictor(seed=seed + FRESH_SEED).evaluate(workload, bins)
    failures = {}
    for k, row in enumerate(found):
        if row.memory_error:
            why = memory_error(bins[k].profile, bins[k].max_loras, bins[k].max_lora_rank)
            failures[k] = f"GPU {k} does not start in the twin: {why}"
        elif row.starved:
            share = f"{row.served_share:.0%} of its load served"
            failures[k] = f"GPU {k} starves in the twin with a fresh seed: {share}"
    return failures
