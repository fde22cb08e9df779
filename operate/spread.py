"""Load moved between running servers with few loads: first by routes to copies that are there, then by new copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from packer.arrays import FloatArray

EVEN = 0.02
"""Servers whose used shares differ by less are even."""
MOST_STEPS = 200


def spread(
    load: FloatArray,
    caps: FloatArray,
    held: Sequence[Mapping[int, float]],
    fits: Sequence[Sequence[bool]],
    rooms: Sequence[int | None],
    most: float,
    most_loads: int,
) -> tuple[list[tuple[int, int]], dict[int, dict[int, float]]]:
    """Loads (server, adapter), and the new shares of the adapters that change, by server.

    From the server with the largest used share to that with the least: the part of a common adapter, else of the
    busiest one, as a new copy, which stays where it was, too. It ends when no server is above `most`.

    `load`: of each adapter, tok/s. `caps`: of each server. `held`: shares by adapter on each server. `fits`: whether a
    server takes an adapter. `rooms`: most adapters of each server.
    """
    own = [dict(each) for each in held]
    used = np.array([sum(load[a] * share for a, share in each.items()) for each in own])
    loads: list[tuple[int, int]] = []
    changed: set[int] = set()
    for _ in range(MOST_STEPS):
        level = used / caps
        s = int(level.argmax())
        t = int(level.argmin())
        if level[s] <= most or level[s] - level[t] < EVEN:
            break
        # What makes both even; a bit less is enough if it brings the first one below the limit.
        wanted = (used[s] * caps[t] - used[t] * caps[s]) / (caps[s] + caps[t])
        part = [(load[a] * share, a) for a, share in own[s].items() if share and load[a] * share > 0.0]
        common = [each for each in part if each[1] in own[t]]
        if not common:
            room = rooms[t]
            full = room is not None and len(own[t]) >= room
            common = [] if full or len(loads) >= most_loads else [e for e in part if fits[t][e[1]]]
            if not common:
                break
            common = [max(common)]  # its shares can follow the load later, without a further load
            loads.append((t, common[0][1]))
            own[t][common[0][1]] = 0.0
        tok_s, a = max(common)
        given = min(tok_s, wanted)
        share = own[s][a] * given / tok_s
        own[s][a] -= share
        if own[s][a] < 1e-9:
            share, own[s][a] = share + own[s][a], 0.0
        own[t][a] += share
        used[s] -= given
        used[t] += given
        changed.add(a)
    return loads, {a: {k: each[a] for k, each in enumerate(own) if each.get(a)} for a in changed}
