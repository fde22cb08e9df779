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

from packer.arrays import IntArray, Record
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import RUNS, WAITS, ServerState, numbers
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED

CHUNK_OUTPUTS = 128
(LESS, _, MORE) = numbers(-1, 2)
HASH_FACTOR = 0x9E3779B97F4A7C1  # odd; products overflow as they may


@njit(**INLINED)
def scrape(server: Record, frontend: Record, now: float) -> None:
    """Render /metrics as often as that is due up to `now`; the next scrape comes an interval after the end of one."""
    while server.scrape_s <= now:
        took = (
            frontend.per_scrape_s + frontend.per_series_s * server.series + frontend.per_name_s * server.names
        )
        server.free_s = max(server.scrape_s, server.free_s) + took
        server.scrape_s = server.free_s + frontend.interval_s
        server.scraped_s += took


@njit(inline="always", **ENGINE_FLAGS)
def accept(server: Record, adapter: Record, frontend: Record, sent_s: float) -> float:
    """A request of an adapter is sent; returns when the engine gets it."""
    scrape(server, frontend, sent_s)
    took = frontend.per_request_s
    if adapter.known == 0:
        adapter.known = 1
        took += frontend.per_first_use_s
    reached_s: float = max(sent_s, server.free_s) + took
    server.free_s = reached_s
    return reached_s


@njit(**CALLED)
def change(server: Record, adapters: Record, a: int, which: int, by: int) -> None:
    """A request more or less of adapter row `a` RUNS or WAITS, as the front end knows."""
    adapter = adapters[a]
    before = adapter.known_requests[which]
    adapter.known_requests[which] = before + by
    if before > 0 and before + by > 0:
        return
    if server.series_of_lists == 0:
        server.sets ^= adapter.words[which]
        server.named += by
    else:
        server.sets = 0  # another list: `count_series` makes its hash
        server.named += 2 * by
        if by > 0:
            link_last(adapters["named"], 0, a)
        else:
            unlink(adapters["named"], a)


@njit(**CALLED)
def hash_of_list(adapters: Record) -> int:
    """A hash of the adapters that a series names, in order; not 0."""
    value = 0
    a = adapters[0].named.after
    while a != 0:
        value = (value * HASH_FACTOR) ^ adapters[a].words[RUNS]
        a = adapters[a].named.after
    return value if value != 0 else 1


@njit(**INLINED)
def count_series(server: Record, adapters: Record, series: IntArray) -> None:
    """After a step: the labels become a time series if they have not occurred before."""
    if server.named == 0:
        return
    if server.sets == 0:
        server.sets = hash_of_list(adapters)
    labels = server.sets
    if labels == server.counted:
        return
    server.counted = labels
    mask = series.size - 1
    if server.series > mask - mask // 4:
        return  # no room: the table is as large as memory allows
    i = labels & mask
    while series[i] != 0:
        if series[i] == labels:
            return
        i = (i + 1) & mask
    series[i] = labels
    server.series += 1
    server.names += server.named


@njit(**INLINED)
def stream(server: Record, frontend: Record, outputs: int) -> float:
    """The client gets the outputs of a step that ends NOW, at SEEN_S; returns the time since it got the last ones.

    Outputs that are still waiting when those of the next step come go into one chunk with them (-1 is returned), unless
    a step has several slices.
    """
    work_s = outputs * frontend.per_output_s
    if outputs <= CHUNK_OUTPUTS and server.now_s + work_s <= server.seen_s:
        return -1.0
    server.free_s = max(server.now_s, server.free_s) + work_s
    gap_s: float = server.free_s - server.seen_s
    server.seen_s = server.free_s
    return gap_s


@njit(**INLINED)
def begin(state: ServerState, outputs: int) -> bool:
    """Requests whose first token comes out run, and wait no longer; whether the step's series is counted already.

    The labels are taken after each slice of `CHUNK_OUTPUTS` outputs and united (`update_iteration_stats` writes into
    the same dicts; `AsyncLLM.output_handler`). In a step of several slices they so name who waited before it and who
    ends with it, except in the first slice, where new requests never are; of those that end there this is neglected.
    """
    server, requests = state.server, state.requests
    follow(server, requests, state.adapters, RUNS, MORE)
    if outputs > CHUNK_OUTPUTS:
        count_series(server, state.adapters, state.series)
    follow(server, requests, state.adapters, WAITS, LESS)
    return outputs > CHUNK_OUTPUTS


@njit(inline="always", **ENGINE_FLAGS)
def follow(server: Record, requests: Record, adapters: Record, which: int, by: int) -> None:
    """`change` for each request whose first token comes out."""
    r = server.ended
    while r > 0:
        if requests[r - 1].generated == 0:
            change(server, adapters, requests[r - 1].owner + 1, which, by)
        r = requests[r - 1].next
