"""Match running servers to the servers of a new plan, and order the moves between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from packer.bin import Bin
from packer.change import Change
from packer.errors import IncompatibleError, shown
from packer.plan import Moves, Plan
from packer.words import counted, listed
from packer.workload import Workload

Placement = Sequence[Mapping[str, float]]
"""For each server, its adapters with the share of their requests that it gets; 0: held, but gets no requests."""


def by_adapter(placed: Iterable[tuple[int, Mapping[str, float]]]) -> dict[str, dict[int, float]]:
    """For each adapter, its servers with their shares of its requests; `placed`: (server, its adapters with shares)."""
    found: dict[str, dict[int, float]] = {}
    for s, own in placed:
        for name, share in own.items():
            found.setdefault(name, {})[s] = share
    return found


def places(plan: Plan) -> dict[str, dict[int, float]]:
    """For each adapter that has a server: server → share of the adapter's requests."""
    names, placed = plan.workload.names, (zip(each.adapters, each.shares, strict=True) for each in plan.bins)
    return by_adapter((k, {names[i]: share for i, share in held}) for k, held in enumerate(placed))


def most_copies(bins: Iterable[Bin]) -> int:
    """The largest number of servers that hold the same adapter, at least 1."""
    return max(Counter(i for item in bins for i in item.adapters).values(), default=1)


def going_on(old: Plan, workload: Workload) -> dict[int, Bin]:
    """Servers of `old` that still have adapters, by name, in `workload`: number → bin with its indices."""
    number = {name: i for i, name in enumerate(workload.names)}
    now = {i: number[name] for i, name in enumerate(old.workload.names) if name in number}
    kept = ((k, item.renumbered(now)) for k, item in enumerate(old.bins))
    return {k: item for k, item in kept if item is not None}


def match(old: Sequence[Bin], new: Sequence[Bin]) -> dict[int, int]:
    """Match new bins to the running servers they continue, new → old, so that the most adapters stay in place.
    Maximum-weight bipartite matching over bins of equal profile; pairs that keep no adapter are left out. Among
    matchings that keep the most adapters, one that keeps the order of the servers is preferred (`aligned`)."""
    homes: dict[int, list[int]] = {}
    for j, item in enumerate(old):
        for i in item.adapters:
            homes.setdefault(i, []).append(j)
    kept: dict[tuple[int, int], int] = {}
    for k, item in enumerate(new):
        for i in item.adapters:
            for j in homes.get(i, ()):
                if old[j].profile == item.profile:
                    kept[k, j] = kept.get((k, j), 0) + 1
    found = _obvious(kept)
    taken = {*found}, {*found.values()}
    rest = {(k, j): n for (k, j), n in kept.items() if k not in taken[0] and j not in taken[1]}
    if rest:
        import networkx

        graph = networkx.Graph()
        most = 1 + max(len(old), len(new))
        # If bins are in the order of the running servers, continued ones come first, and k <= j for each pair.
        apart = {(k, j): (j - k) ** 2 if k <= j else most**2 for k, j in rest}
        # Whole numbers rank matchings: most adapters kept, then low numbers of new bins, then the order.
        weights = (n * most**6 - k * most**3 - apart[k, j] for (k, j), n in rest.items())
        edges = sorted(zip(rest, weights, strict=True))
        graph.add_weighted_edges_from((k, len(new) + j, weight) for (k, j), weight in edges)
        pairs = (sorted(pair) for pair in networkx.max_weight_matching(graph))
        found |= {k: j - len(new) for k, j in pairs}
    return dict(sorted(found.items()))


