"""Which servers serve which adapters while the cluster changes, and what a change does to a server."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numba import njit

from packer import checks
from packer.arrays import BoolArray, Record
from packer.change import Change
from packer.cluster import Cluster
from packer.errors import IncompatibleError, UnknownNameError, ValidationError
from packer.twin.cluster.ahead import forget_requests, own_parts
from packer.twin.cluster.caching import FIXED
from packer.twin.cluster.candidates import Candidates, allowed
from packer.twin.cluster.state import Servers, refused_of, row_of
from packer.twin.engine import state as rows
from packer.twin.engine.containers import link_last
from packer.twin.flags import ENGINE_FLAGS
from packer.workload import Workload

KEPT = (
    "taken", "sent", "preemptions", "adapter_loads", "disk_loads", "peak_blocks", "peak_running", "merged", "aborted",
    "unawaited", "busy_s", "load_s", "stall_s", "scraped_s",
)  # fmt: skip
"""Totals that a server keeps when it restarts."""


@njit(**ENGINE_FLAGS)
def _linked(ring: Record, i: int) -> None:
    """Put `i` at the end of a list; inlined kernels can't be called from Python."""
    link_last(ring, 0, i)


def ever_placed(cluster: Cluster, changes: Iterable[Change]) -> Cluster:
    """The cluster with every adapter that a server holds at any time."""
    if cluster.placement is None:
        return cluster
    held = [dict(adapters) for adapters in cluster.placement]
    for change in changes:
        for server, name in change.load:
            held[server].setdefault(name, 1.0)
    return replace(cluster, placement=tuple(held))


