"""The end of a step: tokens come out, prefills turn into decodes, finished requests leave.

Mirrors vLLM's `Scheduler.update_from_output`. A running decode is never touched one by one: it sits in the
bucket of the step in which it will finish, and in a counter of the phase in which it takes its next KV block.
"""

from __future__ import annotations

import math

from numba import njit

from packer.arrays import ByteArray, FloatArray, IntArray
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.frontend import LESS, MORE, RUNS, begin, change, count_series, stream
from packer.twin.engine.schedule import blocks_of, phase_of
from packer.twin.engine.slots import leave
from packer.twin.engine.state import (
    BLOCK_SIZE, BUCKET, CONTEXT, CONTEXT_TOKENS, DECODES, DUE_AFTER, DUE_BEFORE, ENDED, FINISH,
    FINISHED, FINISH_SEEN, FIRST, FIRST_SEEN, GAPS, GENERATED, HEAD, HISTOGRAM_BINS,
    HISTOGRAM_FLOOR_MS, HISTOGRAM_PER_E, IN_BATCH, LAST, MERGED, NEXT, NOW, OLDER, OUTPUT, OWNER, RANK_CLASS, RING,
    RUNNING, SEEN_S, SENTINEL, SERIES_OF_LISTS, START, STEP, STEP_DECODES, UNFINISHED, USED,
)  # fmt: skip
from packer.twin.engine.waiting import place
from packer.twin.flags import ENGINE_FLAGS, INLINED


MIN_GAP_S = 5e-5  # between chunks that leave the front end in one burst


@njit(**INLINED)
def gap_bin(gap_s: float) -> int:
    """Bin of the histogram that a gap between tokens falls into."""
    k = int(math.log(gap_s * (1e3 / HISTOGRAM_FLOOR_MS)) * HISTOGRAM_PER_E)
    return 0 if k < 0 else (HISTOGRAM_BINS - 1 if k >= HISTOGRAM_BINS else k)


@njit(inline="always", **ENGINE_FLAGS)
def start_decode(
    ints: IntArray, floats: FloatArray, requests: IntArray, times: FloatArray, links: IntArray,
    adapters: IntArray, sizes: IntArray, phase: IntArray, histogram: IntArray, series: IntArray, r: int,
) -> None:  # fmt: skip
    """The prefill of request `r` ended with this step, its first token (or next, if preempted) comes out."""
    now = floats[NOW]
    if requests[r, GENERATED] == 0:
        times[r, FIRST] = now
        times[r, FIRST_SEEN] = floats[SEEN_S]
        if series.size > 1 and ints[SERIES_OF_LISTS] == 1:
            change(ints, adapters, sizes, requests[r, OWNER] + 1, RUNS, MORE)
    else:
        histogram[gap_bin(now - times[r, LAST])] += 1
    requests[r, START] = ints[STEP]
    ints[DECODES] += 1
    ints[CONTEXT_TOKENS] += requests[r, CONTEXT]
    phase[phase_of(requests, r, ints[BLOCK_SIZE])] += 1
    due = ints[BUCKET] + requests[r, OUTPUT] - requests[r, GENERATED] - 1
    if due >= ints[RING]:
        due -= ints[RING]
    link_last(links, DUE_BEFORE, ints[SENTINEL] + due, r)


@njit(**INLINED)
def complete(
    ints: IntArray, floats: FloatArray, requests: IntArray, times: FloatArray, status: ByteArray,
    links: IntArray, adapters: IntArray, sizes: IntArray, classes: IntArray, heaps: IntArray,
    phase: IntArray, sets: IntArray, series: IntArray, r: int,
) -> None:  # fmt: skip
    """Request `r` got its last token: its blocks are free, its adapter may leave the batch."""
    block_size = ints[BLOCK_SIZE]
    unlink(links, DUE_BEFORE, r)
    unlink(links, OLDER, r)
    a = requests[r, OWNER] + 1
    times[r, FINISH] = floats[NOW]
    times[r, FINISH_SEEN] = floats[SEEN_S]
    status[r] = FINISHED
    size = requests[r, CONTEXT] + ints[STEP] - requests[r, START]
    ints[USED] -= blocks_of(size, block_size)
    ints[CONTEXT_TOKENS] -= size
    phase[phase_of(requests, r, block_size)] -= 1
    ints[DECODES] -= 1
    ints[RUNNING] -= 1
    classes[sizes[a, RANK_CLASS], UNFINISHED] -= 1
    leave(ints, adapters, sizes, classes, sets, a, ints[STEP])
    if series.size > 1:
        change(ints, adapters, sizes, a, RUNS, LESS)
    if adapters[a, IN_BATCH] == 0 and adapters[a, HEAD] > 0:
        place(ints, adapters, heaps, a)


@njit(**INLINED)
def emit(
    ints: IntArray, floats: FloatArray, requests: IntArray, times: FloatArray, status: ByteArray,
    links: IntArray, adapters: IntArray, sizes: IntArray, classes: IntArray, heaps: IntArray,
    phase: IntArray, histogram: IntArray, sets: IntArray, series: IntArray, frontend: FloatArray,
) -> None:  # fmt: skip
    """Tokens come out at NOW, the end of the step, and are streamed as soon as the front end is free."""
    decodes = outputs = ints[STEP_DECODES]
    r = ints[ENDED]
    while r > 0:
        outputs += 1
        r = requests[r - 1, NEXT]
    gap_s = stream(floats, frontend, outputs)
    counted = False
    if series.size > 1 and ints[SERIES_OF_LISTS] == 0:
        counted = begin(ints, requests, adapters, sizes, series, outputs)
    bucket = ints[SENTINEL] + ints[BUCKET]
    # `for request in self.running`: they were admitted before those that have their first token now
    while links[bucket, DUE_AFTER] != bucket:
        complete(
            ints, floats, requests, times, status, links, adapters, sizes, classes, heaps, phase, sets, series,
            links[bucket, DUE_AFTER],
        )  # fmt: skip
    while ints[ENDED] > 0:  # in the order of `self.running`, too; an output of one token ends at once
        r = ints[ENDED] - 1
        ints[ENDED] = requests[r, NEXT]
        start_decode(
            ints, floats, requests, times, links, adapters, sizes, phase, histogram, series, r,
        )  # fmt: skip
        if links[bucket, DUE_AFTER] == r:
            complete(
                ints, floats, requests, times, status, links, adapters, sizes, classes, heaps, phase, sets, series, r,
            )  # fmt: skip
    if decodes > 0:
        ints[GAPS] += decodes
        if gap_s < 0.0:
            ints[MERGED] += decodes
        else:
            histogram[gap_bin(max(gap_s, MIN_GAP_S))] += decodes
    if series.size > 1 and not counted:
        count_series(ints, adapters, sizes, series)
