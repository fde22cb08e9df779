"""In which order adapters are packed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packer.memo import Memo
from packer.solvers.classes import zigzag
from packer.workload import Workload

_GOLDEN = (5.0**0.5 - 1.0) / 2.0


@Memo
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


def even_order(workload: Workload) -> npt.NDArray[np.int64]:
    """Indices by rank, largest first; within a rank such that any run of adapters has the loads of the whole rank.

    Golden-ratio steps through the adapters by falling load.
    """
    parts = []
    for rank in np.unique(workload.ranks)[::-1]:
        falling = by_falling_load(workload, np.flatnonzero(workload.ranks == rank))
        places = np.argsort(np.arange(len(falling)) * _GOLDEN % 1.0, kind="stable")
        parts.append(falling[np.argsort(places, kind="stable")])
    return np.concatenate(parts).astype(np.int64)


def by_falling_load(workload: Workload, adapters: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Adapters by falling load; equal loads by falling rank, so that those alike stand together."""
    loads, ranks = workload.offered_tok_s_by_adapter[adapters], workload.ranks[adapters]
    return adapters[np.lexsort((adapters, -ranks, -loads))]
