"""In which order adapters are packed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packer.workload import Workload


def paper_order(workload: Workload) -> npt.NDArray[np.int64]:
    """Indices by rank, largest first; within a rank by rate in zigzag: highest, lowest, second highest, …

    arXiv 2602.24044, Algorithm 1. Equal rates keep their order.
    """
    parts = []
    for rank in np.unique(workload.ranks)[::-1]:
        members = np.flatnonzero(workload.ranks == rank)
        falling = members[np.argsort(-workload.rates[members], kind="stable")]
        zigzag = np.empty_like(falling)
        half = (len(falling) + 1) // 2
        zigzag[0::2] = falling[:half]
        zigzag[1::2] = falling[half:][::-1]
        parts.append(zigzag)
    return np.concatenate(parts).astype(np.int64)
