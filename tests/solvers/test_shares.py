"""Replicas of a hot adapter get the shares with which their servers carry equal loads."""

from __future__ import annotations

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.fit.estimate import estimate_profile
from packer.fit.models import model_named
from packer.planning.solve import solve
from packer.solvers.greedy.shares import filled
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload


def test_water_finds_its_level() -> None:
    """Servers come to one level as far as the adapter's load reaches; each replica keeps a little of it."""
    assert filled(np.array([0.3, 0.3])) == pytest.approx([0.5, 0.5])
    assert filled(np.array([0.0, 0.4])) == pytest.approx([0.7, 0.3])
    assert filled(np.array([0.0, 5.0, 0.2])) == pytest.approx([0.595, 0.01, 0.395], abs=0.005)
    assert filled(np.array([0.1, 0.7, 0.2])).sum() == pytest.approx(1.0)


def test_any_number_of_replicas_has_shares() -> None:
    """Of 128 replicas none can keep a hundredth: each keeps most of an equal share."""
    shares = filled(np.linspace(0.0, 1.0, 128))
    assert shares.sum() == pytest.approx(1.0)
    assert shares.min() > 0.5 / 128


def test_servers_of_replicas_carry_equal_loads() -> None:
    """The servers that share a hot adapter have the same load, whatever else is on them."""
    fleet = Workload([Adapter("hot", 8, 9.0), *(Adapter(f"a{k}", 8, 0.1) for k in range(12))])
    predictor = AnalyticPredictor(2600.0)
    plan = solve(fleet, small_profile(), "gpus", predictor=predictor, max_replicas=4, margin=0.0, verify=False)
    sharing = [item for item in plan.bins if 0 in item.adapters]
    assert len(sharing) > 1
    loads = [item.offered_tok_s(fleet) for item in sharing]
    assert max(loads) == pytest.approx(min(loads), rel=0.02)
    assert sum(item.shares[item.adapters.index(0)] for item in sharing) == pytest.approx(1.0)


def test_replicas_on_two_kinds_are_no_dearer_than_on_the_cheaper_one() -> None:
    """Greedy with several kinds and replicas also tries each kind alone."""
    llama = model_named("meta-llama/Llama-3.1-8B-Instruct")
    offered = [estimate_profile(llama, gpu, price_per_hour=price) for gpu, price in (("h100-80gb", 3.0), ("l40s", 0.7))]
    given = ((64, 1.3), (8, 4.4), (32, 17.8), (8, 9.7), (8, 4.5), (64, 2.3))
    hot = Workload([Adapter(f"a{k}", rank, rate) for k, (rank, rate) in enumerate(given)])
    both, alone = (
        solve(hot, kinds, "cost", max_replicas=4, verify=False, with_headroom=False).price_per_hour
        for kinds in (offered, offered[1:])
    )
    assert both is not None
    assert alone is not None
    assert both <= alone
