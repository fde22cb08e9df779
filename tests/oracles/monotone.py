"""A predictor made of one formula, exact and monotone, and small problems over it for tests of solvers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.bin import Bin
from packer.evaluation import STARVATION_THRESHOLD, Evaluations
from packer.objectives.base import Objective
from packer.objectives.gpus import Gpus
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.strategies import Predictor
from packer.testing.analytic import small_profile
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

    def capacities(self, bins: Sequence[Bin]) -> npt.NDArray[np.float64] | float:
        """What each server could serve without adapters, tok/s, float64 (n,)."""
        return self.capacity_tok_s

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate each bin; one row per bin, in order."""
        offered = np.array([each.offered_tok_s(workload) for each in bins], dtype=np.float64)
        ranks = workload.ranks.tolist()
        counts = np.array(
            [(len(b.adapters), sum(map(ranks.__getitem__, b.adapters)), b.max_loras, b.max_lora_rank) for b in bins],
            dtype=np.float64,
        ).reshape(-1, 4)
        n, rank, slots, slot_rank = counts.T
        lost = self.per_adapter * n + self.per_rank * rank + self.per_slot_rank * slots * slot_rank
        lost += self.swapping * np.maximum(0.0, 1.0 - slots / n)
        capacity = self.capacities(bins) * np.maximum(0.0, 1.0 - lost)
        error = slots * slot_rank > self.memory_slots
        served = np.where(error, 0.0, np.minimum(offered, capacity))
        works = ~error & (capacity > 0.0)
        busy = np.minimum(offered / np.where(works, capacity, np.nan), 50.0)
        ttft, itl = 50.0 * (1.0 + busy**4), 10.0 * (1.0 + 2.0 * busy)
        starved = ~error & (served < STARVATION_THRESHOLD * offered)
        kv_tokens = np.maximum(0.0, self.memory_slots - slots * slot_rank)
        return Evaluations(
            offered, served, starved, error, ttft, ttft, 3.0 * ttft, itl, itl, 3.0 * itl, kv_tokens,
            starved.astype(np.float64),
        )  # fmt: skip


class Imitating:
    """Before a predictor: one that says that it learned from the twin, and evaluates all bins at one factor."""

    imitates_twin = True

    def evaluate(
        self, workload: Workload, bins: Sequence[Bin], factors: npt.NDArray[np.float64] | float = 1.0
    ) -> Evaluations:
        """Figures of each bin."""
        factor = float(np.max(factors))
        scaled = workload if factor == 1.0 else workload.scaled(factor)
        return super().evaluate(scaled, bins)  # type: ignore[misc]


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
