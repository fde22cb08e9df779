"""A router with a compiled score: the fewest prompt tokens that wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from packer.twin.cluster.routers.base import ScoringRouter
from packer.twin.cluster.state import Servers, outstanding


@njit
def _score(c: Servers, p: np.ndarray, s: int, r: int) -> float:  # type: ignore[type-arg]
    """Waiting prompt tokens, and `weight` for each request."""
    return float(c.servers[s].waiting_prompt) + p[0] * outstanding(c, s)


@dataclass(frozen=True)
class Shortest(ScoringRouter):
    """Its score is compiled into the event loop, as those of packer's own routers are."""

    weight: float = 1.0
    name = "shortest"
    score = staticmethod(_score)
