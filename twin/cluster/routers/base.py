"""Routers: which server gets a request.

A static router needs no state of the servers: it assigns all requests at once. A third-party package registers
a class under the entry-point group `packer.routers`; parameters of a router are the fields of its dataclass.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from packer.cluster import Cluster
from packer.twin.cluster.candidates import Candidates
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@runtime_checkable
class Router(Protocol):
    """Anything that routes."""

    name: str

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Why this router can't serve this cluster, for people; None if it can."""


@runtime_checkable
class StaticRouter(Router, Protocol):
    """Decides without the state of the servers."""

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """The server of each request, int64 (n,), from its adapter, int64 (n,), in order of arrival."""
