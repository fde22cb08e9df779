"""The memory of one simulated server: records with a comment for each field, and the arrays that hold them.

A cluster keeps many servers in arrays with a further axis and passes views of them. Zeros are an empty server (but for
the rings of `links`): memory that no request reaches is never touched. Links to requests are stored as number + 1,
and adapter `a` has row a + 1, so that 0 is "none". Switches are whole numbers, 0 or 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import numpy as np

from packer.arrays import ByteArray, FloatArray, IntArray, Record, record
from packer.terms import LINEAR_TERMS


HISTOGRAM_BINS = 2400
HISTOGRAM_FLOOR_MS = 0.01
HISTOGRAM_PER_E = 140.0  # bins per factor e: a resolution of 0.7 %


def numbers(first: int, end: int) -> list[int]:
    """NumPy's integers: Numba compiles a function anew for each of Python's that it is called with."""
    return cast("list[int]", list(np.arange(first, end)))


(NONE, NO_LIMIT) = (numbers(0, 1)[0], numbers(2**60, 2**60 + 1)[0])
(ACCEPTED, FINISHED, GIVEN_UP) = numbers(1, 4)
"""`status` of a request; GIVEN_UP while it waited; 0: not arrived, or refused."""
(IDLE, ACTIVE) = numbers(0, 2)
"""Adapters with waiting requests: outside the batch, in it (`heaps`)."""
(RUNS, WAITS) = numbers(0, 2)
"""What an adapter's requests do, as the front end knows."""
(IN_SLOT, ON_HOST) = numbers(0, 2)
"""The two caches of adapters."""

LINE = 64
"""Bytes of a cache line."""

