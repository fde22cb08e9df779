"""Bring requests to servers, by whichever kind of router there is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.cluster import Cluster
from packer.errors import PluginError
from packer.twin.cluster import events
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.routers.base import HOLD, ReadingRouter, Request, Router, ScoringRouter, StaticRouter
from packer.twin.cluster.routers.scores import NUMBERS
from packer.twin.cluster.state import ROWS_PER_SHARE, Servers, give, run_until, with_more_rows
from packer.twin.cluster.view import ClusterView
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dispatch:
    """One router, its cluster and the run that it serves."""

    router: Router
    cluster: Cluster
    workload: Workload
    candidates: Candidates
    duration_s: float
    stats_interval_s: float
    seed: int

    def assign(self, adapter: IntArray, time_s: FloatArray) -> IntArray | None:
        """The server of each request if the router is static, int64 (n,); else None."""
        if not isinstance(self.router, StaticRouter):
            return None
        try:
            assigned = np.asarray(self.router.assign(adapter, self.workload, self.candidates, self.seed))
        except Exception as error:
            raise PluginError(
                f"Router {self.router.name!r} raised {type(error).__name__}: {error}."
            ) from error
        if assigned.shape != adapter.shape:
            raise PluginError(
                f"Expected router {self.router.name!r} to assign {len(adapter)} requests, got {assigned.shape}."
            )
        group, c = self.candidates.group[adapter], self.candidates
        allowed = np.repeat(np.arange(len(c.start) - 1), np.diff(c.start)) * len(self.cluster) + c.server
        inside = (assigned >= 0) & (assigned < len(self.cluster))
        wrong = np.flatnonzero(~(inside & np.isin(group * len(self.cluster) + assigned, allowed)))
        if len(wrong):
            r = int(wrong[0])
            raise self._wrong(r, int(adapter[r]), float(time_s[r]), assigned[r])
        return assigned.astype(np.int64)

    def adapter_rows(self, adapter: IntArray, assigned: IntArray | None) -> int:
        """Adapters that a server needs rows for: exactly, if it is known where each request goes."""
        m, count = len(self.workload), len(self.cluster)
        if assigned is None:
            return min(m, ROWS_PER_SHARE * len(adapter) // count + 64)
        seen = np.unique(assigned * m + adapter) // m
        return max(1, int(np.bincount(seen, minlength=1).max(initial=1)))

    def run(self, servers: Servers, assigned: IntArray | None) -> Servers:
        """Route all requests and run every server to the end; returns the servers, which may have grown."""
        if assigned is not None:
            events.deal(servers, assigned, 0)
        elif isinstance(self.router, ScoringRouter):
            servers = self._score(servers, self.router)
        elif isinstance(self.router, ReadingRouter):
            servers = self._read(servers, self.router)
        else:
            raise PluginError(
                f"Expected router {self.router.name!r} to have assign(…), or start(…) and route(…)."
            )
        for s in range(len(self.cluster)):
            run_until(servers, s, self.duration_s)
        return servers

    def _score(self, servers: Servers, router: ScoringRouter) -> Servers:
        c, p = self.candidates, router.parameters(self.cluster, self.workload)
        n, r, now_s = len(servers.server), 0, 0.0
        while True:
            seen = servers
            if self.stats_interval_s:
                seen = servers._replace(ints=servers.ints.copy(), classes=servers.classes.copy())
            r, now_s = events.route(
                servers, seen, self.stats_interval_s, NUMBERS[router.name], p, c.group, c.start, c.server, r,
                now_s, self.duration_s,
            )  # fmt: skip
            if r == n or now_s >= self.duration_s:
                return servers
            servers = with_more_rows(servers)

    def _read(self, servers: Servers, router: ReadingRouter) -> Servers:
        """The loop of `events.route`, with a router in Python."""
        view = ClusterView(self.cluster, self.workload, self.candidates, servers)
        router.start(view, self.seed)
        now_s = 0.0
        for r in range(len(servers.server)):
            now_s = max(now_s, float(servers.sent_s[r]))
            events.run_all_until(servers, now_s)
            s = self._ask(router, view, servers, r, now_s)
            while s == HOLD:
                now_s = events.next_change_s(servers, now_s)
                if now_s >= self.duration_s:
                    return servers
                events.run_all_until(servers, now_s)
                s = self._ask(router, view, servers, r, now_s)
            while not give(servers, s, r, now_s):
                servers = with_more_rows(servers)
                view.follow(servers)
        return servers

    def _ask(self, router: ReadingRouter, view: ClusterView, servers: Servers, r: int, now_s: float) -> int:
        a = int(servers.adapter[r])
        request = Request(r, a, int(servers.ranks[a]), int(servers.prompt[r]), float(servers.sent_s[r]))
        try:
            s = router.route(request, view)
        except Exception as error:
            raise PluginError(
                f"Router {router.name!r} raised {type(error).__name__} on request {r} at {now_s:.6g} s: {error}."
            ) from error
        if s != HOLD and s not in self.candidates.of(a):
            raise self._wrong(r, a, now_s, s)
        return int(s)

    def _wrong(self, r: int, adapter: int, now_s: float, server: object) -> PluginError:
        allowed = ", ".join(map(str, self.candidates.of(adapter)[:8]))
        more = ", …" if len(self.candidates.of(adapter)) > 8 else ""
        return PluginError(
            f"Expected router {self.router.name!r} to send request {r} of adapter "
            f"{self.workload.names[adapter]!r} at {now_s:.6g} s to a server that may serve it ({allowed}{more}), "
            f"got {server!r}."
        )
