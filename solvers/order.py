"""In which order adapters are packed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packer.solvers.classes import zigzag
from packer.workload import Workload


def paper_order(workload: Workload) -> npt.NDArray[np.int64]:
    """Indices by rank, largest first; within a rank by rate in zigzag: highest, lowest, second highest, …

    arXiv 2602.24044, Algorithm 1. Equal rates keep their order.
    """
    parts = []
    for rank in np.unique(workload.ranks)[::-1]:
        members = np.flatnonzero(workload.ranks == rank)
        falling = members[np.argsort(-workload.rates[members], kind="stable")]
        parts.append(falling[zigzag(len(falling))])
    return np.concatenate(parts).astype(np.int64)
