"""The event loop of a cluster: arrivals in order of time, and between them the steps of the servers.

A router sees each server as it is during the step in flight: the batch is as scheduled, requests that finish in this
step still count, and requests given to the server since then count as waiting.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.client import first_free_s, is_closed, see_ends, take_place
from packer.twin.cluster.routers.base import HOLD
from packer.twin.cluster.state import REFUSED, Engines, Servers, give, outstanding, run_until
from packer.twin.cluster.transit import Transit, next_s, receive, send
from packer.twin.engine.state import NO_LIMIT
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


class Task(NamedTuple):
    """How requests are routed: by `assigned`, or by a score function if `assigned` is empty; to servers among `ways`.

    p: parameters of the score function. interval_s: time between updates of the server state that it reads; 0: up to
    date. limit: most open requests; further ones are refused. way: None if requests reach their server at once.
    """

    assigned: IntArray
    p: Any
    ways: Candidates
    interval_s: float
    limit: int
    way: Transit | None


ASK = -3  # In `Task.assigned` instead of a server: a Python router decides when the request is due.


@njit(**ENGINE_FLAGS)
def deal(c: Servers, assigned: IntArray, first: int) -> int:
    """Give each request from `first` on to its server; return the first that found no row, or their number."""
    for r in range(first, c.server.size):
        if not give(c, assigned[r], r, c.sent_s[r]):
            return r
    return c.server.size


@njit(**CALLED)
def run_all_until(c: Servers, until_s: float, engines: Engines) -> None:
    """Every server executes the steps that start before `until_s`."""
    for s in range(c.wake_s.size):
        if c.wake_s[s] <= until_s:  # few servers have something to do
            run_until(c, s, until_s, engines)


@njit(**INLINED)
def _look(c: Servers, seen: Servers, looked_s: float, interval_s: float, now_s: float) -> float:
    """Update the server state that a router reads, if the update is due; return the time of the last update."""
    if interval_s == 0.0 or now_s < looked_s + interval_s:
        return looked_s
    for s in range(c.whole.shape[0]):
        seen.touched[s] = 1
        for j in range(c.whole.shape[1]):
            seen.whole[s, j] = c.whole[s, j]
        for k in range(c.classes.shape[1]):
            seen.classes[s, k].members = c.classes[s, k].members
            seen.classes[s, k].unfinished = c.classes[s, k].unfinished
    return now_s


@njit(**INLINED)
def next_change_s(c: Servers, way: Transit | None, now_s: float, engines: Engines) -> float:
    """Start the steps that are due at `now_s`; return when the next step ends or a request under way moves on."""
    # Servers run the steps that start strictly before the given time: those of `now_s` need a later one.
    run_all_until(c, np.nextafter(now_s, math.inf), engines)
    earliest = math.inf if way is None else next_s(way)
    for s in range(c.wake_s.size):
        earliest = min(earliest, c.wake_s[s])
    return earliest


@njit(**ENGINE_FLAGS)
def pass_on(c: Servers, way: Transit | None, until_s: float, engines: Engines) -> bool:
    """Run the servers and deliver the requests under way until `until_s`; False if an adapter found no row."""
    if way is not None:
        while next_s(way) <= until_s:
            at_s = next_s(way)
            run_all_until(c, at_s, engines)
            if not receive(c, way, at_s):
                return False
    if is_closed(c.client):
        for s in range(c.wake_s.size):
            while c.wake_s[s] < until_s:  # the client sees the ends of each step, whatever the next ones stream
                at_s = c.wake_s[s]
                run_until(c, s, np.nextafter(at_s, math.inf), engines)
                see_ends(c, s, s + 1, at_s)
    run_all_until(c, until_s, engines)
    if is_closed(c.client):
        see_ends(c, 0, c.wake_s.size, until_s)
    return True


@njit(**INLINED)
def hand_over(c: Servers, way: Transit | None, s: int, r: int, now_s: float) -> bool:
    """Send request `r` to server `s`; False, with nothing changed, if there is no row for its adapter."""
    if way is not None:
        send(c, way, s, r, now_s)
        return True
    given = bool(give(c, s, r, now_s))
    if is_closed(c.client) and given:
        take_place(c.client)
    return given


@njit(**INLINED)
def _full(c: Servers, limit: int) -> bool:
    """Whether the cluster has at least `limit` open requests."""
    total = 0
    for s in range(c.wake_s.size):
        total += outstanding(c, s)
    return total >= limit


@njit(**INLINED)
def score(c: Servers, p: FloatArray, s: int, r: int) -> float:
    """Return the score of server `s` for request `r`; `packer.twin.cluster.loop` replaces this function."""
    return 0.0


@njit(**INLINED)
def note(c: Servers, p: FloatArray, s: int) -> None:
    """Update what a router keeps in `p` about a server that has changed."""


@njit(**INLINED)
def among(c: Servers, p: FloatArray, word: int, r: int, lowest: float) -> int:
    """Return as bits which of the eight servers of `touched_words[word]` may have a score below `lowest`."""
    return 255


@njit(**INLINED)
def worth(c: Servers, p: FloatArray, s: int, r: int, lowest: float) -> bool:
    """Whether a server's score may be below `lowest`, according to what `note` kept; if not, it is not computed."""
    return True


