"""The memory of one simulated server: records with a comment for each field, and the arrays that hold them.

A cluster keeps many servers in arrays with one more axis and passes views of them. Zeros are an empty server, except
for the rings of `links`, so memory that no request uses is never touched. A link to request `r` is stored as r + 1, and
adapter `a` has row a + 1, so that 0 means "none". Switches are integers, 0 or 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import numpy as np

from packer.arrays import ByteArray, FloatArray, IntArray, Record, record
from packer.memo import Memo
from packer.terms import LINEAR_TERMS


HISTOGRAM_BINS = 2400
HISTOGRAM_FLOOR_MS = 0.01
HISTOGRAM_PER_E = 140.0  # bins per factor e: a resolution of 0.7 %


def numbers(first: int, end: int) -> list[int]:
    """Return NumPy integers: for each different Python integer, Numba would compile the called function again."""
    return cast("list[int]", list(np.arange(first, end)))


(NONE, NO_LIMIT) = (numbers(0, 1)[0], numbers(2**60, 2**60 + 1)[0])
(ACCEPTED, FINISHED, GIVEN_UP) = numbers(1, 4)  # `status` of a request; 0: not arrived, or refused.
(IDLE, ACTIVE) = numbers(0, 2)  # Rows of `heaps`: adapters with waiting requests, outside the batch or in it.
(RUNS, WAITS) = numbers(0, 2)  # Columns of `words`, `known_requests`: requests that run or wait for the front end.
(IN_SLOT, ON_HOST) = numbers(0, 2)  # The two caches of adapters.
LINE = 64  # Bytes of a cache line.

LINK = record(
    ("before", "i4"),  # row before this one in the ring; of the ring's head: the last row
    ("after", "i4"),  # row after it; of the head: the first row
)
SERVER = record(
    # The clock, s.
    ("now_s", "f8"),  # time of the engine
    ("end_s", "f8"),  # end of the step in flight
    ("next_s", "f8"),  # when the next request is sent, infinite if none is known
    ("reach_s", "f8"),  # when the first request at the front end reaches the engine, infinite without one
    # Numbers of requests, in adjacent fields for routers.
    ("inbox_count", "i8"),  # in the inbox: offered, not yet sent
    ("pending_count", "i8"),  # at the front end: accepted, not yet in the engine
    ("waiting", "i8"),  # waiting in the engine
    ("running", "i8"),  # in the batch
    ("waiting_prompt", "i8"),  # prompt tokens of all requests outside the batch
    # The step.
    ("in_flight", "i8"),  # whether a step is being executed
    ("step", "i8"),  # number of the step
    ("phase", "i8"),  # `step` modulo `block_size`
    ("bucket", "i8"),  # `step` modulo `ring`
    ("step_decodes", "i8"),  # decodes in the step
    ("step_prefill", "i8"),  # prefill tokens in the step
    ("step_preempted", "i8"),  # requests that the step preempted
    ("attended", "i8"),  # sum over the step's prefill tokens of the tokens that each attends to
    ("ended", "i8"),  # first request whose prefill the step ends
    ("ended_last", "i8"),  # last request of these, while the step is scheduled
    ("duration_s", "f8"),  # duration of the step
    ("load_ms", "f8"),  # part of the step's duration for loads of adapters, ms
    # The batch.
    ("decodes", "i8"),  # requests that decode
    ("used", "i8"),  # KV blocks in use, including blocks of adapters
    ("context_tokens", "i8"),  # context tokens of the decodes
    ("active", "i8"),  # distinct adapters in the batch
    ("active_ranks", "i8"),  # sum of their ranks
    ("request_ranks", "i8"),  # sum of the ranks of the batch's requests
    ("largest", "i8"),  # row of `classes` of the largest rank
    ("partial", "i8"),  # the request whose prefill the token budget cut
    ("partial_done", "i8"),  # tokens of that prefill that are computed
    ("lingering", "i8"),  # adapters outside the batch with a request that the step in flight finishes
    # Settings.
    ("slots", "i8"),  # max_loras
    ("slot_rank", "i8"),  # max_lora_rank
    ("kv_blocks", "i8"),  # blocks of the KV cache
    ("window", "i8"),  # tokens of a request that all layers keep
    ("windowed", "f8"),  # share of the KV cache in layers that keep `window` tokens only
    ("found_in", "i8"),  # blocks in multiples of which prefixes are found
    ("passed", "f8"),  # blocks that left the free queue, with those that layers with a window gave back
    ("share_held", "f8"),  # KV cache of a token in the mean request, relative to one that all layers keep
    ("block_size", "i8"),  # tokens of a block
    ("token_budget", "i8"),  # max_num_batched_tokens
    ("max_seqs", "i8"),  # max_num_seqs
    ("max_outstanding", "i8"),  # open requests at which further requests are refused
    ("served", "i8"),  # adapters that the server serves
    ("host_places", "i8"),  # adapters for which host memory has room
    ("tokenizer_places", "i8"),  # adapters whose tokenizers the front end keeps, 0: all
    ("warm", "i8"),  # 1: the front end has all tokenizers from the start
    ("track_host", "i8"),  # 0: all adapters are in host memory from the start
    ("spares_batch", "i8"),  # 1: adapters of the batch are never evicted
    ("stream", "i8"),  # 1: requests are sent at `stream_s`, in the order of the rows; 0: by the inbox
    ("concurrency", "i8"),  # maximum number of requests that the client keeps open, 0: no maximum
    ("sentinel", "i8"),  # first row of `links` that heads a ring of the server
    ("ring", "i8"),  # number of rows of `links` that head rings of the server
    ("cache_rule", "i8"),  # how engines other than vLLM evict adapters (`cluster.caching`)
    ("bin_s", "f8"),  # width of the timeline's bins
    ("run_s", "f8"),  # end of the run
    # Rules of the engine's version: see `packer.twin.engine_rules`.
    ("prefills_first", "i8"),
    ("series_of_lists", "i8"),
    ("whole_sequence", "i8"),
    ("skipped_reversed", "i8"),
    ("skipped_first", "i8"),
    ("slots_of_running", "i8"),
    ("depth", "i8"),  # steps that are scheduled at once: 1, or 2 with asynchronous scheduling
    ("by_priority", "i8"),  # 1: requests are counted one by one (`engine.each`), and wait by priority
    # Requests that have not reached the engine.
    ("inbox", "i8"),  # first request of the inbox
    ("inbox_last", "i8"),  # last request of the inbox
    ("pending", "i8"),  # first request at the front end
    ("pending_last", "i8"),  # last request at the front end
    ("taken", "i8"),  # requests accepted so far
    ("sent", "i8"),  # requests sent so far, including refused ones
    ("released", "i8"),  # leading rows of `stream_s` that respect `concurrency` already
    ("exhausted", "i8"),  # 1: more requests were accepted than there are rows
    # Waiting requests.
    ("front", "i8"),  # key of the request that was put in front last
    ("heap_sizes", "i8", (2,)),  # sizes of `heaps`
    ("passed_last", "i8"),  # with `skipped_first`: the last waiting request that a walk has passed over
    ("passed_key", "i8"),  # requests that walks have passed over so far
    # Adapters in slots and in host memory, and the walk over the adapters of the batch.
    ("residents", "i8"),  # adapters in slots
    ("on_host_count", "i8"),  # adapters in host memory
    ("joiners", "i8"),  # adapters that joined in this step
    ("entries", "i8"),  # length of the list by entry
    ("set_step", "i8", (2,)),  # the last step whose batch is in each of `sets`, + 1
    ("set_count", "i8", (2,)),  # adapters in each of `sets`
    ("walk_row", "i8"),  # row of `sets` that holds the current step
    ("oldest", "i8", (2,)),  # where the search for the least recently used adapter continues, by cache
    ("join_step", "i8"),  # last step in which adapters joined the batch, + 1
    ("leave_step", "i8"),  # last step after which adapters left the batch, + 1
    ("leave_before", "i8"),  # `leave_step` before adapters left last
    # The front end.
    ("free_s", "f8"),  # when the event loop is free
    ("seen_s", "f8"),  # when the last tokens were streamed
    ("scrape_s", "f8"),  # when the next scrape comes, infinite without any
    ("scraped_s", "f8"),  # time spent in scrapes
    ("series", "i8"),  # number of time series of /metrics
    ("names", "i8"),  # number of names in their labels
    ("sets", "i8"),  # hash of the sets of adapters that the next series would name
    ("named", "i8"),  # number of names that the next series would have
    ("counted", "i8"),  # hash of the sets that were counted last
    ("tokenizers", "i8"),  # adapters with a tokenizer, if `tokenizer_places` limits them
    # Totals.
    ("preemptions", "i8"),
    ("adapter_loads", "i8"),
    ("disk_loads", "i8"),
    ("unawaited", "i8"),  # loads that no request waited for
    ("aborted", "i8"),  # requests given up
    ("peak_blocks", "i8"),
    ("peak_running", "i8"),
    ("merged", "i8"),  # gaps between tokens that the client does not see because chunks were merged
    ("busy_s", "f8"),
    ("load_s", "f8"),
    ("stall_s", "f8"),  # time of loads × running requests
    ("turned", "i8"),  # 1: the next step is counted from (`emit.turn`), though this one may still be executed
    # The next step, if it is scheduled: fields of the step, and its duration in ms.
    ("planned", "i8"),  # 1: it is scheduled
    ("planned_ended", "i8"),
    ("planned_decodes", "i8"),
    ("planned_prefill", "i8"),
    ("planned_preempted", "i8"),
    ("planned_load_ms", "f8"),
    ("planned_ms", "f8"),
)
REQUEST = record(  # 96 bytes: a run keeps millions
    ("owner", "i4"),  # its adapter
    ("prompt", "i4"),  # prompt tokens
    ("output", "i4"),  # output tokens
    ("generated", "i4"),  # tokens that came out before its last preemption
    ("start", "i4"),  # step in which its last prefill ended; waiting: see `engine.waiting`, `by_priority.meld`
    ("context", "i4"),  # tokens of that prefill; with `by_priority`, its priority
    ("next", "i4"),  # next request of the list that it is in
    ("status", "i1"),  # ACCEPTED, FINISHED, GIVEN_UP or 0
    ("key", "i8"),  # place in the order of waiting requests; with `skipped_reversed`, see `engine.reversal`
    ("sent_s", "f8"),
    ("reached_s", "f8"),  # when the engine receives it
    ("first_s", "f8"),  # first token, NaN before
    ("first_seen_s", "f8"),  # first token as the client sees it
    ("finish_s", "f8"),  # last token, NaN before
    ("finish_seen_s", "f8"),  # last token as the client sees it
    ("last_s", "f8"),  # last token before a preemption
)
RINGS = record(
    ("batch", LINK),  # running requests in order of admission; see `engine.waiting` for others
    ("due", LINK),  # requests that finish in the same step
)
ADAPTER = record(  # 128 bytes: two cache lines
    # The batch.
    ("in_batch", "i4"),  # its running requests
    ("last_use", "i4"),  # step of the last use, + 2
    ("joined", "i4"),  # step in which it joined the batch, + 1
    ("walked", "i4", (2,)),  # its place in each row of `sets`
    ("resident", "i1"),  # whether it is in a slot
    ("on_host", "i1"),  # whether it is in host memory
    ("entered", "i1"),  # whether it is in the list by entry
    ("heap", "i1"),  # the heap that it is in, + 1
    # What it is.
    ("hash", "i8"),  # hash of its name
    ("rank", "i4"),
    ("rank_class", "i4"),  # row of `classes`
    # Ring of adapters outside the batch, by last use.
    ("idle", LINK),  # in slots
    # The queue.
    ("place", "i8"),  # its place in its heap
    ("first_key", "i8"),  # key of its first waiting request
    ("head", "i4"),  # its first waiting request
    ("tail", "i4"),  # its last waiting request; with `skipped_reversed`, the root of their tree
    # Seldom used.
    ("host", LINK),  # ring, by last use, of adapters in host memory but in no slot
    ("named", LINK),  # ring of adapters that the next series names, with `series_of_lists`; before
    # that, of adapters with tokenizers, by last use, if their number is limited
    ("words", "i8", (2,)),  # random words for the hash of the sets of running and of waiting adapters
    ("known_requests", "i4", (2,)),  # its running and its waiting requests as the front end counts them
    ("blocks", "i4"),  # KV blocks while it is in a slot, 0 unless memory is unified
    ("refused", "i4"),  # requests refused
    ("number", "i4"),  # its number in the fleet, in a cluster
    ("known", "i1"),  # whether the front end has its tokenizer
)
WHAT_IT_IS = ("rank", "blocks", "rank_class", "hash", "words", "number")  # Fields of an adapter that never change.
PLACED = record(
    ("key", "i8"),  # key of an adapter's first waiting request
    ("row", "i8"),  # row of the adapter
)
RANKS = record(
    ("members", "i8"),  # adapters of this rank in the batch
    ("rank", "i8"),
    ("unfinished", "i8"),  # offered requests with this rank that are not finished
)
MEMBER = record(
    ("joining", "i8"),  # adapters that joined in this step, in that order
    ("entry", "i8"),  # list by entry: adapters of the batch in order of entry, and some that have left
    ("spare", "i8"),  # room to grow a set
)
BIN = record(
    # Integrals over a bin of the timeline, except for the last three fields, which are counts.
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

    For n requests and m adapters: server: a record of `SERVER`. stream_s (arrivals,): empty unless `stream` is 1.
    requests (n,) of `REQUEST` and links (n + ring,) of `RINGS`: the servers of a cluster may share both, each with its
    own heads in `links`. adapters (m + 1,) of `ADAPTER`. classes (distinct ranks + 1,) of `RANKS`: ascending from row
    1. heaps (2, m) of `PLACED`: adapters with waiting requests, ordered by the first of these requests; one heap for
    adapters outside the batch, one for adapters in it. phase int64 (block_size,): number of decodes by the step, modulo
    block_size, in which they need a block. ends int8 (ring,): 0 if the ring `due` of this head is empty. histogram
    int64 (HISTOGRAM_BINS,): gaps between tokens. timeline (bins,) of `BIN`. vector float64 (terms,): what the terms of
    the step law multiply. means float64 (terms + 2,) or (0,): see `charge.add_means`. sets int64 (2, places): the
    adapters of the batch in the order of the walk, for two steps. members (places,) of `MEMBER`. places is 1 if no
    adapter is ever evicted. series int64 (2^k,): hash set of the time series of /metrics, (1,) if /metrics is not read.
    trees: `requests` if requests wait in trees (`skipped_reversed`), else None: Numba then compiles no code for trees.
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
    trees: Record | None


_classes = Memo[IntArray, tuple[IntArray, IntArray]](lambda ranks: np.unique(ranks, return_inverse=True), kept=64)
"""The distinct ranks, and the number of each adapter's, memoised because a server is simulated several times."""