def _obvious(kept: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """Pairs that keep more adapters than the two servers could keep in total if matched to other servers."""
    best: dict[tuple[str, int], list[int]] = {}
    for (k, j), n in kept.items():
        for node in (("new", k), ("old", j)):
            best[node] = sorted([n, *best.get(node, [])], reverse=True)[:2]
    found: dict[int, int] = {}
    for (k, j), n in sorted(kept.items()):
        ours, theirs = best["new", k], best["old", j]
        if n == ours[0] == theirs[0] and k not in found and j not in found.values():
            other = (ours[1] if len(ours) > 1 else 0) + (theirs[1] if len(theirs) > 1 else 0)
            found |= {k: j} if n > other else {}
    return found


def moved(old: Sequence[Bin], new: Sequence[Bin]) -> list[int]:
    """Adapters that move to another server, sorted; new adapters don't count."""
    becomes = match(old, new)
    places: dict[int, set[int]] = {}
    for j, item in enumerate(old):
        for i in item.adapters:
            places.setdefault(i, set()).add(j)
    now = ((becomes.get(k), i) for k, item in enumerate(new) for i in item.adapters)
    return sorted({i for j, i in now if i in places and j not in places[i]})


def aligned(old: Sequence[Bin], bins: Sequence[Bin]) -> list[Bin]:
    """Bins in the order of the running servers that they continue; new servers come last."""
    order, places = list(bins), list(range(len(bins)))
    for _ in places:  # the new order may yield another, equally good matching, once or twice
        becomes = match(old, order)
        found = sorted(places, key=lambda k: (becomes.get(k, len(old)), k))
        if found == places:
            break
        order = [order[k] for k in found]
    return order


def as_running(old: Sequence[Bin], bins: Sequence[Bin], becomes: Mapping[int, int] | None = None) -> list[Bin]:
    """The servers with settings of the running ones that they continue (`becomes`: their `match`), where all fits."""
    becomes = match(old, bins) if becomes is None else becomes
    before = {k: old[j] for k, j in becomes.items() if _fits(bins[k], old[j])}
    return [replace(item, settings=before[k].settings) if k in before else item for k, item in enumerate(bins)]


def _fits(item: Bin, running: Bin) -> bool:
    """Whether a server may have the settings of a running one: the ranks fit, and new adapters find LoRA on."""
    known = bool(running.max_loras) or set(item.adapters) <= set(running.adapters)
    return known and item.max_lora_rank <= running.max_lora_rank


def moves_of(old: Sequence[Bin], bins: Sequence[Bin]) -> Moves:
    """The moves from the running servers to the new bins."""
    becomes = match(old, bins)
    return Moves(tuple(moved(old, bins)), tuple(becomes.get(k) for k in range(len(bins))))


def rerouted(old: Plan, new: Plan, moves: Moves) -> list[str]:
    """Adapters that come to no other server, but leave one of theirs or get other shares of their requests, by name."""
    was, moved = places(old), {new.workload.names[i] for i in moves.adapters}
    now = {name: {moves.servers[k]: share for k, share in held.items()} for name, held in places(new).items()}
    return [
        name
        for name in was.keys() & now.keys() - moved
        if any(abs(was[name].get(j, 0.0) - now[name].get(j, 0.0)) > 1e-6 for j in was[name])
    ]


def restarted(old: Plan, moves: Moves, bins: Sequence[Bin]) -> list[tuple[int, int]]:
    """Pairs (server, server of `old` that it continues by `moves`) whose settings differ, so that it starts anew."""
    pairs = ((k, j) for k, j in enumerate(moves.servers) if j is not None)
    return [(k, j) for k, j in pairs if bins[k].settings != old.bins[j].settings]


@dataclass(eq=False)
class _Order:
    """State of a search for an order: `held` and `routes` so far; `doomed`: (server, adapter) pairs to unload."""

    goal: Placement
    room: Sequence[int | None]
    roomless: Set[str]
    held: list[set[str]]
    routes: dict[str, dict[int, float]]
    doomed: set[tuple[int, str]]
    changes: list[Change] = field(default_factory=list)

    def free(self, server: int) -> float:
        """Number of adapters that a server can still load."""
        room = self.room[server]
        return float("inf") if room is None else room - len(self.held[server] - self.roomless)

    def missing(self) -> list[tuple[int, str]]:
        """Loads that are left; loads that let an adapter leave another server come first."""
        leaving = {name for _, name in self.doomed}
        wanted = ((s, name) for s, placed in enumerate(self.goal) for name in placed)
        found = [(s, name) for s, name in wanted if name not in self.held[s]]
        return sorted(found, key=lambda each: (each[1] not in leaving, each))

    def add(
        self, load: list[tuple[int, str]], route: dict[str, dict[int, float]], unload: list[tuple[int, str]]
    ) -> None:
        """Append one change."""
        for s, name in load:
            self.held[s].add(name)
        route = {name: shares for name, shares in route.items() if shares != self.routes.get(name)}
        self.routes |= route
        for s, name in unload:
            self.held[s].discard(name)
        if load or route or unload:
            self.changes.append(Change(0.0, load=tuple(load), route=route, unload=tuple(unload)))

    def step(self) -> bool:
        """Load adapters that fit, route adapters that all their servers hold, unload moved ones; False: no change."""
        load: list[tuple[int, str]] = []
        for s, name in self.missing():
            if self.free(s) - sum(t == s for t, _ in load) >= 1:
                load.append((s, name))
        places = by_adapter(enumerate(self.goal))
        done = {
            name: shares
            for name, shares in places.items()
            if all(name in self.held[s] or (s, name) in load for s in shares)
        }
        unload = [(s, name) for s, name in sorted(self.doomed) if name not in places or name in done]
        self.doomed -= set(unload)
        routed = {name: {s: share for s, share in shares.items() if share} for name, shares in done.items()}
        before = len(self.changes)
        self.add(load, {name: shares for name, shares in routed.items() if shares}, unload)
        return len(self.changes) > before

    def make_room(self) -> bool:
        """Free a place on a full server: unload a replicated adapter, or move one to a server with a free place."""
        import networkx

        full = {s for s, _ in self.missing()}
        for s, name in sorted(self.doomed):
            others = [t for t, held in enumerate(self.held) if t != s and name in held]
            if s in full and others:
                self._leave(s, name, [], others)
                return True
        graph = networkx.MultiDiGraph()
        for t, name in self.missing():
            graph.add_edges_from((s, t, name) for s, leaving in self.doomed if leaving == name)
        try:
            cycle = networkx.find_cycle(graph)
        except networkx.NetworkXNoCycle:
            return False
        spare = [t for t in range(len(self.goal)) if self.free(t) >= 1]
        if not spare:
            return False
        s, _, name = min(cycle)
        self._leave(s, name, [(spare[0], name)], [spare[0]])
        # The place on the spare server is only a stopover.
        self.doomed.add((spare[0], name))
        return True

    def _leave(self, s: int, name: str, load: list[tuple[int, str]], others: list[int]) -> None:
        self.doomed.discard((s, name))
        self.add(load, {name: {t: 1.0 / len(others) for t in others}}, [(s, name)])


def ordered(
    now: Placement, goal: Placement, room: Sequence[int | None] = (), *, prune: bool = False,
    roomless: Set[str] = frozenset(), names: Sequence[str] = (),
) -> list[Change]:  # fmt: skip
    """Changes from `now` to `goal`; each change loads, then routes, then unloads.

    An adapter leaves a server only after all its new servers hold it. A load waits until another adapter's move frees
    a place. A cycle of moves that wait for each other is broken by a free slot or by a replica.

    `room`: most adapters of each server; None, or an empty sequence: any number. Those of `roomless`, as
    the base model, take no room.
    `prune`: also unload adapters that the goal does not name at all. `names`: of the servers, for messages.
    Raises `IncompatibleError`: the goal has more adapters on a server than fit, or no order exists on servers so full.
    """
    rooms, names = list(room) or [None] * len(goal), names or [f"server {s}" for s in range(len(goal))]
    named = {name for placed in goal for name in placed}
    for s, placed in enumerate(goal):
        kept = {*placed, *(name for name in now[s] if not prune and name not in named)} - roomless
        limit = rooms[s]
        if limit is not None and len(kept) > limit:
            most = f"{counted(limit, 'adapter')} on {names[s]}, for which it has room"
            raise IncompatibleError(f"Expected at most {most}, got {len(kept)}.")
    routes = by_adapter((s, {n: share for n, share in own.items() if share}) for s, own in enumerate(now))
    running = ((s, name) for s, placed in enumerate(now) for name in placed)
    doomed = {(s, name) for s, name in running if name not in goal[s] and (prune or name in named)}
    work = _Order(goal, rooms, roomless, [set(placed) for placed in now], routes, doomed)
    while work.step() or (work.missing() and work.make_room()):
        pass
    if left := work.missing():
        waiting = listed([f"{shown(name)} on {names[s]}" for s, name in left], 3)
        rule = f"The servers are full, and no order of moves makes room for {waiting}:"
        raise IncompatibleError(f"{rule} give one of them room for an adapter more.")
    return work.changes
