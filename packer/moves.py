"""From the servers that run to those of a new plan: which becomes which, what moves, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from packer.bin import Bin
from packer.errors import ValidationError


def match(old: Sequence[Bin], new: Sequence[Bin]) -> dict[int, int]:
    """Which running server becomes which new bin, new → old, so that most adapters stay in place.

    Maximum-weight bipartite matching over bins of equal GPU type; pairs that keep no adapter are left out.
    """
    home = {i: j for j, item in enumerate(old) for i in item.adapters}
    kept: dict[tuple[int, int], int] = {}
    for k, item in enumerate(new):
        for i in item.adapters:
            j = home.get(i)
            if j is not None and old[j].profile == item.profile:
                kept[k, j] = kept.get((k, j), 0) + 1
    found = _obvious(kept)
    taken = {*found}, {*found.values()}
    rest = {(k, j): n for (k, j), n in kept.items() if k not in taken[0] and j not in taken[1]}
    if rest:
        import networkx

        graph = networkx.Graph()
        graph.add_weighted_edges_from((k, len(new) + j, n) for (k, j), n in sorted(rest.items()))
        pairs = (sorted(pair) for pair in networkx.max_weight_matching(graph))
        found |= {k: j - len(new) for k, j in pairs}
    return dict(sorted(found.items()))


def _obvious(kept: Mapping[tuple[int, int], int]) -> dict[int, int]:
    """Pairs that keep at least as many adapters as the two servers could keep together with others."""
    best: dict[tuple[str, int], list[int]] = {}
    for (k, j), n in kept.items():
        for node in (("new", k), ("old", j)):
            best[node] = sorted([n, *best.get(node, [])], reverse=True)[:2]
    found: dict[int, int] = {}
    for (k, j), n in sorted(kept.items()):
        ours, theirs = best["new", k], best["old", j]
        if n == ours[0] == theirs[0] and k not in found and j not in found.values():
            other = (ours[1] if len(ours) > 1 else 0) + (theirs[1] if len(theirs) > 1 else 0)
            found |= {k: j} if n >= other else {}
    return found


def moved(old: Sequence[Bin], new: Sequence[Bin]) -> list[int]:
    """Adapters that ran before and run elsewhere now, sorted; new adapters don't count."""
    becomes = match(old, new)
    places: dict[int, set[int]] = {}
    for j, item in enumerate(old):
        for i in item.adapters:
            places.setdefault(i, set()).add(j)
    gone = {
        i
        for k, item in enumerate(new)
        for i in item.adapters
        if i in places and becomes.get(k) not in places[i]
    }
    return sorted(gone)


@dataclass(frozen=True, order=True)
class Move:
    """An adapter leaves the server `source` for `target`; None: it runs nowhere before, or after."""

    adapter: str
    source: int | None
    target: int | None


def ordered(moves: Sequence[Move], held: Mapping[int, int], room: Mapping[int, int]) -> list[list[Move]]:
    """Steps of moves that may be made at the same time, each after the one before it is done.

    An adapter is loaded on its target before it leaves its source, so that a move waits for the room that others make.
    Where they wait for each other in a circle, one of its adapters goes by way of a server with room; where no server
    has room, it is unloaded first and loaded again later, as two moves: it runs nowhere between these.

    `held`: adapters on each server now; `room`: the most that each may hold at once.
    Raises `ValidationError`: a server would hold more in the end.
    """
    waiting, now, steps = sorted(moves, key=_key), dict(held), list[list[Move]]()
    _check_end(moves, held, room)
    while waiting:
        free = {server: most - now.get(server, 0) for server, most in room.items()}
        step: list[Move] = []
        for move in waiting:
            if move.target is None or free[move.target] > 0:
                step.append(move)
                if move.target is not None:
                    free[move.target] -= 1
        done = set(step)
        if not step:
            blocked, first, then = _detour(waiting, free)
            step, done, waiting = [first], {blocked}, sorted([*waiting, then], key=_key)
        waiting = [move for move in waiting if move not in done]
        for move in step:
            for server, change in ((move.source, -1), (move.target, 1)):
                if server is not None:
                    now[server] = now.get(server, 0) + change
        steps.append(step)
    return steps


def _key(move: Move) -> tuple[bool, bool, str, int, int]:
    """What makes room first, then what also takes some, then what only takes it."""
    source, target = (-1 if each is None else each for each in (move.source, move.target))
    return target >= 0, source < 0, move.adapter, source, target


def _check_end(moves: Sequence[Move], held: Mapping[int, int], room: Mapping[int, int]) -> None:
    for server, most in room.items():
        end = held.get(server, 0) + sum((m.target == server) - (m.source == server) for m in moves)
        if end > most:
            raise ValidationError(
                f"Expected at most {most:,} adapters on server {server} in the end, got {end:,}."
            )


def _detour(waiting: Sequence[Move], free: Mapping[int, int]) -> tuple[Move, Move, Move]:
    """Of moves that wait for each other one, and the two that are made in its place."""
    import networkx

    graph = networkx.DiGraph()
    for move in waiting:
        if move.source is not None:
            graph.add_edge(move.source, move.target, move=move)
    circle = [graph.edges[edge]["move"] for edge in networkx.find_cycle(graph)]
    blocked: Move = min(circle)
    spare = max(free, key=lambda server: (free[server], -server))
    by = spare if free[spare] > 0 else None
    return blocked, replace(blocked, target=by), replace(blocked, source=by)
