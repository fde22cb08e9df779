"""Bring requests to servers, by whichever kind of router there is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.cluster import Cluster
from packer.errors import PluginError
from packer.twin.cache.base import CachePolicy, Move, TickingPolicy
from packer.twin.cluster import events
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.routers.base import (
    HOLD, ReadingRouter, Request, Router, ScoringRouter, StaticRouter, TickingRouter,
)  # fmt: skip
from packer.twin.cluster.routers.scores import NUMBERS
from packer.twin.cluster.state import REFUSED, Engines, Servers, keep_on_gpu, run_until, with_more_rows
from packer.twin.cluster.transit import Transit, next_s
from packer.twin.cluster.view import ClusterView
from packer.twin.engine.state import NO_LIMIT
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Ticking = TickingPolicy | TickingRouter


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
    max_outstanding: int | None
    way: Transit | None
    policy: CachePolicy

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
            raise self.wrong(r, int(adapter[r]), float(time_s[r]), assigned[r])
        return assigned.astype(np.int64)

    def adapter_rows(self, adapter: IntArray, assigned: IntArray | None) -> int:
        """Adapters that a server needs rows for: exactly, if it is known where each request goes.

        Otherwise as many as its even share of the requests, and more when these are used: operating systems give large
        arrays pages of 2 MB, so that rows which are never used take memory, too.
        """
        m, count = len(self.workload), len(self.cluster)
        if assigned is None:
            return min(m, len(adapter) // count + 64)
        seen = np.unique(assigned * m + adapter) // m
        return max(1, int(np.bincount(seen, minlength=1).max(initial=1)))

    def run(self, servers: Servers, engines: Engines, assigned: IntArray | None) -> Servers:
        """Route all requests and run every server to the end; returns the servers, which may have grown."""
        ticks = self._ticks()
        if assigned is not None and not ticks and self.way is None and self.max_outstanding is None:
            events.deal(servers, assigned, 0)
        elif isinstance(self.router, ReadingRouter):
            servers = _Reading(self, servers, engines, ticks).run()
        elif assigned is not None or isinstance(self.router, ScoringRouter):
            servers = self._compiled(servers, engines, assigned, ticks)
        else:
            raise PluginError(
                f"Expected router {self.router.name!r} to have assign(…), or start(…) and route(…)."
            )
        before_end_s = math.nextafter(self.duration_s, 0.0)
        while self.way is not None and not events.pass_on(servers, self.way, before_end_s, engines):
            servers = with_more_rows(servers)
        for s in range(len(self.cluster)):
            run_until(servers, s, self.duration_s, engines)
        return servers

    def _ticks(self) -> list[Ticking]:
        """What acts at regular times: cache policies, and the router if it does."""
        both: tuple[object, ...] = (self.policy, self.router)
        return [each for each in both if isinstance(each, TickingPolicy | TickingRouter)]

    def _compiled(
        self, servers: Servers, engines: Engines, assigned: IntArray | None, ticks: list[Ticking]
    ) -> Servers:
        c = self.candidates
        rule, p, given = 0, np.zeros(1), np.zeros(0, dtype=np.int64)
        if assigned is not None:
            given = assigned
        else:
            assert isinstance(self.router, ScoringRouter)
            rule, p = NUMBERS[self.router.name], self.router.parameters(self.cluster, self.workload)
        clock = _Clock(self, servers, engines, ticks)
        n, r, now_s = len(servers.server), 0, 0.0
        limit = NO_LIMIT if self.max_outstanding is None else self.max_outstanding
        while True:
            seen = servers
            if self.stats_interval_s:
                seen = servers._replace(ints=servers.ints.copy(), classes=servers.classes.copy())
            stop_s = min(clock.next_s, self.duration_s)
            r, now_s = events.route(
                servers, seen, self.stats_interval_s, given, rule, p, c.group, c.start, c.server, r, now_s, stop_s,
                limit, self.way, engines,
            )  # fmt: skip
            if now_s >= self.duration_s or (r == n and not ticks):
                return servers
            if r == n:
                now_s = stop_s
            if now_s < stop_s:
                servers = with_more_rows(servers)
                clock.follow(servers)
            elif stop_s >= self.duration_s:
                return servers
            else:
                servers = clock.tick(stop_s)

    def wrong(self, r: int, adapter: int, now_s: float, server: object) -> PluginError:
        """What is said when a router sends a request to a server that may not serve it."""
        allowed = ", ".join(map(str, self.candidates.of(adapter)[:8]))
        more = ", …" if len(self.candidates.of(adapter)) > 8 else ""
        return PluginError(
            f"Expected router {self.router.name!r} to send request {r} of adapter "
            f"{self.workload.names[adapter]!r} at {now_s:.6g} s to a server that may serve it ({allowed}{more}), "
            f"got {server!r}."
        )


class _Clock:
    """The regular times at which cache policies and routers act."""

    def __init__(self, work: Dispatch, servers: Servers, engines: Engines, ticks: list[Ticking]) -> None:
        self.work, self.servers, self.engines, self.ticks = work, servers, engines, ticks
        self.view = ClusterView(work.cluster, work.workload, work.candidates, servers)
        for each in ticks:
            if isinstance(each, TickingPolicy):
                each.start(self.view, work.seed)
        self._due_s = [each.period_s for each in ticks]

    @property
    def next_s(self) -> float:
        """When the next one acts; infinite if none does."""
        return min(self._due_s, default=math.inf)

    def follow(self, servers: Servers) -> None:
        """The event loop got larger arrays."""
        self.servers = servers
        self.view.follow(servers)

    def tick(self, now_s: float) -> Servers:
        """All whose time has come act; returns the servers, which may have grown."""
        events.run_all_until(self.servers, now_s, self.engines)
        for k, each in enumerate(self.ticks):
            if self._due_s[k] <= now_s:
                self._due_s[k] += each.period_s
                try:
                    moves = list(each.tick(now_s, self.view) or ())
                except Exception as error:
                    raise PluginError(
                        f"{each.name!r} raised {type(error).__name__} at {now_s:.6g} s: {error}."
                    ) from error
                for move in moves:
                    self._apply(each.name, move, now_s)
        return self.servers

    def _apply(self, name: str, move: Move, now_s: float) -> None:
        if move.server not in self.work.candidates.of(move.adapter):
            raise PluginError(
                f"Expected cache policy {name!r} to keep adapter {move.adapter!r} at {now_s:.6g} s on a server "
                f"that may serve it, got {move.server!r}."
            )
        while not keep_on_gpu(self.servers, move.server, move.adapter, move.keep):
            self.follow(with_more_rows(self.servers))


class _Reading:
    """The loop of `events.route`, with a router in Python."""

    def __init__(self, work: Dispatch, servers: Servers, engines: Engines, ticks: list[Ticking]) -> None:
        self.work, self.servers, self.engines = work, servers, engines
        assert isinstance(work.router, ReadingRouter)
        self.router = work.router
        self.clock = _Clock(work, servers, engines, ticks)
        self.router.start(self.clock.view, work.seed)
        self.now_s = 0.0

    def run(self) -> Servers:
        """Route all requests."""
        for r in range(len(self.servers.server)):
            if not self._until(max(self.now_s, float(self.servers.sent_s[r]))) or not self._one(r):
                break
        if self.clock.next_s < self.work.duration_s:
            self._until(math.nextafter(self.work.duration_s, 0.0))
        return self.servers

    def _until(self, until_s: float) -> bool:
        """What happens up to then does; False at the end of the run."""
        while self.clock.next_s <= until_s < self.work.duration_s:
            tick_s = self.clock.next_s
            self._pass_on(tick_s)
            self._follow(self.clock.tick(tick_s))
        self.now_s = until_s
        if until_s < self.work.duration_s:
            self._pass_on(until_s)
        return until_s < self.work.duration_s

    def _pass_on(self, until_s: float) -> None:
        while not events.pass_on(self.servers, self.work.way, until_s, self.engines):
            self._follow(with_more_rows(self.servers))

    def _follow(self, servers: Servers) -> None:
        self.servers = servers
        self.clock.follow(servers)

    def _one(self, r: int) -> bool:
        """Route one request; False if it is still held at the end."""
        limit = self.work.max_outstanding
        if limit is not None and sum(map(int, self.clock.view.running + self.clock.view.waiting)) >= limit:
            self.servers.server[r] = REFUSED
            return True
        s = self._decision(r)
        while s == HOLD:
            changes_s = events.next_change_s(self.servers, self.now_s, self.engines)
            if self.work.way is not None:
                changes_s = min(changes_s, next_s(self.work.way))
            if not self._until(min(changes_s, max(self.clock.next_s, self.now_s))):
                return False
            s = self._decision(r)
        while not events.hand_over(self.servers, self.work.way, s, r, self.now_s):
            self._follow(with_more_rows(self.servers))
        return True

    def _decision(self, r: int) -> int:
        servers, router, now_s = self.servers, self.router, self.now_s
        a = int(servers.adapter[r])
        request = Request(
            r,
            a,
            int(servers.ranks[a]),
            int(servers.prompt[r]),
            float(servers.sent_s[r]),
            int(servers.output[r]),
        )
        try:
            s = router.route(request, self.clock.view)
        except Exception as error:
            raise PluginError(
                f"Router {router.name!r} raised {type(error).__name__} on request {r} at {now_s:.6g} s: {error}."
            ) from error
        if s != HOLD and s not in self.work.candidates.of(a):
            raise self.work.wrong(r, a, now_s, s)
        return int(s)
