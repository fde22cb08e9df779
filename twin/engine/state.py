"""The memory of one simulated server: names of registers and columns, and the arrays that hold them.

Everything is an array of one type, so that a cluster can keep many servers in arrays with a further axis and
pass views of them. Zeros are an empty server (but for the rings of `links`): memory that no request reaches is
never touched. Links to requests are stored as number + 1, and adapter `a` has row a + 1, so that 0 is "none".
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from packer.arrays import ByteArray, FloatArray, IntArray


HISTOGRAM_BINS = 2400
HISTOGRAM_FLOOR_MS = 0.01
HISTOGRAM_PER_E = 140.0  # bins per factor e: a resolution of 0.7 %


def numbers(first: int, end: int) -> list[int]:
    """NumPy's integers: Numba compiles a function anew for each of Python's that it is called with."""
    return cast("list[int]", list(np.arange(first, end)))


(NONE, NO_LIMIT) = (numbers(0, 1)[0], numbers(2**60, 2**60 + 1)[0])

# ---- registers of whole numbers, `ints`
# Settings. SERVED: adapters of the whole server; HOST_PLACES: adapters that host memory holds; TRACK_HOST 0:
# all adapters are in host memory from the start. STREAM 1: requests are sent at `stream_s` and take the rows
# in order as they are accepted; 0: the inbox holds rows. SENTINEL: first of the RING rows of `links` that head
# the server's rings.
(SLOTS, SLOT_RANK, KV_BLOCKS, BLOCK_SIZE, TOKEN_BUDGET, MAX_SEQS, MAX_OUTSTANDING, SERVED, HOST_PLACES,
 TRACK_HOST, STREAM, SENTINEL, RING) = numbers(0, 13)  # fmt: skip
# Requests on their way: the inbox (offered, not yet arrived) and what became of those that arrived. EXHAUSTED
# 1: more requests were accepted than there are rows.
(INBOX, INBOX_LAST, TAKEN, SENT, EXHAUSTED) = numbers(13, 18)
# Numbers of requests, side by side for routers: in the inbox, at the front end, waiting, running.
(INBOX_COUNT, PENDING_COUNT, WAITING, RUNNING) = numbers(18, 22)
# Waiting requests: prompt tokens of all that are not in the batch, on their way or waiting; key of the next one put
# in front, sizes of the two heaps.
(WAITING_PROMPT, FRONT, HEAP_IDLE, HEAP_ACTIVE) = numbers(22, 26)
# The batch: requests that decode, KV blocks in use (those of adapters included), context tokens of the decodes,
# distinct adapters, sum of their ranks, sum of the ranks of the requests, class of the largest rank; the request
# whose prefill is cut by the token budget and how many of its tokens are done.
(DECODES, USED, CONTEXT_TOKENS, ACTIVE, ACTIVE_RANKS, REQUEST_RANKS, LARGEST, PARTIAL,
 PARTIAL_DONE) = numbers(26, 35)  # fmt: skip
# Adapters in slots and in host memory.
(RESIDENTS, ON_HOST_COUNT) = numbers(35, 37)
# The step: its number, that number modulo BLOCK_SIZE and RING, whether it is being executed, what it computes,
# how many requests it preempted, and the first and the last request whose prefill it ends.
(STEP, PHASE, BUCKET, IN_FLIGHT, STEP_DECODES, STEP_PREFILL, STEP_PREEMPTED, ENDED, ENDED_LAST) = numbers(
    37, 46
)
# Totals.
(PREEMPTIONS, ADAPTER_LOADS, DISK_LOADS, PEAK_BLOCKS, PEAK_RUNNING) = numbers(46, 51)
# Slots: whether adapters of the batch are never evicted; adapters that joined in this step.
(SPARES_BATCH, JOINERS) = numbers(51, 53)
# The front end: requests that it has accepted and the engine has not got yet; time series of /metrics and
# names in their labels; of the sets of adapters that the next series would name: hash, size, hash of the last
# one counted; gaps between tokens, and those that the client does not see because their chunks were merged.
(PENDING, PENDING_LAST, SERIES, NAMES, SETS, NAMED, COUNTED, GAPS, MERGED) = numbers(53, 62)
# The walk: the last step whose batch is in each of two rows of `sets`, + 1; how far the search for the least recently
# used adapter has come in the order of the last step, for slots and for host memory.
(SET_STEP, SET_STEP_OTHER, OLDEST_IN_SLOT, OLDEST_ON_HOST) = numbers(62, 66)
# Rules of the engine's version, 0 or 1: see `packer.twin.engine_rules`.
(PREFILLS_FIRST, SERIES_OF_LISTS, WHOLE_SEQUENCE) = numbers(66, 69)
(SKIPPED_REVERSED, SKIPPED_FIRST) = numbers(96, 98)
# With SLOTS_OF_RUNNING: adapters outside the batch with a request whose last token the step in flight computes.
(SLOTS_OF_RUNNING, LINGERING) = numbers(99, 101)
# With SKIPPED_FIRST: waiting requests with smaller keys were passed over in a walk.
(PASSED_KEY,) = numbers(98, 99)
# Engines other than vLLM's (`engine.lightllm`, `engine.jobs`). Settings: how adapters leave the GPU and are loaded,
# most distinct adapters in the batch, decode steps between two looks at the queue, adapters in the batch from
# which those of the batch come first, cells above which idle adapters leave. Then: decode steps since the last
# prefill, and in all; whether a prefill is in flight; length of the sorted batch; requests given up; cells of
# the adapters in the batch, and of those that are being loaded for waiting requests; number of the last
# prefetch; loads that no request waited for; whether nothing can be done before the next event; requests left
# behind by the last look at the queue.
(CACHE_RULE, LOADING_MODE, SLOT_LIMIT, MAX_WAIT, CLUSTER, HIGH_WATER, SINCE, DECODE_STEPS, PREFILLING, BATCH,
 ABORTED, ACTIVE_BLOCKS, LOADING_BLOCKS, TAG, UNAWAITED, BLOCKED, LEFT) = numbers(69, 86)  # fmt: skip
# The walk: places of each of the two sets, - 1; row of the set of the current step; the last step that adapters joined,
# + 1; the last step after which adapters left the batch, and the one before, + 1; length of the list by entry.
(SET_MASK, SET_MASK_OTHER, WALK_ROW, JOIN_STEP, LEAVE_STEP, LEAVE_BEFORE, ENTRIES) = numbers(86, 93)
# A client that holds requests back: most that it keeps open (NONE: it never holds back), and how many of the stream's
# times take into account when a place gets free (`arrive.free_places`).
(CONCURRENCY, RELEASED) = numbers(93, 95)
# Sum over the prefill tokens of the step of the tokens that each attends to.
(ATTENDED,) = numbers(95, 96)
N_INTS = 104  # whole cache lines for each server of a cluster

# ---- registers of real numbers, `floats`: time of the engine, of the end of the step being executed, of the
# next arrival (infinite if none is known); duration of the step, s, and of its loads, ms; totals; width of the
# timeline's bins; end of the run.
(NOW, END_S, NEXT_S, DT, LOAD_MS, BUSY_S, LOAD_S, BIN_S, RUN_S, STALL_S) = numbers(0, 10)
# The front end: when the first pending request reaches the engine (infinite if none does), when the next
# scrape comes, when the work at hand is done, when the last tokens were streamed; time spent in scrapes.
(REACH_S, SCRAPE_S, FREE_S, SEEN_S, SCRAPED_S) = numbers(10, 15)
# Other engines: when the adapter that is being loaded is there (infinite without one); wait after which a
# request is given up; prefill beside a load, relative to one without; smoothed arrivals and admissions.
(LOAD_END_S, ABORT_AFTER_S, CPU_FACTOR, ARRIVALS, ADMISSIONS) = numbers(15, 20)
N_FLOATS = 20

# ---- what the front end takes, s (`Law.frontend`): pause between scrapes, a scrape, per time series, per name
# in its labels, a request, an adapter's first request, an output of a step.
(INTERVAL_S, PER_SCRAPE_S, PER_SERIES_S, PER_NAME_S, PER_REQUEST_S, PER_FIRST_USE_S, PER_OUTPUT_S) = numbers(
    0, 7
)

# ---- columns of `requests`: adapter, lengths, tokens that came out, step in which the last prefill ended,
# tokens of that prefill, place in the order of waiting requests, the next one in whatever list it is in.
(OWNER, PROMPT, OUTPUT, GENERATED, START, CONTEXT, KEY, NEXT) = numbers(0, 8)
# ---- columns of `times`, s: first token, finish (NaN until they happen), last token before a preemption, sent,
# got by the engine, first and last token as the client sees them.
(FIRST, FINISH, LAST, SENT_AT, REACHED, FIRST_SEEN, FINISH_SEEN) = numbers(0, 7)
# ---- `status` of a request; GIVEN_UP while it waited; anything else: not arrived, or refused.
(ACCEPTED, FINISHED, GIVEN_UP) = numbers(1, 4)
# ---- columns of `links`: running requests by admission; requests that finish in the same step.
(OLDER, NEWER, DUE_BEFORE, DUE_AFTER) = numbers(0, 4)
# ---- columns of `adapters`, what is used together in one cache line. The batch: running requests; whether in a slot,
# in host memory; step of the last use + 2, step in which it joined the batch + 1; place in each of the two sets of the
# walk; hash of the name.
(IN_BATCH, RESIDENT, ON_HOST, LAST_USE, JOINED, WALKED, WALKED_OTHER, HASHED) = numbers(0, 8)
# The queue: key of its first waiting request, the heap that it is in (0: none) and its place there; its FIFO of waiting
# requests; requests refused; whether it was ever used; whether it is in the list by entry.
(FIRST_KEY, HEAP, PLACE, HEAD, TAIL, REFUSED, KNOWN, ENTERED) = numbers(8, 16)
# Rings by last use of the adapters outside the batch that are in slots, and in host memory alone; its requests that run
# and that wait as the front end counts them; ring of those that the next series names, where that is a list.
(IDLE_BEFORE, IDLE_AFTER, HOST_BEFORE, HOST_AFTER, KNOWN_RUNNING, KNOWN_WAITING, NAMED_BEFORE,
 NAMED_AFTER) = numbers(16, 24)  # fmt: skip
N_ADAPTER_COLUMNS = 24
# ---- columns of `sizes`: rank, KV blocks while in a slot (0 unless memory is unified), class of the rank,
# hash of the name; random words for the hash of the sets of running and of waiting adapters.
(RANK, BLOCKS, RANK_CLASS, HASH, WORD_RUNNING, WORD_WAITING) = numbers(0, 6)
N_SIZE_COLUMNS = 6
# ---- rows of `sets`: two sets of adapters of the batch in the order of the walk, at their places in a Python set; room
# to grow such a set; those that joined in this step, in that order; those in the batch by their entry into it, and some
# that have left it.
(SPARE, JOINING, ENTRY) = numbers(2, 5)
N_SETS = 5
# ---- columns of `classes` (distinct ranks, ascending, from row 1): adapters in the batch, the rank, requests
# of the inbox that are not finished.
(MEMBERS, CLASS_RANK, UNFINISHED) = numbers(0, 3)
N_CLASS_COLUMNS = 3
# ---- columns of `timeline`: integrals over each bin, except the last three, which are counts.
(T_BUSY, T_RUNNING, T_WAITING, T_KV, T_ADAPTERS, T_PREFILL, T_DECODE, T_PREEMPTED) = numbers(0, 8)


class ServerState(NamedTuple):
    """One server between two steps, or during one.

    For n requests and m adapters: ints (N_INTS,), floats (N_FLOATS,); stream_s (arrivals,), empty unless
    STREAM; requests int64 (n, 8), times float64 (n, 7), status int8 (n,), links int64 (n + RING, 4): may be
    shared by the servers of a cluster, which then each have their own RING rows of `links`; adapters int64
    (m + 1, 24), sizes int64 (m + 1, 6), classes int64 (distinct ranks + 1, 3); heaps int64 (2, m): adapters
    with waiting requests by the first of these, those outside the batch and those in it; phase int64
    (BLOCK_SIZE,): decodes by the step, modulo BLOCK_SIZE, in which they need a block; histogram int64
    (HISTOGRAM_BINS,) of gaps between tokens; timeline float64 (bins, 8); vector float64 (terms,): what the
    terms of the step law multiply; means float64 (terms + 2,) or (0,): see `charge.add_means`; sets int64
    (5, places), or (5, 1) where no adapter is ever evicted; series int64 (2^k,): hash set of the time series of
    /metrics, (1,) where they are not read.
    """

    ints: IntArray
    floats: FloatArray
    stream_s: FloatArray
    requests: IntArray
    times: FloatArray
    status: ByteArray
    links: IntArray
    adapters: IntArray
    sizes: IntArray
    classes: IntArray
    heaps: IntArray
    phase: IntArray
    histogram: IntArray
    timeline: FloatArray
    vector: FloatArray
    means: FloatArray
    sets: IntArray
    series: IntArray


def sizes_of(ranks: IntArray, blocks: IntArray, seed: int = 0) -> tuple[IntArray, IntArray]:
    """`sizes` and empty `classes` (see `ServerState`) of adapters with these ranks and KV blocks, (m,) each.

    `seed`: of the hashes of the adapters' names, which Python draws anew for each process.
    """
    m = len(ranks)
    distinct, number = np.unique(ranks, return_inverse=True)
    rng = np.random.default_rng((seed, 0x77616C6B))
    sizes = np.zeros((m + 1, N_SIZE_COLUMNS), dtype=np.int64)
    sizes[1:, :RANK_CLASS] = np.column_stack([ranks, blocks])
    sizes[1:, RANK_CLASS] = number.ravel() + 1
    sizes[1:, HASH] = rng.integers(0, 2**61 - 1, size=m)
    sizes[1:, WORD_RUNNING:] = rng.integers(1, 2**62, size=(m, 2))
    classes = np.zeros((len(distinct) + 1, N_CLASS_COLUMNS), dtype=np.int64)
    classes[1:, CLASS_RANK] = distinct
    return sizes, classes


def serve_base(adapters: IntArray, sizes: IntArray) -> None:
    """Rows of rank 0, requests to the base model, count as members of every batch: they never wait for a slot.

    So they never change what is counted when an adapter joins or leaves; nor do they /metrics and first uses.
    """
    for column in (IN_BATCH, RESIDENT, KNOWN, KNOWN_RUNNING, KNOWN_WAITING):
        adapters[1:, column][sizes[1:, RANK] == 0] = 1


def set_places(members: int) -> int:
    """Places of a Python set that so many members were added to: setobject.c grows it to four times its members."""
    places = 8
    while 5 * members >= 3 * (places - 1):
        grown = -(-3 * (places - 1) // 5)  # members at which it grows
        while places <= 4 * grown:
            places *= 2
    return places


def walk_places(slots: int) -> int:
    """Columns of `sets` where adapters of the batch may be evicted: a set of them, or twice as many by entry."""
    return max(set_places(slots), 2 * slots + 1)


def new_links(n: int, ring: int, servers: int = 1) -> IntArray:
    """`links` for n requests and empty rings of `servers` servers, whose SENTINELs are n, n + ring, …"""
    links = np.empty((n + ring * servers, 4), dtype=np.int64)
    links[n:] = np.arange(n, len(links))[:, None]
    return links


def new_state(
    n: int, sizes: IntArray, classes: IntArray, settings: dict[int, int], *, longest_output: int,
    run_s: float, bin_s: float, terms: int, mean_state: bool = False,
    scraped_steps: int = 0,
) -> ServerState:  # fmt: skip
    """An idle server with memory for n requests.

    `settings`: values of the registers SLOTS … TRACK_HOST. `terms` of the linear step law; `mean_state`: sum up the
    state that tokens see. `scraped_steps`: engine steps for which time series are counted, 0 where /metrics is not
    read.
    """
    ring = longest_output + 2
    ints = np.zeros(N_INTS, dtype=np.int64)
    for register, value in {**settings, SENTINEL: n, RING: ring}.items():
        ints[register] = value
    floats = np.zeros(N_FLOATS)
    floats[NEXT_S], floats[BIN_S], floats[RUN_S] = np.inf, bin_s, run_s
    floats[REACH_S] = floats[SCRAPE_S] = floats[LOAD_END_S] = np.inf
    table = 2 ** int(np.clip(np.ceil(np.log2(2.0 * scraped_steps)), 10, 24)) if scraped_steps else 1
    bins = int(np.nextafter(run_s, 0.0) / bin_s) + 1
    slots, m = settings.get(SLOTS, 0), int(np.count_nonzero(sizes[:, RANK]))
    places = walk_places(slots) if m > slots or sizes[:, BLOCKS].any() else 1
    adapters = np.zeros((len(sizes), N_ADAPTER_COLUMNS), dtype=np.int64)
    serve_base(adapters, sizes)
    return ServerState(
        ints=ints,
        floats=floats,
        stream_s=np.zeros(0),
        requests=np.empty((n, 8), dtype=np.int64),
        times=np.empty((n, 7)),
        status=np.zeros(n, dtype=np.int8),
        links=new_links(n, ring),
        adapters=adapters,
        sizes=sizes,
        classes=classes,
        heaps=np.zeros((2, len(sizes) - 1), dtype=np.int64),
        phase=np.zeros(settings[BLOCK_SIZE], dtype=np.int64),
        histogram=np.zeros(HISTOGRAM_BINS, dtype=np.int64),
        timeline=np.zeros((bins, 8)),
        vector=np.zeros(terms),
        means=np.zeros(terms + 2 if mean_state else 0),
        sets=np.zeros((N_SETS, places), dtype=np.int64),
        series=np.zeros(table, dtype=np.int64),
    )


def register(state: ServerState, *, in_slots: bool) -> None:
    """Every adapter is loaded once before the first request, in order: host memory keeps the last HOST_PLACES of them.

    So does vLLM with those of `--lora-modules` (vllm/entrypoints/openai/serving_models.py, `init_static_loras`).
    `in_slots`: the last SLOTS of them stay in slots.
    """
    ints, adapters = state.ints, state.adapters
    loaded = (np.flatnonzero(state.sizes[1:, RANK]) + 1).tolist()
    kept = loaded[-int(ints[HOST_PLACES]) :]
    resident = kept[-int(ints[SLOTS]) :] if in_slots else []
    adapters[kept, ON_HOST] = 1
    adapters[resident, RESIDENT] = 1
    ints[ON_HOST_COUNT], ints[RESIDENTS] = len(kept), len(resident)
    for ring, rows in ((HOST_BEFORE, kept[: len(kept) - len(resident)]), (IDLE_BEFORE, resident)):
        around = [0, *rows, 0]
        adapters[around[1:], ring] = around[:-1]
        adapters[around[:-1], ring + 1] = around[1:]
