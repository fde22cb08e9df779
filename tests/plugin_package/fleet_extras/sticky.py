"""A router: an adapter stays where it was, unless that server is much busier than another."""

from __future__ import annotations

from dataclasses import dataclass, field

from packer.cluster import Cluster
from packer.twin.cluster.routers.base import Request
from packer.twin.cluster.view import ClusterView
from packer.workload import Workload


@dataclass
class Sticky:
    """The adapter's last server, while it has at most `slack` requests more than the most idle one."""

    slack: int = 8
    name = "sticky"
    _last: dict[int, int] = field(default_factory=dict, init=False)

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Every cluster."""
        return None

    def start(self, view: ClusterView, seed: int) -> None:
        """Forget an earlier run."""
        self._last.clear()

    def route(self, request: Request, view: ClusterView) -> int:
        """One of `view.candidates`; running and waiting requests are those of this moment."""
        load = view.running + view.waiting
        idlest = int(min(view.candidates(request.adapter), key=lambda s: load[s]))
        last = self._last.get(request.adapter, idlest)
        chosen = last if load[last] <= load[idlest] + self.slack else idlest
        self._last[request.adapter] = chosen
        return chosen
