"""First fit: GPU types, and adapters too hot for one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from monotone import problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.base import load_objective
from packer.planning.verify import check
from packer.solvers.base import Problem, Solution
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.order import paper_order
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload

SMALL, BIG = small_profile("small/model", 1.0), small_profile("big/model", 4.0)


class ByType:
    """The analytic predictor with another peak for each GPU type."""

    name = "by-type"

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate each bin; one row per bin, in order."""
        rows = []
        for bin_ in bins:
            predictor = AnalyticPredictor(4000.0 if bin_.profile.name == BIG.name else 1500.0)
            rows.append(predictor.evaluate(workload, [bin_])[0])
        return Evaluations.of(rows)


class Fussy(AnalyticPredictor):
    """Refuses an adapter's share of a third, though it takes larger ones."""

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Evaluate each bin; one row per bin, in order."""
        found = super().evaluate(workload, bins)
        third = [any(abs(share - 1 / 3) < 1e-9 for share in bin_.shares) for bin_ in bins]
        return replace(found, starved=found.starved | np.array(third))


def packed(posed: Problem) -> FirstFit:
    """First fit of the fleet in paper order, checked."""
    first_fit = FirstFit(posed, paper_order(posed.workload))
    first_fit.run()
    check(posed, Solution(tuple(first_fit.bins), tuple(first_fit.left)))
    return first_fit


def equal(n: int, objective: str) -> Problem:
    """`n` adapters of 2 req/s, of which a big GPU holds 5 and a small one 1."""
    fleet = Workload([Adapter(f"a{i}", 8, 2.0) for i in range(n)])
    posed = problem(fleet, objective=load_objective(objective), predictor=ByType())
    return replace(posed, profiles=(SMALL, BIG))


@pytest.mark.parametrize("objective", ["gpus", "slo:mean_ttft_ms=100000", "headroom:factor=1"])
def test_few_gpus_means_large_ones(objective: str) -> None:
    """Where the number of GPUs counts, the type that takes the most load is chosen, whatever its price."""
    bins = packed(equal(12, objective)).bins
    assert [(len(b.adapters), b.profile.name) for b in bins] == [(5, BIG.name), (5, BIG.name), (2, BIG.name)]


def test_the_cheaper_type_where_both_take_the_same() -> None:
    """A rest that fits either type goes to the one with the lower price."""
    bins = packed(equal(11, "gpus")).bins
    assert [(len(b.adapters), b.profile.name) for b in bins] == [
        (5, BIG.name),
        (5, BIG.name),
        (1, SMALL.name),
    ]


def test_a_type_without_a_price_is_the_dearest() -> None:
    """Of two types that take the same, the one with a price is chosen before the one without."""
    free = small_profile("small/model", None)
    posed = replace(equal(1, "gpus"), profiles=(free, BIG))
    assert packed(posed).bins[0].profile == BIG


def test_cost_weighs_the_price_against_the_load() -> None:
    """For the objective cost the type is the one with the lowest price for the load that it takes."""
    posed = equal(10, "cost")
    assert {b.profile.name for b in packed(posed).bins} == {BIG.name}  # 4 $/h for 5 adapters, 1 $/h for 1
    dear = small_profile(BIG.name, 6.0)
    assert {b.profile.name for b in packed(replace(posed, profiles=(SMALL, dear))).bins} == {SMALL.name}


def hot(max_replicas: int) -> Problem:
    """One adapter of which a GPU takes 41 %, but not a third."""
    fleet = Workload([Adapter("hot", 8, 25.0), Adapter("cool", 8, 0.1)])
    return replace(problem(fleet, predictor=Fussy()), max_replicas=max_replicas)


@pytest.mark.parametrize("allowed", [4, 6])
def test_a_share_that_is_refused_is_made_smaller(allowed: int) -> None:
    """If the predictor refuses the shares that should do, more of them are tried, as many as are allowed."""
    found = packed(hot(allowed))
    assert found.left == []
    assert [b.shares[b.adapters.index(0)] for b in found.bins if b.shares] == [0.25] * 4


def test_shares_that_are_all_refused_leave_the_adapter_with_the_reason() -> None:
    """Where no number of shares passes, the adapter is unplaced, others are not, and what would help is said."""
    found = packed(hot(3))
    assert found.left == [0]
    assert [b.adapters for b in found.bins] == [(1,)]
    assert "'hot'" in found.reasons[0]
    assert "up to 3" in found.reasons[0]
    assert "--max-replicas 4" in found.reasons[0]
