"""Dispatch requests to servers, with any kind of router."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from packer import checks
from packer.arrays import FloatArray, IntArray
from packer.change import Controller
from packer.cluster import Cluster
from packer.errors import IncompatibleError, PluginError, plugged
from packer.twin.cluster.apart import run_apart
from packer.twin.cluster.caching import CachePolicy, Move, TickingPolicy
from packer.twin.cluster import events
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.routers.base import (
    HOLD, HOOKS, ReadingRouter, Request, Resend, Router, ScoringRouter, StaticRouter, TickingRouter,
)  # fmt: skip
from packer.twin.cluster.loop import Loop, loop_of
from packer.twin.cluster.serving import Serving
from packer.twin.cluster.state import (
    REFUSED, EngineKernels, Engines, Servers, give, keep_on_gpu, whole_of, with_more_rows,
)  # fmt: skip
from packer.twin.cluster.transit import Transit
from packer.twin.cluster.view import ClusterView
from packer.twin.engine.content import Content
from packer.twin.engine.state import NO_LIMIT
from packer.workload import Workload

Ticking = TickingPolicy | TickingRouter
MANY = 20_000  # Number of requests from which servers that do not wait for each other run in threads.
ASSIGNED_S = 3600.0  # For how long, s, a static router assigns requests at a time if a controller may change servers.


@dataclass(frozen=True, eq=False)
class Dispatch:
    """A router, its cluster and the settings of one run."""

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
    others: tuple[EngineKernels, ...] = ()
    serving: Serving | None = None
    controller: Controller | None = None
    sessions: IntArray | None = None
    concurrency: int | None = None
    bin_s: float = 10.0

    @property
    def current(self) -> Candidates:
        """Which servers may serve which adapter now."""
        return self.candidates if self.serving is None else self.serving.candidates()

    @cached_property
    def loop(self) -> Loop:
        """The event loop, compiled for these engines and this router."""
        own = ((name, getattr(self.router, name, None)) for name in HOOKS)
        return loop_of(self.others, tuple((name, each) for name, each in own if each is not None))

    def assign(
        self, adapter: IntArray, time_s: FloatArray, candidates: Candidates | None = None, rows: IntArray | None = None
    ) -> IntArray | None:
        """Return the server of each request, int64 (n,), if the router is static, else None.

        `candidates`: the current ones, if servers change; requests without a candidate get -1. `rows`: numbers of the
        requests, None: the first n. To keep sessions together, the first request of a session and adapter decides.
        """
        if self.sessions is None or not getattr(self.router, "keeps_sessions", False) or not len(adapter):
            return self._assign(adapter, time_s, candidates)
        session = self.sessions[: len(adapter)] if rows is None else self.sessions[rows]
        key = session * len(self.workload) + adapter
        _, place, which = np.unique(key, return_index=True, return_inverse=True)
        first = np.sort(place)
        servers = self._assign(adapter[first], time_s[first], candidates)
        return None if servers is None else servers[np.searchsorted(first, place)][which]

    def _assign(self, adapter: IntArray, time_s: FloatArray, candidates: Candidates | None) -> IntArray | None:
        """Assign as `assign` does, without regard to sessions."""
        if not isinstance(self.router, StaticRouter):
            return None
        c = self.candidates if candidates is None else candidates
        if candidates is not None:
            known = np.flatnonzero(np.diff(c.start)[c.group[adapter]] > 0)
            if len(known) < len(adapter):
                found = np.full(len(adapter), HOLD)
                if len(known):
                    found[known] = self._assign(adapter[known], time_s[known], c)
                return found
        with plugged(f"Router {self.router.name!r}"):
            found = self.router.assign(adapter.copy(), self.workload, c, self.seed)
        assigned: IntArray = checks.row(f"what router {self.router.name!r} assigns", found, whole=True)
        if assigned.shape != adapter.shape:
            rule = f"Expected router {self.router.name!r} to assign {len(adapter)} requests,"
            raise PluginError(f"{rule} got {assigned.shape}.")
        wrong = self._not_allowed(assigned, adapter, c)
        if len(wrong):
            r = int(wrong[0])
            raise self.wrong(r, int(adapter[r]), float(time_s[r]), assigned[r])
        return assigned

    def _not_allowed(self, assigned: IntArray, adapter: IntArray, c: Candidates) -> IntArray:
        """Return the positions of the requests whose server may not serve their adapter."""
        count, sizes = len(self.cluster), np.diff(c.start)
        inside = (assigned >= 0) & (assigned < count)
        allowed = np.repeat(np.arange(len(sizes)), sizes) * count + c.server
        return np.flatnonzero(~(inside & np.isin(c.group[adapter] * count + assigned, allowed)))

    def adapter_rows(self, adapter: IntArray) -> int:
        """Return the number of adapters a server has rows for: slightly more than it sees under random routing. Rows
        are added if they run out. Unused rows take memory, too: operating systems give large arrays pages of 2 MB."""
        m, count = len(self.workload), len(self.cluster)
        elsewhere = np.power(1.0 - 1.0 / count, np.bincount(adapter, minlength=m))
        return min(m, len(adapter) // count + 64, int(1.1 * (m - elsewhere.sum())) + 64)

    def run(
        self, servers: Servers, engines: Engines, assigned: IntArray | None, content: Content | None = None
    ) -> Servers:
        """Route all requests and run every server to the end; return the servers, whose arrays may have grown.
        `content`: which requests share prefixes, for routers that read prompts."""
        acting: tuple[object, ...] = (self.policy, self.router)
        ticks = [each for each in acting if isinstance(each, TickingPolicy | TickingRouter)]
        plain = self.way is None and self.max_outstanding is None and self.serving is None
        plain &= self.concurrency is None
        if assigned is not None and not ticks and plain:
            if engines is None and servers.ahead is None:
                jobs = -1 if len(servers.server) >= MANY else 1
                run_apart(servers, assigned, self.duration_s, self.loop.run_until, jobs)
                return servers
            r = 0
            while (r := events.deal(servers, assigned, r)) < len(assigned):
                servers = with_more_rows(servers)
        else:
            servers = self._routed(servers, engines, assigned, ticks, content)
        before_end_s = math.nextafter(self.duration_s, 0.0)
        while self.way is not None and not self.loop.pass_on(servers, self.way, before_end_s, engines):
            servers = with_more_rows(servers)
        for s in range(len(self.cluster)):
            self.loop.run_until(servers, s, self.duration_s, engines)
        return servers

    def _routed(
        self, servers: Servers, engines: Engines, assigned: IntArray | None, ticks: list[Ticking],
        content: Content | None,
    ) -> Servers:  # fmt: skip
        """Route all requests; `events.route` returns when it needs the Python router, a tick or more rows."""
        router, n = self.router, len(servers.server)
        given = np.zeros(0, dtype=np.int64)
        p: Any = np.zeros(1)
        clock = _Clock(self, servers, engines, ticks)
        reading = isinstance(router, ReadingRouter)
        interval_s = 0.0 if reading else self.stats_interval_s
        if isinstance(router, ReadingRouter):
            given = np.full(n, events.ASK)
            router.start(clock.view, self.seed)
        elif assigned is not None:
            given = assigned
        elif isinstance(router, ScoringRouter):
            p = router.state(router.parameters(self.cluster, self.workload), servers, content or Content.none(n))
        else:
            raise PluginError(f"Expected router {router.name!r} to have assign(…), or start(…) and route(…).")
        r, now_s, c = 0, 0.0, self.current
        limit = NO_LIMIT if self.max_outstanding is None else self.max_outstanding
        while True:
            seen = None if reading else servers  # nothing reads `seen`, and passing it takes time
            if interval_s:
                known = servers.servers.copy()
                seen = servers._replace(servers=known, whole=whole_of(known), classes=servers.classes.copy())
            stop_s = min(clock.next_s, self.duration_s)
            task = events.Task(given, p, c, float(interval_s), limit, self.way)
            r, now_s, asked = self.loop.route(servers, seen, task, r, (now_s, stop_s), engines)
            # All requests are routed; what may still act goes on until the end.
            if r == n and clock.acts:
                now_s = stop_s
            if now_s >= self.duration_s or (r == n and not clock.acts):
                return servers
            if asked:
                given[r] = self._decision(r, now_s, servers, clock.view)
            # Routing only stops early if an adapter finds no row.
            elif now_s < stop_s:
                servers = with_more_rows(servers)
                clock.follow(servers)
            else:
                servers = clock.tick(stop_s)
                if clock.changed:
                    before, c = c, self.current
                    clock.view.allow(c)
                    same = before.same(c) and self.serving is not None and not self.serving.orphans
                    if same and now_s < clock.assigned_s:
                        continue
                    servers = self._resend(clock, c, p, self._again(clock, given, r), given, now_s)

    def _again(self, clock: _Clock, given: IntArray, r: int) -> list[int]:
        """Return the requests of failed servers. A static router reassigns them and the requests from `r` on."""
        assert self.serving is not None
        servers, lost = clock.servers, sorted(self.serving.orphans)
        self.serving.orphans.clear()
        if isinstance(self.router, StaticRouter):
            end = len(given)
            if self.controller is not None:  # it may change the servers again soon
                clock.assigned_s = float(servers.sent_s[r] if r < end else math.inf) + ASSIGNED_S
                end = int(np.searchsorted(servers.sent_s, clock.assigned_s))
            left = np.concatenate([np.array(lost, dtype=np.int64), np.arange(r, end)])
            found = self.assign(servers.adapter[left], servers.sent_s[left], self.current, left)
            assert found is not None
            given[left] = found
        elif isinstance(self.router, ReadingRouter):
            given[lost] = events.ASK
        return lost

    def _resend(self, clock: _Clock, c: Candidates, p: Any, lost: list[int], given: IntArray, now_s: float) -> Servers:
        """Send the `lost` requests again at `now_s`; refuse a request for which the router finds no server."""
        clock.servers.touched[:] = 1  # the router may know an older state of them
        for r in lost:
            servers = clock.servers
            g = c.group[servers.adapter[r]]
            if c.start[g] == c.start[g + 1]:
                s = HOLD
            elif isinstance(self.router, ReadingRouter):
                s = self._decision(r, now_s, servers, clock.view)
            elif isinstance(self.router, StaticRouter):
                s = int(given[r])
            else:
                s = int(self.loop.choose(servers, p, c, r))
            if s == HOLD:
                servers.server[r] = REFUSED
                continue
            while not give(clock.servers, s, r, now_s):
                clock.follow(with_more_rows(clock.servers))
        clock.servers.touched[:] = 1
        return clock.servers

    def _decision(self, r: int, now_s: float, servers: Servers, view: ClusterView) -> int:
        """Return the server that a Python router chooses for a request, or HOLD."""
        a = int(servers.adapter[r])
        router = cast("ReadingRouter", self.router)  # checking its type costs more than its decision
        sent_s, prompt, output = float(servers.sent_s[r]), int(servers.prompt[r]), int(servers.output[r])
        request = Request(r, a, int(servers.ranks[a]), prompt, sent_s, output)
        try:
            s = router.route(request, view)
        except Exception as error:
            rule = f"Router {router.name!r} raised {type(error).__name__} on request {r} at"
            raise PluginError(f"{rule} {now_s:.6g} s: {error}.") from error
        try:
            if s != HOLD and s not in view.allowed(a):
                raise self.wrong(r, a, now_s, s)
        except TypeError:  # not a number
            raise self.wrong(r, a, now_s, s) from None
        return int(s)

    def wrong(self, r: int, adapter: int, now_s: float, server: object) -> PluginError:
        """Return the error for a router that sent a request to a server that may not serve it."""
        now = self.current.of(adapter)
        allowed = ", ".join(map(str, now[:8])) + (", …" if len(now) > 8 else "")
        return PluginError(
            f"Expected router {self.router.name!r} to send request {r} of adapter "
            f"{self.workload.names[adapter]!r} at {now_s:.6g} s to a server that may serve it ({allowed}), "
            f"got {server!r}."
        )


class _Clock:
    """The times at which cache policies, routers, changes and the controller act."""

    def __init__(self, work: Dispatch, servers: Servers, engines: Engines, ticks: list[Ticking]) -> None:
        self.work, self.servers, self.engines, self.ticks = work, servers, engines, ticks
        on = None if work.serving is None else work.serving.on
        self.view = ClusterView(work.cluster, work.workload, work.current, servers, on)
        for each in ticks:
            if isinstance(each, TickingPolicy):
                each.start(self.view, work.seed)
        self.serving, self.controller, self.changed = work.serving, work.controller, False
        acting: tuple[Any, ...] = (*ticks, *filter(None, [work.controller]))
        for one in acting:
            name = repr(getattr(one, "name", "controller"))
            checks.real(f"period_s of {name}", one.period_s, low=1e-3)  # each turn takes time
        self._due_s = [float(each.period_s) for each in ticks]
        self._control_s = 0.0 if self.controller is not None else math.inf
        self.assigned_s = math.inf  # until when a static router has assigned requests

    @property
    def acts(self) -> bool:
        """Whether anything may act after the last request."""
        return bool(self.ticks) or self.serving is not None

    @property
    def next_s(self) -> float:
        """The next time at which anything acts, s; infinite if nothing does."""
        changes_s = math.inf if self.serving is None else self.serving.next_s
        return min(*self._due_s, changes_s, self._control_s, self.assigned_s, math.inf)

    def follow(self, servers: Servers) -> None:
        """Use the larger arrays of the event loop."""
        self.servers = servers
        self.view.follow(servers)

    def tick(self, now_s: float) -> Servers:
        """Let everything act that is due; return the servers, whose arrays may have grown."""
        while not self.work.loop.pass_on(self.servers, self.work.way, now_s, self.engines):
            self.follow(with_more_rows(self.servers))
        for k, each in enumerate(self.ticks):
            if self._due_s[k] <= now_s:
                self._due_s[k] += each.period_s
                with plugged(f"{each.name!r}, at {now_s:.6g} s,"):
                    for move in list[Any](each.tick(now_s, self.view) or ()):
                        act = self._move if isinstance(move, Resend) else self._apply
                        act(each.name, move, now_s)
        self.changed = False
        self.servers.touched[:] = 1
        if self.serving is not None:
            self._change(self.serving, now_s)
        return self.servers

    def _change(self, serving: Serving, now_s: float) -> None:
        """Call the controller if it is due, and make the changes that are due."""
        if self.controller is not None and self._control_s <= now_s:
            self._control_s += self.controller.period_s
            with plugged(f"The controller, at {now_s:.6g} s,"):
                changes = list(self.controller.act(now_s, self.view) or ())
            serving.add(changes, now_s)
        self.changed = now_s >= self.assigned_s
        if serving.next_s <= now_s:
            serving.apply(self.servers, now_s)
            self.changed = True

    def _move(self, name: str, move: Resend, now_s: float) -> None:
        """Move a request, with the tokens that it has, to another server."""
        r, old = move.request, int(self.servers.server[move.request])
        place = 0 if self.engines is None else int(self.engines[old])
        withdraw = self.work.others[place - 1].withdraw if place else None
        if withdraw is None:
            raise IncompatibleError(f"Router {name!r} moves requests, which servers of engine dlora alone give up.")
        held = self.view.blocks_of(np.array([r]))[0] >= 0
        if r < 0 or not held or move.server not in self.view.candidates(self.servers.adapter[r]):
            rule = f"Expected router {name!r} to move requests that are not finished to servers that may serve them,"
            raise PluginError(f"{rule} got request {r!r} for server {move.server!r} at {now_s:.6g} s.")
        withdraw(self.servers, self.servers.others[place - 1], old, r)
        while not give(self.servers, move.server, r, now_s):
            self.follow(with_more_rows(self.servers))

    def _keep(self, server: int) -> Callable[..., None]:
        """Return the function by which the engine of a server keeps adapters."""
        place = 0 if self.engines is None else int(self.engines[server])
        if place == 0:
            raise PluginError("Expected a policy to keep adapters on servers of other engines than vLLM's.")
        keep = self.work.others[place - 1].keep
        return lambda c, s, row, on: keep(c, c.others[place - 1], s, row, on)

    def _apply(self, name: str, move: Move, now_s: float) -> None:
        if move.adapter < 0 or move.server not in self.view.candidates(move.adapter):
            rule = f"Expected cache policy {name!r} to keep adapter {move.adapter!r} at {now_s:.6g} s on a server that"
            raise PluginError(f"{rule} may serve it, got {move.server!r}.")
        while not keep_on_gpu(self.servers, move.server, move.adapter, move.keep, self._keep(move.server)):
            self.follow(with_more_rows(self.servers))
