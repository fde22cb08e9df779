"""Mixes of kinds: one is excluded only if it can't hold the adapters, and the cheapest of the others is found."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from monotone import MonotonePredictor

from packer.adapter import Adapter
from packer.objectives.cost import Cost
from packer.profile import Profile
from packer.solvers.base import Problem
from packer.solvers.columns import mixes
from packer.solvers.columns.mixes import Cut, Mixes, cheapest
from packer.solvers.evaluator import Evaluator
from packer.solvers.slots import real_bins
from packer.testing.analytic import small_profile
from packer.workload import Workload

KINDS = (("large", 3.0, 4000.0), ("small", 1.2, 1500.0))


def mixes_of(rates: list[float]) -> Mixes:
    """A fleet of these rates on both kinds, with the first patterns and no cut yet."""
    predictors: dict[Profile, MonotonePredictor] = {}
    for name, price, peak_tok_s in KINDS:
        base = small_profile(name)
        profile = replace(
            base.with_coefficients(base_ms=1e4 / peak_tok_s), gpu=replace(base.gpu, name=name, price_per_hour=price)
        )
        predictors[profile] = MonotonePredictor(peak_tok_s)
    fleet = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)])
    problem = Problem(fleet, tuple(predictors), Cost(), Evaluator(predictors, Cost()), time_limit_s=60.0)
    found = Mixes(problem, 0)
    assert found.begin([])
    assert all(cut.allows(np.array([9, 9])) for cut in found.cuts)
    found.cuts.clear()
    return found


def holds(problem: Problem, large: int, small: int) -> bool:
    """Whether any assignment of the adapters to so many servers of each kind holds, by trying all."""
    profiles = [problem.profiles[0]] * large + [problem.profiles[1]] * small
    for assignment in product(range(len(profiles)), repeat=len(problem.workload)):
        sets = [tuple(i for i, k in enumerate(assignment) if k == server) for server in range(len(profiles))]
        pairs = [(profile, each) for profile, each in zip(profiles, sets, strict=True) if each]
        if all(real_bins(replace(problem, profiles=(profile,)), [each])[0] for profile, each in pairs):
            return True
    return False


def test_cheapest_counts_satisfy_every_cut_and_the_gpus_at_hand() -> None:
    """Against every pair of counts."""
    sources = mixes_of([1.0, 2.0]).sources
    rng = np.random.default_rng(1)
    for _ in range(20):
        cuts = [Cut(np.ones(1), rng.uniform(0.05, 0.6, 2)) for _ in range(3)]
        found = cheapest(sources, cuts, {"small": 2})
        options = [
            3.0 * large + 1.2 * small
            for large, small in product(range(21), range(3))
            if all(cut.allows(np.array([large, small])) for cut in cuts)
        ]
        assert found is not None
        assert found @ [3.0, 1.2] == pytest.approx(min(options))


@pytest.mark.parametrize("seed", range(3))
def test_a_mix_is_excluded_only_if_nothing_holds_on_it(seed: int) -> None:
    """Of all mixes of at most three servers: an excluded one has no assignment, and a packing is one."""
    rates = np.random.default_rng(seed).choice([1.0, 2.0, 3.0], 6).tolist()
    mixes = mixes_of(rates)
    for large, small in [(0, 1), (1, 0), (0, 2), (1, 1), (0, 3), (2, 0)]:
        servers = np.array([large, small])
        assert mixes.relaxed(servers, few=False)
        assert mixes.master is not None
        possible = holds(mixes.problem, large, small)
        if not mixes.admit(servers):
            assert not possible
        else:
            assert mixes.dive(servers, 0.0) is None or possible
            assert mixes.master.value <= 1.0 + 1e-6


def test_kinds_that_hold_no_adapter_of_a_class_are_excluded() -> None:
    """An adapter too hot for the small kind excludes all mixes without a large one, of which that is proven."""
    mixes = mixes_of([10.0, 1.0, 1.0, 1.0])
    alone = np.array([0, 3])
    assert not holds(mixes.problem, 0, 3)
    assert mixes.admit(alone)
    assert not mixes.relaxed(alone, few=False)
    assert not mixes.admit(alone)
    assert mixes.admit(np.array([1, 0]))
    mixes.prove()
    proven = [cut for cut in mixes.cuts if cut.proven]
    assert proven
    assert not proven[0].allows(alone)
    assert mixes.relaxed(np.array([1, 1]), few=False)


def test_a_mix_without_room_for_a_rounded_class_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two merged hot adapters the lighter fits the small kind and their mean does not: no cut excludes the mix."""
    monkeypatch.setattr(mixes, "MOST_CLASSES", 2)
    found = mixes_of([3.9791, 3.9821, 1.0, 1.0, 1.0])
    assert found.classes.loss > 0.0
    alone = np.array([0, 3])
    assert not found.relaxed(alone, few=False)
    assert found.admit(alone)
    assert not all(doubt.allows(alone) for doubt in found.doubts)
    assert all(doubt.allows(np.array([1, 0])) for doubt in found.doubts)
