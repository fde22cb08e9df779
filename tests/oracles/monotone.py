"""A predictor made of one formula, exact and monotone, and small problems over it for tests of solvers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from packer.bin import Bin
from packer.evaluation import STARVATION_THRESHOLD, Evaluation, Evaluations
from packer.objectives.base import Objective
from packer.objectives.gpus import Gpus
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.strategies import Predictor
from packer.testing.analytic import closed_form, small_profile
from packer.workload import Workload


@dataclass(frozen=True)
class MonotonePredictor:
    """A server that serves so many tokens a second, less for each adapter, rank and slot.

    Adding an adapter, a rank or a rate never makes an infeasible bin feasible, so what is proven relative
    to it is proven.

    Parameters
    ----------
    capacity_tok_s
        What the server could serve without adapters, tok/s.
    per_adapter
        Share of the capacity that each adapter costs.
    per_rank
        Share of the capacity that each unit of rank costs, summed over the adapters.
    per_slot_rank
        Share of the capacity that each unit of `max_loras` × `max_lora_rank` costs (the KV cache shrinks).
    swapping
        Share lost when no adapter but one has a slot; proportionally less with more slots.
    memory_slots
        `max_loras` × `max_lora_rank` beyond it is a memory error.
    """

    capacity_tok_s: float = 8000.0
    per_adapter: float = 1e-3
    per_rank: float = 5e-5
    per_slot_rank: float = 5e-5
    swapping: float = 0.3
    memory_slots: int = 16 * 384
    name = "monotone"
    monotone = True

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate each bin; one row per bin, in order."""
        return Evaluations.of([self._one(workload, each) for each in bins])

    def _one(self, workload: Workload, each: Bin) -> Evaluation:
        offered = each.offered_tok_s(workload)
        n = len(each.adapters)
        lost = self.per_adapter * n + self.per_rank * float(workload.ranks[list(each.adapters)].sum())
        lost += self.per_slot_rank * each.max_loras * each.max_lora_rank
        lost += self.swapping * max(0.0, 1.0 - each.max_loras / n)
        capacity = self.capacity_tok_s * max(0.0, 1.0 - lost)
        memory_error = each.max_loras * each.max_lora_rank > self.memory_slots
        served = 0.0 if memory_error else min(offered, capacity)
        starved = not memory_error and served < STARVATION_THRESHOLD * offered
        if memory_error or capacity <= 0.0:
            ttft = itl = float("nan")
        else:
            busy = min(offered / capacity, 50.0)
            ttft = 50.0 * (1.0 + busy**4)
            itl = 10.0 * (1.0 + 2.0 * busy)
        kv_tokens = float(np.maximum(0, self.memory_slots - each.max_loras * each.max_lora_rank))
        return closed_form(offered, served, ttft, itl, kv_tokens, starved, memory_error)


def problem(
    workload: Workload,
    *,
    objective: Objective | None = None,
    predictor: Predictor | None = None,
    max_gpus: int | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Problem:
    """A problem over the monotone predictor and the small profile, objective "gpus" unless given."""
    goal = objective if objective is not None else Gpus()
    return Problem(
        workload,
        (small_profile(),),
        goal,
        Evaluator(predictor if predictor is not None else MonotonePredictor(), goal),
        max_gpus=max_gpus,
        time_limit_s=time_limit_s,
        seed=seed,
        stop=stop,
    )