LINK = record(
    ("before", "i4"),  # row before this one in the ring; of the ring's head: the last row
    ("after", "i4"),  # row after it; of the head: the first row
)
SERVER = record(
    # The clock, s.
    ("now_s", "f8"),  # time of the engine
    ("end_s", "f8"),  # end of the step that is executed
    ("next_s", "f8"),  # next request that is sent, infinite if none is known
    ("reach_s", "f8"),  # when the first request at the front end reaches the engine, infinite without one
    # Requests, side by side for routers.
    ("inbox_count", "i8"),  # in the inbox: offered, not yet sent
    ("pending_count", "i8"),  # at the front end: accepted, the engine has not got them yet
    ("waiting", "i8"),  # waiting in the engine
    ("running", "i8"),  # in the batch
    ("waiting_prompt", "i8"),  # prompt tokens of all that are not in the batch
    # The step.
    ("in_flight", "i8"),  # whether a step is executed
    ("step", "i8"),  # its number
    ("phase", "i8"),  # that number modulo `block_size`
    ("bucket", "i8"),  # and modulo `ring`
    ("step_decodes", "i8"),  # decodes that it computes
    ("step_prefill", "i8"),  # prefill tokens that it computes
    ("step_preempted", "i8"),  # requests that it preempted
    ("attended", "i8"),  # sum over its prefill tokens of the tokens that each attends to
    ("ended", "i8"),  # first request whose prefill it ends
    ("ended_last", "i8"),  # and the last one
    ("duration_s", "f8"),  # how long it takes
    ("load_ms", "f8"),  # of this, loads of adapters
    # The batch.
    ("decodes", "i8"),  # requests that decode
    ("used", "i8"),  # KV blocks in use, those of adapters included
    ("context_tokens", "i8"),  # context tokens of the decodes
    ("active", "i8"),  # distinct adapters
    ("active_ranks", "i8"),  # sum of their ranks
    ("request_ranks", "i8"),  # sum of the ranks of its requests
    ("largest", "i8"),  # class of the largest rank
    ("partial", "i8"),  # the request whose prefill the token budget cut
    ("partial_done", "i8"),  # how many of its tokens are done
    ("lingering", "i8"),  # adapters outside it with a request whose last token the step in flight computes
    # Settings.
    ("slots", "i8"),  # max_loras
    ("slot_rank", "i8"),  # max_lora_rank
    ("kv_blocks", "i8"),  # blocks of the KV cache
    ("block_size", "i8"),  # tokens of a block
    ("token_budget", "i8"),  # max_num_batched_tokens
    ("max_seqs", "i8"),  # max_num_seqs
    ("max_outstanding", "i8"),  # requests at once beyond which the client sends no more
    ("served", "i8"),  # adapters of the whole server
    ("host_places", "i8"),  # adapters that host memory holds
    ("track_host", "i8"),  # 0: all adapters are in host memory from the start
    ("spares_batch", "i8"),  # 1: adapters of the batch are never evicted
    (
        "stream",
        "i8",
    ),  # 1: requests are sent at `stream_s` and take the rows in order; 0: the inbox holds rows
    ("concurrency", "i8"),  # most requests that the client keeps open, 0: it never holds any back
    ("sentinel", "i8"),  # first of the rows of `links` that head the server's rings
    ("ring", "i8"),  # how many of these there are
    ("cache_rule", "i8"),  # how adapters leave the GPU in other engines than vLLM's (`cluster.caching`)
    ("bin_s", "f8"),  # width of the timeline's bins
    ("run_s", "f8"),  # end of the run
    # Rules of the engine's version: see `packer.twin.engine_rules`.
    ("prefills_first", "i8"),
    ("series_of_lists", "i8"),
    ("whole_sequence", "i8"),
    ("skipped_reversed", "i8"),
    ("skipped_first", "i8"),
    ("slots_of_running", "i8"),
    ("by_priority", "i8"),  # 1: requests are counted one by one (`engine.each`), and wait by priority
    # Requests on their way.
    ("inbox", "i8"),  # first one of the inbox
    ("inbox_last", "i8"),  # and the last one
    ("pending", "i8"),  # first one at the front end
    ("pending_last", "i8"),  # and the last one
    ("taken", "i8"),  # accepted so far
    ("sent", "i8"),  # sent so far, refused ones included
    ("released", "i8"),  # of the stream, how many times take into account when a place gets free
    ("exhausted", "i8"),  # 1: more requests were accepted than there are rows
    # Waiting requests.
    ("front", "i8"),  # key of the last one that was put in front
    ("heap_sizes", "i8", (2,)),  # sizes of `heaps`
    ("passed_key", "i8"),  # with `skipped_first`: requests with smaller keys were passed over in a walk
    # Adapters in slots and in host memory, and the walk over those of the batch.
    ("residents", "i8"),  # in slots
    ("on_host_count", "i8"),  # in host memory
    ("joiners", "i8"),  # adapters that joined in this step
    ("entries", "i8"),  # length of the list by entry
    ("set_step", "i8", (2,)),  # the last step whose batch is in each of `sets`, + 1
    ("set_count", "i8", (2,)),  # adapters in each of them
    ("walk_row", "i8"),  # which of them holds the current step
    ("oldest", "i8", (2,)),  # how far the search for the least recently used adapter has come, by cache
    ("join_step", "i8"),  # last step that adapters joined, + 1
    ("leave_step", "i8"),  # last step after which adapters left the batch, + 1
    ("leave_before", "i8"),  # and the one before
    # The front end.
    ("free_s", "f8"),  # when the work at hand is done
    ("seen_s", "f8"),  # when the last tokens were streamed
    ("scrape_s", "f8"),  # when the next scrape comes, infinite without any
    ("scraped_s", "f8"),  # time spent in scrapes
    ("series", "i8"),  # time series of /metrics
    ("names", "i8"),  # names in their labels
    ("sets", "i8"),  # hash of the sets of adapters that the next series would name
    ("named", "i8"),  # how many these are
    ("counted", "i8"),  # hash of the last ones counted
    # Totals.
    ("preemptions", "i8"),
    ("adapter_loads", "i8"),
    ("disk_loads", "i8"),
    ("unawaited", "i8"),  # loads that no request waited for
    ("aborted", "i8"),  # requests given up
    ("peak_blocks", "i8"),
    ("peak_running", "i8"),
    ("gaps", "i8"),  # gaps between tokens
    ("merged", "i8"),  # gaps that the client does not see because their chunks were merged
    ("busy_s", "f8"),
    ("load_s", "f8"),
    ("stall_s", "f8"),  # time of loads, for each running request
)
REQUEST = record(  # 96 bytes: a run keeps millions
    ("owner", "i4"),  # its adapter
    ("prompt", "i4"),  # prompt tokens
    ("output", "i4"),  # output tokens
    ("generated", "i4"),  # tokens that came out before its last preemption
    ("start", "i4"),  # step in which its last prefill ended
    ("context", "i4"),  # tokens of that prefill; where requests are counted one by one, its priority
    ("next", "i4"),  # the next one in whatever list it is in
    ("status", "i1"),  # ACCEPTED, FINISHED, GIVEN_UP or 0
    ("key", "i8"),  # place in the order of waiting requests
    ("sent_s", "f8"),
    ("reached_s", "f8"),  # got by the engine
    ("first_s", "f8"),  # first token, NaN before
    ("first_seen_s", "f8"),  # first token as the client sees it
    ("finish_s", "f8"),  # last token, NaN before
    ("finish_seen_s", "f8"),  # last token as the client sees it
    ("last_s", "f8"),  # last token before a preemption
)
RINGS = record(
    ("batch", LINK),  # running requests by admission
    ("due", LINK),  # requests that finish in the same step
)
ADAPTER = record(  # 128 bytes: two cache lines
    # The batch.
    ("in_batch", "i4"),  # running requests
    ("last_use", "i4"),  # step of the last use, + 2
    ("joined", "i4"),  # step in which it joined the batch, + 1
    ("walked", "i4", (2,)),  # place in each of the two sets of the walk
    ("resident", "i1"),  # whether it is in a slot
    ("on_host", "i1"),  # whether it is in host memory
    ("entered", "i1"),  # whether it is in the list by entry
    ("heap", "i1"),  # the heap that it is in, + 1
    # What it is.
    ("hash", "i8"),  # hash of its name
    ("rank", "i4"),
    ("rank_class", "i4"),  # row of `classes`
    # Rings, by last use of adapters outside the batch.
    ("idle", LINK),  # in slots
    # The queue.
    ("place", "i8"),  # its place in its heap
    ("first_key", "i8"),  # key of its first waiting request
    ("head", "i4"),  # its first waiting request
    ("tail", "i4"),  # and the last one
    # Seldom used.
    ("host", LINK),  # ring of those in host memory alone
    ("named", LINK),  # ring of those that the next series names, where that is a list
    ("words", "i8", (2,)),  # random words for the hash of the sets of running and of waiting adapters
    ("known_requests", "i4", (2,)),  # its requests that run and that wait as the front end counts them
    ("blocks", "i4"),  # KV blocks while it is in a slot, 0 unless memory is unified
    ("refused", "i4"),  # requests refused
    ("number", "i4"),  # its number in the fleet, in a cluster
    ("known", "i1"),  # whether it was ever used
)
WHAT_IT_IS = ("rank", "blocks", "rank_class", "hash", "words", "number")
"""Fields of an adapter that never change."""
PLACED = record(
    ("key", "i8"),  # key of an adapter's first waiting request
    ("row", "i8"),  # of the adapter
)
RANKS = record(
    ("members", "i8"),  # adapters of this rank in the batch
    ("rank", "i8"),
    ("unfinished", "i8"),  # requests of the inbox with this rank that are not finished
)
MEMBER = record(
    ("joining", "i8"),  # adapters that joined in this step, in that order
    ("entry", "i8"),  # adapters of the batch by their entry into it, and some that have left it
    ("spare", "i8"),  # room to grow a set
)
BIN = record(
    # Integrals over a bin of the timeline, but for the last three, which are counts.
    ("busy", "f8"),
    ("running", "f8"),
    ("waiting", "f8"),
    ("kv_blocks", "f8"),
    ("adapters", "f8"),
    ("prefill", "f8"),
    ("decode", "f8"),
    ("preempted", "f8"),
)


