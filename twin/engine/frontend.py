"""vLLM's API server between the client and the engine: one event loop that accepts requests and streams tokens.

Rendering /metrics stops it: the gauge `vllm:lora_requests_info` has a time series for every pair of sets of running
and waiting adapters that ever occurred, named in its labels (vllm/v1/metrics/loggers.py), or for every list of those
with requests in flight in later versions (`packer.twin.engine_rules`). So does the first request of
an adapter in versions that load a tokenizer for each, and, for a short time, each token that is streamed. What is sent
meanwhile is accepted afterwards; tokens that come out meanwhile are streamed afterwards, those of one request in one
chunk unless the step has more than `CHUNK_OUTPUTS` outputs (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE,
vllm/v1/engine/async_llm.py): these are processed in slices, between which the loop turns to other work.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import (
    COUNTED, ENDED, FREE_S, GENERATED, INTERVAL_S, KNOWN, KNOWN_RUNNING, NAMED, NAMED_AFTER,
    NAMED_BEFORE, NAMES, NEXT, NOW, OWNER, PER_FIRST_USE_S, PER_NAME_S, PER_OUTPUT_S, PER_REQUEST_S, PER_SCRAPE_S,
    PER_SERIES_S, SCRAPED_S, SCRAPE_S, SEEN_S, SERIES, SERIES_OF_LISTS, SETS, WORD_RUNNING, numbers,
)  # fmt: skip
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED

CHUNK_OUTPUTS = 128
(RUNS, WAITS) = numbers(0, 2)
(LESS, _, MORE) = numbers(-1, 2)
HASH_FACTOR = 0x9E3779B97F4A7C1  # odd; products overflow as they may


@njit(**INLINED)
def scrape(ints: IntArray, floats: FloatArray, frontend: FloatArray, now: float) -> None:
    """Render /metrics as often as that is due up to `now`; the next scrape comes an interval after the end of one."""
    while floats[SCRAPE_S] <= now:
        took = (
            frontend[PER_SCRAPE_S]
            + frontend[PER_SERIES_S] * ints[SERIES]
            + frontend[PER_NAME_S] * ints[NAMES]
        )
        floats[FREE_S] = max(floats[SCRAPE_S], floats[FREE_S]) + took
        floats[SCRAPE_S] = floats[FREE_S] + frontend[INTERVAL_S]
        floats[SCRAPED_S] += took


@njit(inline="always", **ENGINE_FLAGS)
def accept(
    ints: IntArray, floats: FloatArray, adapters: IntArray, frontend: FloatArray, a: int, sent_s: float,
) -> float:  # fmt: skip
    """A request of adapter row `a` is sent; returns when the engine gets it."""
    scrape(ints, floats, frontend, sent_s)
    took = frontend[PER_REQUEST_S]
    if adapters[a, KNOWN] == 0:
        adapters[a, KNOWN] = 1
        took += frontend[PER_FIRST_USE_S]
    reached_s: float = max(sent_s, floats[FREE_S]) + took
    floats[FREE_S] = reached_s
    return reached_s


@njit(**CALLED)
def change(ints: IntArray, adapters: IntArray, sizes: IntArray, a: int, which: int, by: int) -> None:
    """A request more or less of adapter row `a` RUNS or WAITS, as the front end knows."""
    before = adapters[a, KNOWN_RUNNING + which]
    adapters[a, KNOWN_RUNNING + which] = before + by
    if before > 0 and before + by > 0:
        return
    if ints[SERIES_OF_LISTS] == 0:
        ints[SETS] ^= sizes[a, WORD_RUNNING + which]
        ints[NAMED] += by
    else:
        ints[SETS] = 0  # another list: `count_series` makes its hash
        ints[NAMED] += 2 * by
        if by > 0:
            link_last(adapters, NAMED_BEFORE, 0, a)
        else:
            unlink(adapters, NAMED_BEFORE, a)


@njit(**CALLED)
def hash_of_list(adapters: IntArray, sizes: IntArray) -> int:
    """A hash of the adapters that a series names, in order; not 0."""
    value = 0
    a = adapters[0, NAMED_AFTER]
    while a != 0:
        value = (value * HASH_FACTOR) ^ sizes[a, WORD_RUNNING]
        a = adapters[a, NAMED_AFTER]
    return value if value != 0 else 1


@njit(**INLINED)
def count_series(ints: IntArray, adapters: IntArray, sizes: IntArray, series: IntArray) -> None:
    """After a step: the labels become a time series if they have not occurred before."""
    if ints[NAMED] == 0:
        return
    if ints[SETS] == 0:
        ints[SETS] = hash_of_list(adapters, sizes)
    labels = ints[SETS]
    if labels == ints[COUNTED]:
        return
    ints[COUNTED] = labels
    mask = series.size - 1
    if ints[SERIES] > mask - mask // 4:
        return  # no room: the table is as large as memory allows
    i = labels & mask
    while series[i] != 0:
        if series[i] == labels:
            return
        i = (i + 1) & mask
    series[i] = labels
    ints[SERIES] += 1
    ints[NAMES] += ints[NAMED]


@njit(**INLINED)
def stream(floats: FloatArray, frontend: FloatArray, outputs: int) -> float:
    """The client gets the outputs of a step that ends NOW, at SEEN_S; returns the time since it got the last ones.

    Outputs that are still waiting when those of the next step come go into one chunk with them (-1 is returned), unless
    a step has several slices.
    """
    work_s = outputs * frontend[PER_OUTPUT_S]
    if outputs <= CHUNK_OUTPUTS and floats[NOW] + work_s <= floats[SEEN_S]:
        return -1.0
    floats[FREE_S] = max(floats[NOW], floats[FREE_S]) + work_s
    gap_s: float = floats[FREE_S] - floats[SEEN_S]
    floats[SEEN_S] = floats[FREE_S]
    return gap_s


@njit(**INLINED)
def begin(
    ints: IntArray, requests: IntArray, adapters: IntArray, sizes: IntArray, series: IntArray, outputs: int,
) -> bool:  # fmt: skip
    """Requests whose first token comes out run, and wait no longer; whether the step's series is counted already.

    The labels are taken after each slice of `CHUNK_OUTPUTS` outputs and united (`update_iteration_stats` writes into
    the same dicts; `AsyncLLM.output_handler`). In a step of several slices they so name who waited before it and who
    ends with it, except in the first slice, where new requests never are; of those that end there this is neglected.
    """
    follow(ints, requests, adapters, sizes, RUNS, MORE)
    if outputs > CHUNK_OUTPUTS:
        count_series(ints, adapters, sizes, series)
    follow(ints, requests, adapters, sizes, WAITS, LESS)
    return outputs > CHUNK_OUTPUTS


@njit(inline="always", **ENGINE_FLAGS)
def follow(
    ints: IntArray, requests: IntArray, adapters: IntArray, sizes: IntArray, which: int, by: int
) -> None:
    """`change` for each request whose first token comes out."""
    r = ints[ENDED]
    while r > 0:
        if requests[r - 1, GENERATED] == 0:
            change(ints, adapters, sizes, requests[r - 1, OWNER] + 1, which, by)
        r = requests[r - 1, NEXT]
