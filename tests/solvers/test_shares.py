"""Replicas of a hot adapter get the shares with which their servers carry equal loads."""

from __future__ import annotations

import numpy as np
import pytest

from packer.adapter import Adapter
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
    plan = solve(
        fleet, small_profile(), "gpus", predictor=predictor, max_replicas=4, margin=0.0, verify=False
    )
    sharing = [item for item in plan.bins if 0 in item.adapters]
    assert len(sharing) > 1
    loads = [item.offered_tok_s(fleet) for item in sharing]
    assert max(loads) == pytest.approx(min(loads), rel=0.02)
    assert sum(item.shares[item.adapters.index(0)] for item in sharing) == pytest.approx(1.0)