class ServerState(NamedTuple):
    """One server between two steps, or during one.

    For n requests and m adapters: server: a record of `SERVER`; stream_s (arrivals,), empty unless `stream`; requests
    (n,) of `REQUEST` and links (n + ring,) of `RINGS`: may be shared by the servers of a cluster, which then each have
    their own heads in `links`; adapters (m + 1,) of `ADAPTER`; classes (distinct ranks + 1,) of `RANKS`, ascending from
    row 1; heaps (2, m) of `PLACED`: adapters with waiting requests by the first of these, those outside the batch
    and those in it; phase int64 (block_size,): decodes by the step, modulo block_size, in which they need a block;
    ends int8 (ring,): 0 for heads in `links` whose rings of requests that finish are empty; histogram int64
    (HISTOGRAM_BINS,) of gaps between tokens; timeline (bins,) of `BIN`; vector float64 (terms,):
    what the terms of the step law multiply; means float64 (terms + 2,) or (0,): see `charge.add_means`; sets int64
    (2, places): two sets of adapters of the batch in the order of the walk, and
    members (places,) of `MEMBER`, one place where no adapter is ever evicted; series int64 (2^k,): hash set of the
    time series of /metrics, (1,) where they are not read.
    """

    server: Record
    stream_s: FloatArray
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
    means: FloatArray
    sets: IntArray
    members: Record
    series: IntArray


def adapters_of(ranks: IntArray, blocks: IntArray, seed: int = 0) -> tuple[Record, Record]:
    """`adapters` and `classes` (see `ServerState`) of idle adapters with these ranks and KV blocks, (m,) each.

    `seed`: of the hashes of the adapters' names, which Python draws anew for each process.
    """
    m = len(ranks)
    distinct, number = np.unique(ranks, return_inverse=True)
    rng = np.random.default_rng((seed, 0x77616C6B))
    adapters = zeros((m + 1,), ADAPTER)
    adapters["rank"][1:], adapters["blocks"][1:] = ranks, blocks
    adapters["rank_class"][1:] = number.ravel() + 1
    adapters["hash"][1:] = rng.integers(0, 2**61 - 1, size=m)
    adapters["words"][1:] = rng.integers(1, 2**62, size=(m, 2))
    classes = np.zeros(len(distinct) + 1, dtype=RANKS)
    classes["rank"][1:] = distinct
    mark_base(adapters[1:])
    return adapters, classes