def adapters_of(ranks: IntArray, blocks: IntArray, seed: int = 0) -> tuple[Record, Record]:
    """Return `adapters` and `classes` (see `ServerState`) of idle adapters with these ranks and KV blocks, (m,) each.
    `seed`: for the hashes of the adapters' names, which Python draws at random in each process."""
    m = len(ranks)
    distinct, number = _classes(ranks)
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
    """Mark rows of rank 0, which stand for the base model, as members of every batch. Their requests never wait for a
    slot. They change neither the counters of adapters that join or leave the batch, nor /metrics, nor first uses."""
    base = np.flatnonzero(adapters["rank"] == 0)
    for field in ("in_batch", "resident", "known", "known_requests"):
        adapters[field][base] = 1


def zeros(shape: tuple[int, ...], dtype: Any) -> Record:
    """Return zeros that begin at a cache line. Memory that is never touched is never allocated."""
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + LINE, dtype=np.uint8)
    first = -room.ctypes.data % LINE
    return room[first : first + size].view(dtype).reshape(shape)


def set_places(members: int) -> int:
    """Places of a Python set to which `members` were added: setobject.c makes it grow to four times its members."""
    places = 8
    while 5 * members >= 3 * (places - 1):
        grown = -(-3 * (places - 1) // 5)  # members at which it grows
        while places <= 4 * grown:
            places *= 2
    return places


def walk_places(slots: int) -> int:
    """Places of `sets` and `members` if adapters of the batch may be evicted: a set, or twice as many by entry."""
    return max(set_places(slots), 2 * slots + 1)


def new_links(n: int, ring: int, servers: int = 1) -> Record:
    """Return `links` for n requests and empty rings of `servers` servers, whose sentinels are n, n + ring, …"""
    links = np.empty(n + ring * servers, dtype=RINGS)
    clear_rings(links, n, len(links))
    return links


def clear_rings(links: Record, first: int, end: int) -> None:
    """Empty the rings whose heads are rows `first` to `end` - 1."""
    links[first:end].view(np.int32).reshape(-1, 4)[:] = np.arange(first, end)[:, None]


def ring_of(longest_output: int) -> int:
    """Number of ring heads of a server whose requests have at most `longest_output` output tokens."""
    return longest_output + 2


def new_state(
    n: int, adapters: Record, classes: Record, settings: dict[str, float], mean_state: bool = False,
    scraped_steps: int = 0,
) -> ServerState:  # fmt: skip
    """Return an idle server with memory for n requests.

    `settings`: fields of `SERVER`, including `block_size`, `ring`, `run_s` and `bin_s`. `mean_state`: sum up the state
    that tokens see. `scraped_steps`: engine steps for which time series are counted, 0 if /metrics is not read.
    """
    server = np.zeros(1, dtype=SERVER)[0]
    for field, value in {"depth": 1, **settings, "sentinel": n}.items():
        server[field] = value
    server.next_s = server.reach_s = server.scrape_s = np.inf
    table = 2 ** int(np.clip(np.ceil(np.log2(2.0 * scraped_steps)), 10, 24)) if scraped_steps else 1
    slots, m, terms = int(server.slots), int(np.count_nonzero(adapters["rank"])), len(LINEAR_TERMS)
    requests = zeros((n,), REQUEST)
    places = walk_places(slots) if m > slots or adapters["blocks"].any() else 1
    return ServerState(
        server=server, stream_s=np.zeros(0), requests=requests, links=new_links(n, int(server.ring)),
        adapters=adapters, classes=classes, heaps=np.zeros((2, len(adapters) - 1), dtype=PLACED),
        phase=np.zeros(server.block_size, dtype=np.int64), ends=np.zeros(server.ring, dtype=np.int8),
        histogram=np.zeros(HISTOGRAM_BINS, dtype=np.int64),
        timeline=np.zeros(int(np.nextafter(server.run_s, 0.0) / server.bin_s) + 1, dtype=BIN), vector=np.zeros(terms),
        means=np.zeros(terms + 2 if mean_state else 0), sets=np.zeros((2, places), dtype=np.int64),
        members=np.zeros(places, dtype=MEMBER), series=np.zeros(table, dtype=np.int64),
        trees=requests if server.skipped_reversed else None,
    )  # fmt: skip
