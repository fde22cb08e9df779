"""vLLM's API server between the client and the engine: one event loop that accepts requests and streams tokens.

Rendering /metrics blocks the loop: the gauge `vllm:lora_requests_info` has a time series for every pair of sets of
running and waiting adapters that ever occurred, named in its labels (vllm/v1/metrics/loggers.py). In later versions it
has one for every list of adapters with requests in flight (`packer.twin.engine_rules`). A request of an adapter without
a tokenizer blocks the loop, too, in versions that load one per adapter, and so does, briefly, each streamed token.
Requests sent meanwhile are accepted afterwards. Tokens that come out meanwhile are streamed afterwards, those of one
request in one chunk: `process_outputs_socket` (vllm/v1/engine/core_client.py) takes all messages that wait without a
turn of the loop, and so does `output_handler`, before `generate` gets one. A step with more than `CHUNK_OUTPUTS`
outputs (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE, vllm/v1/engine/async_llm.py) is processed in slices, and the loop does other
work between slices.

The loop stops for a whole scrape of /metrics/, which is mounted in it (`mount_metrics`, entrypoints/openai/
api_server.py). A scrape of /metrics is rendered in a thread: the loop goes on with the interpreter lock, which it gets
after at most 5 ms each time, and outputs leave later but mostly apart. The twin takes all scrapes as of the first kind.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray, Record
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.state import RUNS, numbers
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED

CHUNK_OUTPUTS = 128
(LESS, _, MORE) = numbers(-1, 2)
HASH_FACTOR = 0x9E3779B97F4A7C1  # odd; products may overflow


@njit(**INLINED)
def scrape(server: Record, frontend: Record, now: float) -> None:
    """Render /metrics for each scrape due up to `now`; the next one comes `interval_s` after the end of the last."""
    while server.scrape_s <= now:
        took = frontend.per_scrape_s + frontend.per_series_s * server.series + frontend.per_name_s * server.names
        server.free_s = max(server.scrape_s, server.free_s) + took
        server.scrape_s = server.free_s + frontend.interval_s
        server.scraped_s += took


@njit(**CALLED)
def touch_tokenizer(server: Record, adapters: Record, a: int) -> None:
    """Make adapter row `a` the last used one of the ring of adapters with tokenizers, which replaces the oldest
    (vllm/transformers_utils/tokenizer_group.py of 0.8.5, `lora_tokenizers`)."""
    if adapters[a].known == 1:
        unlink(adapters["named"], a)
    elif server.tokenizers < server.tokenizer_places:
        server.tokenizers += 1
    else:
        e = adapters[0].named.after
        unlink(adapters["named"], e)
        adapters[e].known = 0
    link_last(adapters["named"], 0, a)


@njit(inline="always", **ENGINE_FLAGS)
def accept(server: Record, adapters: Record, a: int, frontend: Record, sent_s: float) -> float:
    """Accept a request of adapter row `a`, sent at `sent_s`; return the time at which it reaches the engine."""
    scrape(server, frontend, sent_s)
    took = frontend.per_request_s
    if server.tokenizer_places > 0 and adapters[a].rank > 0:
        touch_tokenizer(server, adapters, a)
    if adapters[a].known == 0:
        adapters[a].known = 1
        if server.warm == 0:
            took += frontend.per_first_use_s
    reached_s: float = max(sent_s, server.free_s) + took
    server.free_s = reached_s
    return reached_s


@njit(**CALLED)
def change(server: Record, adapters: Record, a: int, which: int, by: int) -> None:
    """Add `by` to adapter row `a`'s requests that, as the front end knows, run or wait (`which`: RUNS or WAITS)."""
    adapter = adapters[a]
    before = adapter.known_requests[which]
    adapter.known_requests[which] = before + by
    if before > 0 and before + by > 0:
        return
    if server.series_of_lists == 0:
        # The hash of a set does not depend on the order in which its adapters came.
        server.sets ^= adapter.words[which]
        server.named += by
    else:
        server.sets = 0  # the list changes: `count_series` computes its hash
        # Both labels name every adapter with requests in flight (docs/vllm-findings.md).
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
    """After a step: count the labels as a new time series if they have not occurred before."""
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
    """Stream the outputs of a step that ends at `now_s`; set `seen_s`; return the time since the previous outputs, s.

    If the previous outputs are still waiting, the outputs go into one chunk with them and -1 is returned, unless the
    step has several slices.
    """
    work_s = outputs * frontend.per_output_s
    if outputs <= CHUNK_OUTPUTS and server.now_s + work_s <= server.seen_s:
        return -1.0
    server.free_s = max(server.now_s, server.free_s) + work_s
    gap_s: float = server.free_s - server.seen_s
    server.seen_s = server.free_s
    return gap_s