@njit(**INLINED)
def survey(c: Servers, p: FloatArray, server: IntArray, first: int, last: int, r: int) -> None:
    """Inspect all candidates, `server[first:last]`, before scoring."""


@njit(**INLINED)
def sent(c: Servers, p: FloatArray, s: int, r: int) -> None:
    """Update what a router keeps in `p` about a request that it sent."""


@njit(**ENGINE_FLAGS)
def choose(c: Servers, p: FloatArray, ways: Candidates, r: int) -> int:
    """Return the candidate with the smallest score, the next in turn among equal ones; HOLD if all are infinite."""
    g, server = ways.group[c.adapter[r]], ways.server
    first, last = ways.start[g], ways.start[g + 1]
    for word in range(c.touched_words.size):
        if c.touched_words[word] != 0:
            for s in range(8 * word, min(8 * word + 8, c.wake_s.size)):
                if c.touched[s] == 1:
                    note(c, p, s)
            c.touched_words[word] = 0
    # Each request begins its search one candidate further, so that servers with equal scores take turns.
    best, lowest = HOLD, math.inf
    every, turn = last - first == c.wake_s.size, first + r % (last - first)
    survey(c, p, server, first, last, r)
    for part in range(2):
        j, end = (turn, last) if part == 0 else (first, turn)
        while j < end:
            word = (j - first if every else server[j]) >> 3
            may = among(c, p, word, r, lowest)
            # Positions are numbers of servers here, so all eight of the word can be skipped at once.
            if every and may == 0:
                j = first + 8 * (word + 1)
                continue
            while j < end and server[j] >> 3 == word:
                s = server[j]
                if (may >> (s & 7)) & 1 and worth(c, p, s, r, lowest):
                    value = score(c, p, s, r)
                    if value < lowest:
                        best, lowest = s, value
                j += 1
    return best


@njit(**INLINED)
def set_out_s(c: Servers, r: int, now_s: float, end_s: float, engines: Engines) -> float:
    """Return when request `r` reaches the router, from `now_s` on; infinite if not before `end_s`.

    If the client holds requests back, this is when it has a place for the request; earlier steps are executed.
    """
    if not is_closed(c.client):
        return math.inf if c.sent_s[r] >= end_s else max(now_s, c.sent_s[r])
    own_s = c.client.own_s[r]
    if own_s >= end_s:
        return math.inf
    if own_s > now_s:
        now_s = own_s
    pass_on(c, None, now_s, engines)
    while first_free_s(c.client) > now_s:
        # Steps that start now see no request that is sent later.
        now_s = min(first_free_s(c.client), next_change_s(c, None, now_s, engines))
        if now_s >= end_s:
            return math.inf
        pass_on(c, None, now_s, engines)
    c.sent_s[r] = max(own_s, first_free_s(c.client))
    return now_s


@njit(**ENGINE_FLAGS)
def route(
    c: Servers, seen: Servers | None, task: Task, first: int, span_s: tuple[float, float], engines: Engines
) -> tuple[int, float, bool]:
    """Route the requests from `first` on that arrive within `span_s`.

    `seen`: the servers as a score function sees them: `c`, or copies updated every `interval_s`. A held request is
    offered again when a step ends or the copies are updated; those behind it wait. A request beyond the limit, or whose
    adapter no server serves, is refused. Returns the request at which routing stops (no row for its adapter, ASK in
    `assigned`, end of the span) or the number of requests; the time; and whether a Python router must decide.
    """
    assigned, ways, interval_s, way = task.assigned, task.ways, task.interval_s, task.way
    now_s, end_s = span_s
    looked_s = -math.inf
    for r in range(first, c.server.size):
        due_s = set_out_s(c, r, now_s, end_s, engines)
        if due_s == math.inf:
            return r, end_s, False
        now_s = due_s
        if not pass_on(c, way, now_s, engines):
            return r, now_s, False
        g = ways.group[c.adapter[r]]
        if ways.start[g] == ways.start[g + 1] or (task.limit < NO_LIMIT and _full(c, task.limit)):
            c.server[r] = REFUSED
            continue
        while True:
            if seen is None or assigned.size > 0:
                s = assigned[r]
            else:
                looked_s = _look(c, seen, looked_s, interval_s, now_s)
                s = choose(seen, task.p, ways, r)
            if s != HOLD:
                break
            # A Python router is asked again after the next change.
            if assigned.size > 0:
                assigned[r] = ASK
            changes_s = looked_s + interval_s if interval_s > 0.0 else next_change_s(c, way, now_s, engines)
            if changes_s >= end_s:
                return r, end_s, False
            now_s = changes_s
            if not pass_on(c, way, now_s, engines):
                return r, now_s, False
        if s == ASK or not hand_over(c, way, s, r, now_s):
            return r, now_s, s == ASK
        sent(c, task.p, s, r)
    return c.server.size, now_s, False
