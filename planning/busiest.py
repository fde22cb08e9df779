"""Of several hours that are drawn for a server, the one whose busiest two minutes bring the most load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.times import HOUR_S
from packer.twin.arrivals import draw_times
from packer.workload import Workload

WINDOW_S = 120.0
CELLS = 6  # Parts of a window by which it is moved.


def busiest(served: Workload, tried: Sequence[int]) -> int:
    """The seed of the hour with the highest `peak` of a server's traffic. No hour is simulated."""
    return max(tried, key=lambda seed: peak(served, seed))


def peak(served: Workload, seed: int) -> float:
    """The load of the busiest `WINDOW_S` seconds in the hour with this seed: tokens, by the mean lengths of the
    adapters whose requests come then; requests, where their adapters do not depend on the time."""
    time_s, adapter = draw_times(served, served.arrivals.whole_s(HOUR_S), seed)
    tokens = None if adapter is None else served.mean_tokens[adapter]
    of_cell = np.bincount((time_s * (CELLS / WINDOW_S)).astype(np.int64), tokens)
    reached = np.concatenate((np.zeros(CELLS), np.cumsum(of_cell)))  # a window may begin before the hour
    return float((reached[CELLS:] - reached[:-CELLS]).max(initial=0.0))
