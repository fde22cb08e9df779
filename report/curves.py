"""What happens to the servers of a plan as all rates grow: the report's curves to the breaking point."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from packer.bin import Bin
from packer.evaluation import Evaluation, Evaluations
from packer.plan import Plan
from packer.workload import Workload

FACTORS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)
"""Today's rates, and up to twice as much."""

Evaluate = Callable[[Workload, Sequence[Bin]], Evaluations]


@dataclass(frozen=True, eq=False)
class Curves:
    """Evaluations of some GPUs of a plan at growing rates.

    Parameters
    ----------
    factors
        What every rate is multiplied by, increasing, the first is 1.
    gpus
        Indices of the plan's bins.
    evaluations
        One for each factor; rows in the order of `gpus`. After the factor at which a GPU breaks its rows are
        starved, with NaN for figures.
    predictor
        What evaluated them.
    """

    factors: tuple[float, ...]
    gpus: tuple[int, ...]
    evaluations: tuple[Evaluations, ...]
    predictor: str

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """A figure of the evaluations, float64 (factors, GPUs)."""
        return np.array([getattr(each, name) for each in self.evaluations], dtype=np.float64)

    def breaking_factor(self, row: int) -> float | None:
        """First factor at which the `row`-th GPU starves or fails; None if it holds throughout."""
        for factor, each in zip(self.factors, self.evaluations, strict=True):
            if not each.feasible[row]:
                return factor
        return None

    def holding_factor(self, row: int) -> float | None:
        """Largest factor that the `row`-th GPU holds; None if it breaks today."""
        broken = self.breaking_factor(row)
        if broken is None:
            return self.factors[-1]
        position = self.factors.index(broken)
        return self.factors[position - 1] if position else None


def growth_curves(
    plan: Plan,
    evaluate: Evaluate,
    *,
    predictor: str,
    today: Evaluations | None = None,
    limit: int | None = None,
    factors: Sequence[float] = FACTORS,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Curves | None:
    """The curves of a plan's GPUs, or of `limit` of them; None where rates can't grow (a replayed trace).

    With a limit, half of the GPUs are those with the longest TTFT and the rest are spread evenly over the
    others. A GPU that broke is not evaluated again: it breaks under more load too. `today`: the evaluations of
    the plan's bins at factor 1, if they are known.
    """
    if not plan.bins or plan.workload.arrivals.trace is not None:
        return None
    gpus = choose_gpus(plan.evaluations, limit)
    holding = dict.fromkeys(gpus, True)
    last: dict[int, Evaluation] = {}
    rows = []
    for done, factor in enumerate(factors):
        progress("rates grow", done, len(factors))
        left = [gpu for gpu in gpus if holding[gpu]]
        if factor == 1.0 and today is not None:
            last.update((gpu, today[gpu]) for gpu in left)
        elif left:
            fleet = plan.workload if factor == 1.0 else plan.workload.scaled(factor)
            found = evaluate(fleet, [plan.bins[gpu] for gpu in left])
            last.update(zip(left, found, strict=True))
        rows.append(Evaluations.of([last[gpu] if holding[gpu] else _broken(last[gpu]) for gpu in gpus]))
        for gpu in left:
            holding[gpu] = last[gpu].feasible
    return Curves(tuple(factors), gpus, tuple(rows), predictor)


def _broken(last: Evaluation) -> Evaluation:
    """A GPU beyond its breaking point: starved, or without memory as before; no figures."""
    return replace(
        last,
        total_token_throughput=math.nan,
        starved=not last.memory_error,
        mean_ttft_ms=math.nan,
        median_ttft_ms=math.nan,
        p99_ttft_ms=math.nan,
        mean_tpot_ms=math.nan,
        mean_itl_ms=math.nan,
        p99_itl_ms=math.nan,
        starvation_probability=1.0,
    )


def choose_gpus(evaluations: Evaluations, limit: int | None) -> tuple[int, ...]:
    """Indices to draw: all, or the slowest and an even spread of the rest."""
    count = len(evaluations)
    if limit is None or count <= limit:
        return tuple(range(count))
    ttft = np.nan_to_num(evaluations.mean_ttft_ms, nan=np.inf)
    slowest_first = np.argsort(-ttft, kind="stable")
    worst = slowest_first[: (limit + 1) // 2].tolist()
    others = slowest_first[(limit + 1) // 2 :]
    spread = np.linspace(0, len(others) - 1, limit - len(worst)).round().astype(int)
    return tuple(sorted({*worst, *others[spread].tolist()}))
