"""The event loop of a cluster: arrivals in order of time, and between them the servers' own steps.

A router sees each server as it is during the step in flight: the batch as scheduled, its finishes not yet, and
requests given since then as waiting.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from packer.twin.cluster.routers.base import HOLD
from packer.twin.cluster.routers.scores import choose
from packer.twin.cluster.state import FloatArray, IntArray, Servers, give, run_until
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def deal(c: Servers, assigned: IntArray, first: int) -> int:
    """Give each request from `first` on to its server; returns the first that found no row, or their number."""
    for r in range(first, c.server.size):
        if not give(c, assigned[r], r, c.sent_s[r]):
            return r
    return c.server.size


@njit(**ENGINE_FLAGS)
def run_all_until(c: Servers, until_s: float) -> None:
    """Every server executes the steps that start before `until_s`."""
    for s in range(c.wake_s.size):
        if c.wake_s[s] <= until_s:
            run_until(c, s, until_s)


@njit(**ENGINE_FLAGS)
def _look(c: Servers, seen: Servers) -> None:
    """Bring the registers up to date by which a router knows the servers."""
    for s in range(c.ints.shape[0]):
        for j in range(c.ints.shape[1]):
            seen.ints[s, j] = c.ints[s, j]
        for k in range(c.classes.shape[1]):
            for j in range(c.classes.shape[2]):
                seen.classes[s, k, j] = c.classes[s, k, j]


@njit(**ENGINE_FLAGS)
def next_change_s(c: Servers, now_s: float) -> float:
    """When the next step of any server ends, after those that start at `now_s` were started."""
    run_all_until(c, np.nextafter(now_s, math.inf))
    earliest = math.inf
    for s in range(c.wake_s.size):
        earliest = min(earliest, c.wake_s[s])
    return earliest


@njit(**ENGINE_FLAGS)
def route(
    c: Servers, seen: Servers, interval_s: float, rule: int, p: FloatArray, group: IntArray, start: IntArray,
    server: IntArray, first: int, now_s: float, end_s: float,
) -> tuple[int, float]:  # fmt: skip
    """Route the requests from `first` on by a score function, from time `now_s` on.

    `seen`: the servers as the router knows them, `c` itself or with registers of their own that are brought up
    to date every `interval_s`. A held request is offered again whenever a step ends; those behind it wait.
    Returns the request that found no row for its adapter, or could not be placed by `end_s`, or their number;
    and the time.
    """
    looked_s = -math.inf
    for r in range(first, c.server.size):
        now_s = max(now_s, c.sent_s[r])
        run_all_until(c, now_s)
        if interval_s > 0.0 and now_s >= looked_s + interval_s:
            _look(c, seen)
            looked_s = now_s
        s = choose(rule, seen, p, group, start, server, r)
        while s == HOLD:
            now_s = next_change_s(c, now_s)
            if now_s >= end_s:
                return r, now_s
            run_all_until(c, now_s)
            s = choose(rule, seen, p, group, start, server, r)
        if not give(c, s, r, now_s):
            return r, now_s
    return c.server.size, now_s