class Serving:
    """State of the servers as changes are made. `on` (S,): servers that get requests. `spans`: (server, start, stop) of
    past times for which GPUs are paid, s. `orphans`: requests of failed servers, to be sent again."""

    def __init__(
        self, cluster: Cluster, workload: Workload, slot_ranks: Sequence[int], changes: Sequence[Change],
        startup_s: float | None,
    ) -> None:  # fmt: skip
        if cluster.network_ms or any(math.isfinite(node.host_bytes) for node in cluster.nodes):
            raise IncompatibleError("Changes are simulated without network_ms and limits of host memory.")
        self.cluster, self.workload, self.startup_s = cluster, workload, startup_s
        self._ranks = np.asarray(slot_ranks, dtype=np.int64)
        self._index = {name: i for i, name in enumerate(workload.names)}
        self._shares: list[dict[int, float]] | None = None
        if cluster.placement is not None:
            self._shares = [{self._index[name]: share for name, share in held.items()} for held in cluster.placement]
        self.on: BoolArray = np.ones(len(cluster), dtype=np.bool_)
        self._queue: list[tuple[float, int, Change | tuple[int, ...]]] = []
        self._order = itertools.count()
        self.add(changes, 0.0)
        # A server whose first change is a start is off until then.
        first: dict[int, bool] = {}
        for change in sorted(changes, key=lambda each: each.time_s):
            for server in change.start:
                first.setdefault(server, True)
            for server in (*change.stop, *change.fail):
                first.setdefault(server, False)
        self.on[[server for server, starts in first.items() if starts]] = False
        self._since = np.where(self.on, 0.0, np.nan)
        self.spans: list[tuple[int, float, float]] = []
        self.orphans: list[int] = []
        self._fresh: Record | None = None
        self._fresh_ahead: list[Record] = []

    @property
    def next_s(self) -> float:
        """When the next change is due, s; infinite without one."""
        return self._queue[0][0] if self._queue else math.inf

    def add(self, changes: Iterable[Change], now_s: float) -> None:
        """Queue changes; an error if one is late, names an unknown server or adapter, or needs a missing placement."""
        for change in changes:
            checks.instance("a change", change, Change, "packer.Change(TIME_S, stop=(0,))")
            if change.time_s < now_s:
                raise ValidationError(f"Expected changes from {now_s:.6g} s on, got one at {change.time_s:.6g} s.")
            wrong = [s for s in change.servers if not 0 <= s < len(self.cluster)]
            if wrong:
                rule = f"Expected changes of the servers 0 to {len(self.cluster) - 1},"
                raise ValidationError(f"{rule} got server {wrong[0]}.")
            for name in (*(name for _, name in (*change.load, *change.unload)), *change.route):
                if name not in self._index:
                    raise UnknownNameError("adapter", name, self._index)
            if self._shares is None and (change.load or change.unload or change.route):
                rule = "Expected a placement that the router keeps where adapters are loaded or"
                raise ValidationError(f"{rule} routed, got none.")
            heapq.heappush(self._queue, (change.time_s, next(self._order), change))

    def begin(self, servers: Servers) -> None:
        """Keep the state of these idle servers, with which the run begins."""
        self._fresh = servers.servers.copy()
        if servers.ahead is not None:
            self._fresh_ahead = [part.copy() for part in own_parts(servers.ahead)]
        self._count_adapters(servers)

    def _count_adapters(self, servers: Servers) -> None:
        for s, held in enumerate(self._shares or ()):
            servers.servers["served"][s] = len(held)

    def candidates(self) -> Candidates:
        """Return the servers that may serve each adapter now; none if all that hold it are off."""
        return allowed(self.workload, self._ranks, np.flatnonzero(self.on).tolist(), self._shares)

    def apply(self, servers: Servers, now_s: float) -> None:
        """Make the changes that are due; add the requests that must be sent again to `orphans`."""
        while self._queue and self._queue[0][0] <= now_s:
            _, _, change = heapq.heappop(self._queue)
            if not isinstance(change, Change):  # servers whose start-up time is over
                for s in change:
                    # It may have been stopped or have failed while it started.
                    self.on[s] |= not math.isnan(self._since[s])
                continue
            for s in change.start:
                self._start(servers, s, now_s)
            for s in change.fail:
                self._fail(servers, s, now_s)
            # Loads come before the routes that need them; adapters are unloaded once no route names them.
            for s, name in change.load:
                self._load(servers, s, self._index[name], now_s)
            for name, shares in change.route.items():
                self._route(self._index[name], shares)
            for s, name in change.unload:
                if self._shares is not None:
                    self._shares[s].pop(self._index[name], None)
            for s in change.stop:
                self._end(s, now_s)
            self._count_adapters(servers)

    def _start(self, servers: Servers, s: int, now_s: float) -> None:
        if not math.isnan(self._since[s]):
            return
        # A stopped server that still works off its requests goes on as it is.
        if not (_unfinished(servers) & (servers.server == s)).any():
            self._reset(servers, s, now_s)
        self._since[s] = now_s
        kind = self.cluster.kind(s)
        ready_s = now_s + (kind.profile.startup_s if self.startup_s is None else self.startup_s)
        if ready_s <= now_s:
            self.on[s] = True
        else:
            heapq.heappush(self._queue, (ready_s, next(self._order), (s,)))

    def _end(self, s: int, now_s: float) -> None:
        if not math.isnan(self._since[s]):
            self.spans.append((s, float(self._since[s]), now_s))
        self.on[s], self._since[s] = False, np.nan

    def _fail(self, servers: Servers, s: int, now_s: float) -> None:
        lost = np.flatnonzero(_unfinished(servers) & (servers.server == s))
        servers.server[lost], servers.requests["status"][lost] = -1, 0
        for name in ("first_seen_s", "finish_seen_s"):
            servers.requests[name][lost] = np.nan
        if servers.ahead is not None:
            forget_requests(servers.ahead, lost)
        self.orphans += lost.tolist()
        self._end(s, now_s)
        self._reset(servers, s, now_s)

    def _reset(self, servers: Servers, s: int, now_s: float) -> None:
        """Reset server `s` to its state at a start: nothing on its GPU and no requests; its totals stay."""
        assert self._fresh is not None
        server, kept = servers.servers[s], {name: servers.servers[name][s] for name in KEPT}
        servers.servers[s] = self._fresh[s]
        for name, value in kept.items():
            server[name] = value
        server.now_s = server.end_s = now_s
        # The initial state has the time of the first scrape after a start at 0.
        server.scrape_s += now_s
        known = servers.adapters[s].copy()
        for part in ("adapters", "heaps", "phase", "ends", "sets", "members", "series"):
            getattr(servers, part)[s] = 0
        for name in rows.WHAT_IT_IS:
            servers.adapters[name][s] = known[name]
        seen = servers.adapters[s, 1 : servers.seen[s] + 1]
        rows.mark_base(seen)
        for own in servers.others:
            own.reset(s)
        if servers.ahead is not None:
            for own, fresh in zip(own_parts(servers.ahead), self._fresh_ahead, strict=True):
                own[s] = fresh[s]
        servers.classes["members"][s] = servers.classes["unfinished"][s] = 0
        rows.clear_rings(servers.links, int(server.sentinel), int(server.sentinel + server.ring))
        if server.cache_rule == FIXED:
            for row in np.flatnonzero(seen["rank"]) + 1:
                servers.adapters[s, row].resident = 1
                _linked(servers.adapters[s]["idle"], row)
        servers.wake_s[s] = math.inf

    def _load(self, servers: Servers, s: int, a: int, now_s: float) -> None:
        """Load adapter `a` from disk to the host of server `s`; vLLM's engine waits meanwhile. vllm/v1/engine/core.py
        handles `add_lora` between steps; `LRUCacheWorkerLoRAManager.add_adapter` reads the file."""
        assert self._shares is not None
        if a in self._shares[s]:
            return
        self._shares[s][a] = 0.0
        if math.isnan(self._since[s]) or not self.on[s]:  # the adapter is read while the server starts
            return
        server = servers.servers[s]
        if server.track_host:
            row = row_of(servers, s, a)
            adapter = servers.adapters[s, row]
            if row == 0 or adapter.on_host or server.on_host_count >= server.host_places:
                return  # the adapter's first request reads it
            adapter.on_host = 1
            server.on_host_count += 1
            _linked(servers.adapters[s]["host"], row)
        loading = servers.law.loading[servers.kind[s]]
        stall_s = 1e-3 * float(loading[2] + loading[3] * servers.ranks[a])
        server.disk_loads += 1
        server.load_s += stall_s
        if server.in_flight:
            server.end_s += stall_s
            servers.wake_s[s] = server.end_s
        else:
            server.now_s = max(float(server.now_s), now_s) + stall_s

    def _route(self, a: int, shares: Mapping[int, float]) -> None:
        assert self._shares is not None
        for s in shares:
            if a not in self._shares[s]:
                rule = f"Expected adapter {self.workload.names[a]!r} on every server that it is routed to,"
                raise ValidationError(f"{rule} got server {s}, which does not hold it.")
        for s, held in enumerate(self._shares):
            if a in held:
                held[a] = float(shares.get(s, 0.0))

    def finished(self, servers: Servers, duration_s: float) -> tuple[tuple[int, float, float], ...]:
        """Return the spans at the end of the run: a stopped server is paid until its last request ends."""
        for s in range(len(self.cluster)):
            self._end(s, math.inf)
        found, next_s, sent_s = [], dict[int, float](), servers.requests["sent_s"]
        ends_s = np.where(_unfinished(servers), duration_s, np.nan_to_num(servers.requests["finish_s"]))
        for s, start_s, stop_s in sorted(self.spans, reverse=True):
            last_s = ends_s.max(initial=stop_s, where=(servers.server == s) & (sent_s <= stop_s))
            found.append((s, start_s, min(float(last_s), next_s.get(s, duration_s))))
            next_s[s] = start_s
        return tuple(reversed(found))


def _unfinished(servers: Servers) -> BoolArray:
    """Which requests were neither refused nor given up, and have not ended, bool (n,)."""
    return ~np.isin(servers.requests["status"], (rows.FINISHED, rows.GIVEN_UP)) & ~refused_of(servers)
