"""The busiest of several drawn hours is found without a simulation."""

from __future__ import annotations

import numpy as np
import pytest

from packer import Adapter, Arrivals, Lengths, Workload
from packer.arrival import Bursts
from packer.planning.busiest import CELLS, WINDOW_S, busiest, peak
from packer.twin.arrivals import draw_requests

COMMON = Bursts(0.6, ((60.0, 1.0),))
ADAPTERS = [Adapter("a", 8, 0.4), Adapter("b", 8, 0.2, Lengths.constant(2_000), Lengths.constant(10))]


@pytest.mark.parametrize(
    "arrivals",
    [Arrivals("bursty", common=COMMON), Arrivals("bursty", common=COMMON, own=COMMON), Arrivals("unpredictable")],
    ids=["common", "own", "unpredictable"],
)
def test_peak_is_that_of_the_requests_that_a_simulation_of_the_hour_gets(arrivals: Arrivals) -> None:
    """The load of the busiest two minutes, one window after another: mean tokens where adapters have rates of their
    own in time, else requests."""
    fleet = Workload(ADAPTERS, arrivals=arrivals)
    requests = draw_requests(fleet, 3600.0, 5)
    alone = arrivals.own is not None or arrivals.kind == "unpredictable"
    weights = fleet.mean_tokens[requests.adapter] if alone else np.ones(len(requests))
    step_s = WINDOW_S / CELLS
    windows = [
        weights[(requests.time_s >= end_s - WINDOW_S) & (requests.time_s < end_s)].sum()
        for end_s in np.arange(step_s, 3600.0 + step_s / 2, step_s)
    ]
    assert peak(fleet, 5) == pytest.approx(max(windows))


def test_the_hour_with_the_highest_peak_is_the_busiest() -> None:
    """The seed whose hour has the highest peak is taken, wherever it stands."""
    fleet = Workload(ADAPTERS, arrivals=Arrivals("bursty", common=COMMON))
    tried = [3, 1, 4, 15, 9]
    assert busiest(fleet, tried) == max(tried, key=lambda seed: peak(fleet, seed))
    assert len({peak(fleet, seed) for seed in tried}) == len(tried)
    assert busiest(fleet, tried[::-1]) == busiest(fleet, tried)
