"""The servers of a cluster as arrays, for the compiled event loop.

Requests are one table that all servers share, numbered in order of arrival; each request belongs to one server. A
server numbers adapters locally, in the order in which it first sees them, so that memory grows with the requests and
not with servers × adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.arrays import BoolArray, ByteArray, FloatArray, IntArray, Record
from packer.twin.cluster.ahead import Ahead, each_of, pool_of
from packer.twin.cluster.caching import FIXED
from packer.twin.cluster.client import Client
from packer.twin.engine.advance import advance
from packer.twin.engine.arrive import offer
from packer.twin.engine.containers import link_last
from packer.twin.engine.state import ADAPTER, NO_LIMIT, PLACED, ServerState, zeros
from packer.twin.flags import ENGINE_FLAGS, ENTERED, INLINED
from packer.twin.law.law import Law
from packer.twin.tuning.state import Tuning

_SPREAD = 0x9E3779B97F4A7C1  # an odd multiplier: spreads consecutive keys over the hash table


class Servers(NamedTuple):
    """All servers.

    servers (S,): records of `engine.state.SERVER`. whole (S, words): the same memory as integers, to copy it. live: the
    current records, where a router reads older ones in `servers`. Fields named as in `ServerState` have a leading axis
    for the server, or are shared by all (`requests`, `links`; of `vector` the first row). `law`: with a leading axis
    for the kind of server. sent_s (n,), adapter (n,), prompt (n,), output (n,): the requests, with the workload's
    numbers of adapters. server (n,): server of each request, -1 if not sent yet. longest (S,): tokens of the longest
    request that a server takes. kind (S,): row of a server in `law` and in `blocks` (kinds, m), the KV blocks of each
    adapter. ranks (m,), rank_class (m,): of the adapters. first, last (S,): range of `served` that has the numbers of
    the adapters that a server may serve, ascending. words (…, 3), parallel to `served`: `hash` and `words` of these
    adapters. seen (S,): number of adapters that a server has numbered. pair_key, pair_row: hash table with open
    addressing, (server, adapter) → row of `adapters`. wake_s (S,): when a server next has something to do, infinite if
    it is idle. touched int8 (S, up to a multiple of 8): 1 for servers that have changed since a router with `note`
    (`routers.base.ScoringRouter`) last read them. touched_words: the same memory, eight servers in an integer. on_way
    (S,): requests that left the router and did not reach the server yet. tuning: what the servers train, registers with
    a leading axis. ahead: `cluster.ahead.Ahead`, None if no server needs it. others: additional state of each other
    engine, in order (`EngineKernels`). client: the client, with places if it limits its open requests.
    """

    servers: Record
    whole: IntArray
    live: Record
    requests: Record
    links: Record
    adapters: Record
    classes: Record
    heaps: Record
    phase: IntArray
    ends: ByteArray
    histogram: IntArray
    timeline: Record
    vector: FloatArray
    sets: IntArray
    members: Record
    series: IntArray
    trees: Record | None
    nothing: FloatArray
    law: Law
    sent_s: FloatArray
    adapter: IntArray
    prompt: IntArray
    output: IntArray
    server: IntArray
    longest: IntArray
    kind: IntArray
    ranks: IntArray
    rank_class: IntArray
    first: IntArray
    last: IntArray
    served: IntArray
    words: IntArray
    blocks: IntArray
    seen: IntArray
    pair_key: IntArray
    pair_row: npt.NDArray[np.int32]
    wake_s: FloatArray
    touched: ByteArray
    touched_words: IntArray
    on_way: IntArray
    tuning: Tuning
    ahead: Any
    others: tuple[Any, ...]
    client: Client


REFUSED = -2  # In `server`: the client could not send the request.
Engines = IntArray | None
"""Engine of each server, (S,): 0 for vLLM's, else its position among the other engines of the cluster + 1. None if all
servers run vLLM and train nothing: Numba then drops the branch before it types it.
"""


class EngineKernels(NamedTuple):
    """What the loop needs of an engine other than vLLM's: compiled functions, except `memory`.

    `memory(setups, rows)`: allocate what the engine keeps of these servers (`cluster.setup.Setup`) besides `Servers`,
    with rows for this number of adapters each; the result has methods `with_rows(rows)` and `reset(s)`, which restarts
    server `s`. `state_of(c, memory, s)`: that server as the functions below take it. `advance(state, law, until_s)`: as
    `packer.twin.engine.advance.advance`. `event_s(state)`: when the server next has something to do, infinite if it is
    idle. `keep(c, memory, s, row, on)`: keep an adapter on the GPU, or no longer. `withdraw(c, memory, s, r)`: remove
    an accepted request, to be sent to another server; None: the engine can't.
    """

    memory: Any
    state_of: Any
    advance: Any
    event_s: Any
    keep: Any
    withdraw: Any = None


def whole_of(servers: Record) -> IntArray:
    """Return records of servers, (S,), as integers (S, …) in the same memory."""
    whole: IntArray = servers.view(np.int64).reshape(len(servers), -1)
    return whole


def pair_places(pairs: int) -> int:
    """Return the size of a hash table for this number of (server, adapter) pairs; it is never more than half full."""
    return 1 << max(4, (2 * pairs).bit_length())


def with_more_rows(servers: Servers) -> Servers:
    """Return the servers with room for twice as many adapters each; untouched rows take no memory."""
    count, old = servers.adapters.shape
    adapters = zeros((count, 2 * old - 1), ADAPTER)
    heaps = np.zeros((count, 2, 2 * old - 2), dtype=PLACED)
    adapters[:, :old], heaps[:, :, : old - 1] = servers.adapters, servers.heaps
    others = tuple(own.with_rows(2 * old - 2) for own in servers.others)
    grown = servers._replace(adapters=adapters, heaps=heaps, others=others)
    places = pair_places(count * (2 * old - 2))
    if places > len(servers.pair_key):
        key, row = np.zeros(places, dtype=np.int64), np.zeros(places, dtype=np.int32)
        grown = grown._replace(pair_key=key, pair_row=row)
        _pair_again(grown, servers.pair_key, servers.pair_row)
    return grown


@njit(inline="always", **ENGINE_FLAGS)
def state_of(c: Servers, s: int) -> ServerState:
    """Return server `s`, as views."""
    return ServerState(
        c.servers[s], c.nothing, c.requests, c.links, c.adapters[s], c.classes[s], c.heaps[s], c.phase[s],
        c.ends[s], c.histogram[s], c.timeline[s], c.vector[0], c.nothing, c.sets[s], c.members[s], c.series[s],
        c.trees,
    )  # fmt: skip


@njit(inline="always", **ENGINE_FLAGS)
def law_of_server(c: Servers, s: int) -> Law:
    """Return the law of server `s`, as views."""
    k = c.kind[s]
    return Law(c.law.coefficients[k], c.law.settings[k], c.law.loading[k], c.law.frontend[k])


@njit(**INLINED)
def pair_slot(c: Servers, s: int, a: int) -> int:
    """Return the position of (server, adapter) in the hash table; its key is 0 if the server has not seen the adapter.

    Positions of one adapter follow each other by server, and the step after a collision depends on the adapter alone:
    routers look up all servers in turn.
    """
    mask = c.pair_key.size - 1
    key = s * c.ranks.size + a + 1
    spread = (a + 1) * _SPREAD
    k, step = ((spread >> 20) + s) & mask, (spread >> 40) | 1
    while c.pair_key[k] != 0 and c.pair_key[k] != key:
        k = (k + step) & mask
    return k


@njit(**ENGINE_FLAGS)
def _pair_again(c: Servers, keys: IntArray, rows: npt.NDArray[np.int32]) -> None:
    """Insert all pairs of another hash table into that of `c`."""
    for i in range(keys.size):
        if keys[i] != 0:
            k = pair_slot(c, (keys[i] - 1) // c.ranks.size, (keys[i] - 1) % c.ranks.size)
            c.pair_key[k], c.pair_row[k] = keys[i], rows[i]


@njit(**ENGINE_FLAGS)
def row_of(c: Servers, s: int, a: int) -> int:
    """Return the row of an adapter on a server; 0 if the server has not seen it."""
    row: int = c.pair_row[pair_slot(c, s, a)]
    return row


@njit(**ENGINE_FLAGS)
def number(c: Servers, s: int, a: int) -> int:
    """Return the row of an adapter on a server, and assign one if the server has not seen it; 0 if none is free."""
    k = pair_slot(c, s, a)
    if c.pair_key[k] != 0:
        return int(c.pair_row[k])
    if c.seen[s] == c.heaps.shape[2]:
        return 0
    c.seen[s] += 1
    row = c.seen[s]
    c.pair_key[k] = s * c.ranks.size + a + 1
    c.pair_row[k] = row
    adapter = c.adapters[s, row]
    adapter.number = a
    adapter.rank = c.ranks[a]
    adapter.blocks = c.blocks[c.kind[s], a]
    adapter.rank_class = c.rank_class[a]
    low, high = c.first[s], c.last[s]
    if high - low == c.ranks.size:  # it may serve all
        low += a
    while high - low > 1 and c.served[low] != a:
        middle = (low + high) >> 1
        if c.served[middle] <= a:
            low = middle
        else:
            high = middle
    adapter.hash, adapter.words[0], adapter.words[1] = c.words[low, 0], c.words[low, 1], c.words[low, 2]
    if c.ranks[a] == 0:  # requests to the base model: see `mark_base`
        adapter.in_batch = adapter.resident = adapter.known = 1
        adapter.known_requests[0] = adapter.known_requests[1] = 1
    elif c.servers[s].cache_rule == FIXED:
        adapter.resident = 1
        link_last(c.adapters[s]["idle"], 0, row)
    return int(row)


def refused_of(c: Servers) -> BoolArray:
    """Return which requests were refused, bool (n,): by the client (`REFUSED`), or by a server that was full."""
    refused: BoolArray = c.server == REFUSED
    if (c.servers["max_outstanding"] < NO_LIMIT).any():
        given = c.requests["prompt"] > 0
        refused |= given & (c.server >= 0) & (c.requests["status"] == 0)
        for r in c.servers["inbox"] - 1:  # what a server did not look at yet
            while r >= 0:
                refused[r] = False
                r = c.requests["next"][r] - 1
    return refused


def keep_on_gpu(c: Servers, s: int, a: int, on: bool, keep: Callable[..., None]) -> bool:
    """Keep an adapter on the GPU of a server, or no longer; False if there is no row for it."""
    row = number(c, s, a)
    if row > 0 and c.servers["cache_rule"][s] != FIXED:
        keep(c, s, row, on)
    return bool(row > 0)


@njit(**ENGINE_FLAGS)
def give(c: Servers, s: int, r: int, at_s: float) -> bool:
    """Give request `r` to server `s` at `at_s`; False, with nothing changed, if there is no row for its adapter."""
    row = number(c, s, c.adapter[r])
    if row == 0:
        return False
    # A request that is too long is cut, but keeps at least one output token.
    prompt = min(c.prompt[r], c.longest[s] - 1)
    request = c.requests[r]
    request.owner = row - 1
    request.prompt = prompt
    request.output = min(c.output[r], c.longest[s] - prompt)
    request.sent_s = at_s
    c.server[r] = s
    c.touched[s] = 1
    offer(state_of(c, s), r)
    # A server that executes a step looks at the request when the step ends.
    if c.servers[s].in_flight == 0 and at_s < c.wake_s[s]:
        c.wake_s[s] = at_s
    return True


@njit(**ENGINE_FLAGS)
def run_other(c: Servers, s: int, until_s: float, engine: int) -> None:
    """Run a server of another engine, as `run_until` does; `packer.twin.cluster.loop` replaces this function."""


@njit(**INLINED)
def run_vllm(c: Servers, s: int, until_s: float, ahead: Ahead | None) -> None:
    """Run a vLLM server that trains nothing, as `run_until` does."""
    state, law = state_of(c, s), law_of_server(c, s)
    if ahead is None:
        advance(state, law, until_s, None, None, None)
    else:
        advance(state, law, until_s, pool_of(ahead.pool, s), each_of(ahead.each, s), None)


@njit(**ENTERED)
def run_until(c: Servers, s: int, until_s: float, engines: Engines) -> None:
    """Execute every step of server `s` that starts before `until_s`."""
    c.touched[s] = 1
    if engines is not None:
        if engines[s] > 0:
            run_other(c, s, until_s, engines[s])
            return
        tuning = Tuning(c.tuning.job[s], c.tuning.lengths)
        advance(state_of(c, s), law_of_server(c, s), until_s, None, None, tuning)
    else:
        run_vllm(c, s, until_s, c.ahead)
    c.wake_s[s] = next_event_s(c.servers[s])


@njit(**INLINED)
def next_event_s(server: Record) -> float:
    """When a server next has something to do, infinite if it is idle."""
    if server.in_flight == 1:
        return float(server.end_s)
    if server.running + server.waiting > 0:
        return float(server.now_s)
    # A load may have kept the engine busy beyond the next arrival.
    return float(max(server.now_s, min(server.next_s, server.reach_s)))


@njit(**ENGINE_FLAGS)
def outstanding(c: Servers, s: int) -> int:
    """Requests that a server has: running, waiting and on their way."""
    server = c.servers[s]
    total: int = server.running + server.waiting + server.inbox_count + server.pending_count + c.on_way[s]
    return total


@njit(**INLINED)
def on_gpu(c: Servers, s: int, a: int) -> bool:
    """Whether an adapter is on the GPU of a server."""
    row = row_of(c, s, a)
    resident: bool = c.ranks[a] == 0 or (row > 0 and c.adapters[s, row].resident == 1)
    return resident


@njit(**INLINED)
def has_room(c: Servers, s: int, r: int, max_batch: float, output_tokens: float) -> bool:
    """Whether a server has fewer than `max_batch` requests, and KV cache for one more with its expected output.

    Waiting prompts count as if they were in the KV cache. An idle server always has room.
    """
    server = c.servers[s]
    n = outstanding(c, s)
    if n == 0 or n >= max_batch:
        return bool(n == 0)
    free: int = (server.kv_blocks - server.used) * server.block_size - server.waiting_prompt
    return bool(free >= c.prompt[r] + output_tokens)