def mark_base(adapters: Record) -> None:
    """Rows of rank 0, requests to the base model, count as members of every batch.

    They never wait for a slot, and never change what is counted when an adapter joins or leaves; nor do they change
    /metrics and first uses.
    """
    base = np.flatnonzero(adapters["rank"] == 0)
    for field in ("in_batch", "resident", "known", "known_requests"):
        adapters[field][base] = 1


def zeros(shape: tuple[int, ...], dtype: Any) -> Record:
    """Zeros that begin at a cache line. Memory that is never touched is never taken."""
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + LINE, dtype=np.uint8)
    first = -room.ctypes.data % LINE
    return room[first : first + size].view(dtype).reshape(shape)


def set_places(members: int) -> int:
    """Places of a Python set that so many members were added to: setobject.c grows it to four times its members."""
    places = 8
    while 5 * members >= 3 * (places - 1):
        grown = -(-3 * (places - 1) // 5)  # members at which it grows
        while places <= 4 * grown:
            places *= 2
    return places


def walk_places(slots: int) -> int:
    """Places of `sets` where adapters of the batch may be evicted: a set of them, or twice as many by entry."""
    return max(set_places(slots), 2 * slots + 1)


def new_links(n: int, ring: int, servers: int = 1) -> Record:
    """`links` for n requests and empty rings of `servers` servers, whose sentinels are n, n + ring, …"""
    links = np.empty(n + ring * servers, dtype=RINGS)
    clear_rings(links, n, len(links))
    return links


def clear_rings(links: Record, first: int, end: int) -> None:
    """The rings that these rows head are empty."""
    links[first:end].view(np.int32).reshape(-1, 4)[:] = np.arange(first, end)[:, None]


def ring_of(longest_output: int) -> int:
    """Heads of rings of a server whose requests have at most so many output tokens."""
    return longest_output + 2


def new_state(
    n: int, adapters: Record, classes: Record, settings: dict[str, float], mean_state: bool = False,
    scraped_steps: int = 0,
) -> ServerState:  # fmt: skip
    """An idle server with memory for n requests.

    `settings`: fields of `SERVER`, `block_size`, `ring`, `run_s` and `bin_s` among them. `mean_state`: sum up the state
    that tokens see. `scraped_steps`: engine steps for which time series are counted, 0 where /metrics is not read.
    """
    server = np.zeros(1, dtype=SERVER)[0]
    for field, value in {**settings, "sentinel": n}.items():
        server[field] = value
    server.next_s = server.reach_s = server.scrape_s = np.inf
    table = 2 ** int(np.clip(np.ceil(np.log2(2.0 * scraped_steps)), 10, 24)) if scraped_steps else 1
    slots, m, terms = int(server.slots), int(np.count_nonzero(adapters["rank"])), len(LINEAR_TERMS)
    places = walk_places(slots) if m > slots or adapters["blocks"].any() else 1
    return ServerState(
        server=server,
        stream_s=np.zeros(0),
        requests=zeros((n,), REQUEST),
        links=new_links(n, int(server.ring)),
        adapters=adapters,
        classes=classes,
        heaps=np.zeros((2, len(adapters) - 1), dtype=PLACED),
        phase=np.zeros(server.block_size, dtype=np.int64),
        ends=np.zeros(server.ring, dtype=np.int8),
        histogram=np.zeros(HISTOGRAM_BINS, dtype=np.int64),
        timeline=np.zeros(int(np.nextafter(server.run_s, 0.0) / server.bin_s) + 1, dtype=BIN),
        vector=np.zeros(terms),
        means=np.zeros(terms + 2 if mean_state else 0),
        sets=np.zeros((2, places), dtype=np.int64),
        members=np.zeros(places, dtype=MEMBER),
        series=np.zeros(table, dtype=np.int64),
    )


def register(state: ServerState, *, in_slots: bool) -> None:
    """Every adapter is loaded once before the first request, in order: host memory keeps as many as it has places.

    So does vLLM with those of `--lora-modules` (vllm/entrypoints/openai/serving_models.py, `init_static_loras`).
    `in_slots`: the last ones stay in slots.
    """
    server, adapters = state.server, state.adapters
    loaded = (np.flatnonzero(adapters["rank"][1:]) + 1).tolist()
    kept = loaded[-int(server["host_places"]) :]
    resident = kept[-int(server["slots"]) :] if in_slots else []
    adapters["on_host"][kept] = 1
    adapters["resident"][resident] = 1
    server["on_host_count"], server["residents"] = len(kept), len(resident)
    for ring, rows in (("host", kept[: len(kept) - len(resident)]), ("idle", resident)):
        around = [0, *rows, 0]
        adapters[ring]["before"][around[1:]] = around[:-1]
        adapters[ring]["after"][around[:-1]] = around[1:]
