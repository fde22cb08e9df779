"""Proofs that leave out servers need a predictor that declares monotony; all others get estimates."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from monotone import MonotonePredictor, problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.plan import Status
from packer.planning.solve import solve
from packer.solvers import classes
from packer.solvers.columns import exact
from packer.solvers.evaluator import Evaluator
from packer.solvers.slots import real_bins
from packer.testing.analytic import small_profile
from packer.workload import Workload


class Broken(MonotonePredictor):
    """Answers of the formula, but for a share of the sets of adapters, whose answers are the opposite."""

    name = "broken"

    def __init__(self, share: float, seed: int) -> None:
        super().__init__()
        object.__setattr__(self, "share", share)
        object.__setattr__(self, "seed", seed)

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        found = super().evaluate(workload, bins)
        drawn = [zlib.crc32(repr((self.seed, sorted(b.adapters))).encode()) / 2**32 for b in bins]  # type: ignore[attr-defined]
        other = np.array(drawn) < self.share  # type: ignore[attr-defined]
        return replace(found, starved=found.starved ^ other)


def fewest(fleet: Workload, judge: Broken) -> int:
    """Fewest servers by evaluating every set of adapters."""
    n = len(fleet)
    sets = [tuple(i for i in range(n) if mask >> i & 1) for mask in range(1, 1 << n)]
    made = real_bins(problem(fleet, predictor=judge), sets)
    good = [mask for mask, item in enumerate(made, start=1) if item is not None]

    @cache
    def count(left: int) -> int:
        lowest = left & -left
        parts = (mask for mask in good if mask & lowest and mask & left == mask)
        return 0 if not left else 1 + min((count(left & ~mask) for mask in parts), default=n)

    return count((1 << n) - 1)


@cache
def drawn(seed: int) -> tuple[Workload, Broken, int]:
    """Nine adapters, a judge that errs, and the fewest servers by it."""
    rng = np.random.default_rng(seed)
    fleet = Workload([Adapter(f"a{i}", int(rng.choice((8, 32))), float(rng.uniform(2, 9))) for i in range(9)])
    judge = Broken(float(rng.choice((0.002, 0.02))), seed)
    return fleet, judge, fewest(fleet, judge)


@pytest.mark.parametrize("enumerated", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_judge_that_is_not_monotone_makes_no_false_proof(
    seed: int, enumerated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0.2 to 2 % of the sets judged the wrong way, no plan above the optimum is optimal, no bound above it proven.

    Also where the sets are too many to be evaluated one by one, which they are made to seem here.
    """
    if not enumerated:
        monkeypatch.setattr(classes, "FEW_BINS", 50)
        monkeypatch.setattr(exact, "FEW_BINS", 50)
    fleet, judge, best = drawn(seed)
    profile = small_profile()
    for name in ("exact", "auto", "mixed"):
        plan = solve(fleet, profile, solver=name, predictor=judge, margin=0.0, verify=False, time_limit_s=3.0)
        assert plan.n_gpus >= best
        assert plan.status is not Status.OPTIMAL or plan.n_gpus == best
        assert not plan.bound_proven or (plan.lower_bound or 0.0) <= best
        if not enumerated and (plan.lower_bound or 0.0) > 1.0:
            assert plan.bound_source.startswith("estimate")


def test_monotony_is_declared_and_not_inherited() -> None:
    """A subclass may evaluate otherwise: what its base class declares says nothing of it."""
    assert Evaluator(MonotonePredictor()).monotone
    assert not Evaluator(Broken(0.0, 0)).monotone


def test_the_condition_of_an_estimate_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exhaustive search without a declaration is an estimate, "if the predictor is monotone"."""
    monkeypatch.setattr(exact, "FEW_BINS", 50)
    fleet = Workload([Adapter(f"a{i}", 8, 2.0 + 0.5 * i) for i in range(9)])
    settings = {"solver": "exact", "margin": 0.0, "verify": False}
    plain = solve(fleet, small_profile(), predictor=Broken(0.0, 0), **settings)  # type: ignore[arg-type]
    declared = solve(fleet, small_profile(), predictor=MonotonePredictor(), **settings)  # type: ignore[arg-type]
    assert declared.status is Status.OPTIMAL
    assert (plain.status, plain.n_gpus) == (Status.FEASIBLE, declared.n_gpus)
    assert plain.bound_source.startswith("estimate, if the predictor is monotone: ")
