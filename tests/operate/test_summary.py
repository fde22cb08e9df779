"""Figures that describe a workload are those of its requests, not of its adapters."""

from __future__ import annotations

import numpy as np
import pytest

from packer.adapter import IDLE_RATE, Adapter
from packer.arrival import Arrivals
from packer.lengths import Lengths
from packer.operate.summary import summary_of
from packer.workload import Workload


def test_lengths_are_those_of_all_requests_together() -> None:
    """An adapter with three times the requests counts three times, within its own spread and between the means."""
    adapters = [
        Adapter("a", 8, 3.0, Lengths.gamma(100.0, 0.5)),
        Adapter("b", 16, 1.0, Lengths.gamma(300.0, 2.0)),
    ]
    found = summary_of(Workload(adapters, output_tokens=Lengths.gamma(50.0, 1.0)))
    rng = np.random.default_rng(0)
    drawn = np.concatenate(
        [rng.gamma(1 / cv**2, mean * cv**2, n) for mean, cv, n in ((100, 0.5, 3_000_000), (300, 2.0, 1_000_000))]
    )
    assert found["input_tokens"]["mean"] == pytest.approx(drawn.mean(), rel=0.02)
    assert found["input_tokens"]["cv"] == pytest.approx(drawn.std() / drawn.mean(), rel=0.02)
    assert found["output_tokens"]["cv"] == pytest.approx(1.0, rel=0.02)
    assert [row["rate"] for row in found["ranks"]] == [3.0, 1.0]


def test_rates_are_means_over_a_cycle() -> None:
    """Piecewise rates count with the mean of their factors, and an idle adapter has the rate 0."""
    adapters = [Adapter("a", 8, 2.0), Adapter("idle", 8, IDLE_RATE)]
    fleet = Workload(adapters, arrivals=Arrivals("piecewise", factors=(0.2, 1.0, 3.0)))
    found = summary_of(fleet)
    assert found["rate"] == pytest.approx(2.8, rel=1e-9)
    assert found["offered_tok_s"] == pytest.approx(1.4 * fleet.offered_tok_s)
    assert found["ranks"][0]["rate"] == pytest.approx(2.8)
    assert found["adapter_rate"] == {"min": 0.0, "median": pytest.approx(1.4), "max": pytest.approx(2.8)}


def test_shares_of_the_busiest_adapters() -> None:
    """The busiest 5 % and 20 % of adapters, rounded up."""
    found = summary_of(Workload([Adapter(f"a{i}", 8, float(1 + i)) for i in range(10)]))
    assert found["share_of_top_5_percent"] == pytest.approx(10 / 55)
    assert found["share_of_top_20_percent"] == pytest.approx(19 / 55)
    assert found["adapter_rate"] == {"min": 1.0, "median": 5.5, "max": 10.0}
