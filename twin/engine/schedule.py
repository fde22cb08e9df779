"""The first half of vLLM's `Scheduler.schedule` (vllm/v1/core/sched/scheduler.py): the running requests.

Each decode gets one token, the request whose prefill was cut its next chunk. Where KV blocks lack, the request
admitted last is preempted: `self.running.pop()`, to the front of the queue.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.engine.containers import unlink
from packer.twin.engine.slots import leave, make_room
from packer.twin.engine.state import (
    ATTENDED, BLOCK_SIZE, CONTEXT, CONTEXT_TOKENS, DECODES, DUE_BEFORE, ENDED, ENDED_LAST, GENERATED,
    KV_BLOCKS, LAST, NEXT, NONE, NOW, OLDER, OWNER, PARTIAL, PARTIAL_DONE, PHASE, PREEMPTIONS, RUNNING,
    SENTINEL, SKIPPED_FIRST, START, STEP, STEP_DECODES, STEP_PREEMPTED, STEP_PREFILL, TOKEN_BUDGET, USED,
)  # fmt: skip
from packer.twin.engine.waiting import place, put_behind_skipped, put_first
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


@njit(**INLINED)
def blocks_of(tokens: int, block_size: int) -> int:
    """KV blocks that hold so many tokens."""
    return (tokens + block_size - 1) // block_size


@njit(**INLINED)
def phase_of(requests: IntArray, r: int, block_size: int) -> int:
    """Step, modulo `block_size`, in which decode `r` needs a further block: when its context fills one."""
    phase: int = (requests[r, START] + 1 - requests[r, CONTEXT]) % block_size
    return phase


@njit(**INLINED)
def end_prefill(ints: IntArray, requests: IntArray, r: int) -> None:
    """The prefill of request `r` ends with this step, as those noted before it."""
    requests[r, NEXT] = 0
    if ints[ENDED] == 0:
        ints[ENDED] = r + 1
    else:
        requests[ints[ENDED_LAST] - 1, NEXT] = r + 1
    ints[ENDED_LAST] = r + 1


@njit(**CALLED)
def preempt(
    ints: IntArray, floats: FloatArray, requests: IntArray, times: FloatArray, links: IntArray,
    adapters: IntArray, sizes: IntArray, classes: IntArray, heaps: IntArray, phase: IntArray,
    sets: IntArray,
) -> None:  # fmt: skip
    """Preempt the request admitted last: it loses its blocks and starts over, with its tokens as prompt."""
    block_size = ints[BLOCK_SIZE]
    r = links[ints[SENTINEL], OLDER]  # `self.running.pop()`
    a = requests[r, OWNER] + 1
    unlink(links, OLDER, r)
    if r + 1 == ints[PARTIAL]:
        ints[USED] -= blocks_of(ints[PARTIAL_DONE], block_size)
        ints[PARTIAL] = 0
    else:
        held = requests[r, CONTEXT] + ints[STEP] - 1 - requests[r, START]
        ints[USED] -= blocks_of(held, block_size)
        ints[CONTEXT_TOKENS] -= held
        phase[phase_of(requests, r, block_size)] -= 1
        requests[r, GENERATED] += ints[STEP] - requests[r, START]
        times[r, LAST] = floats[NOW]
        ints[DECODES] -= 1
        unlink(links, DUE_BEFORE, r)
    ints[RUNNING] -= 1
    ints[STEP_PREEMPTED] += 1
    ints[PREEMPTIONS] += 1
    if ints[SKIPPED_FIRST] == 1:
        put_behind_skipped(ints, requests, adapters, heaps, r, a)
    else:
        put_first(ints, requests, adapters, r, a)  # `self.waiting.appendleft`
    leave(ints, adapters, sizes, classes, sets, a, ints[STEP] - 1)
    place(ints, adapters, heaps, a)


@njit(inline="always", **ENGINE_FLAGS)
def chunk_of(ints: IntArray, requests: IntArray) -> tuple[int, int]:
    """Tokens of the cut prefill that this step takes, and the blocks that they need."""
    done, block_size = ints[PARTIAL_DONE], ints[BLOCK_SIZE]
    chunk = min(requests[ints[PARTIAL] - 1, CONTEXT] - done, ints[TOKEN_BUDGET] - ints[DECODES])
    return chunk, blocks_of(done + chunk, block_size) - blocks_of(done, block_size)


@njit(**INLINED)
def schedule_running(
    ints: IntArray, floats: FloatArray, requests: IntArray, times: FloatArray, links: IntArray,
    adapters: IntArray, sizes: IntArray, classes: IntArray, heaps: IntArray, phase: IntArray,
    sets: IntArray,
) -> None:  # fmt: skip
    """Give the running requests their tokens; sets what the step computes (STEP_DECODES, STEP_PREFILL)."""
    ints[STEP_PREEMPTED] = 0
    ints[ENDED] = 0
    chunk, growth = 0, 0
    if ints[PARTIAL] > 0:
        chunk, growth = chunk_of(ints, requests)
    # The decodes need as many new blocks as there are contexts that fill their last one in this phase.
    while ints[USED] + growth + phase[ints[PHASE]] > ints[KV_BLOCKS]:
        make_room(ints, adapters, sizes, growth + phase[ints[PHASE]], NONE)
        if ints[USED] + growth + phase[ints[PHASE]] > ints[KV_BLOCKS]:
            cut = ints[PARTIAL]
            preempt(ints, floats, requests, times, links, adapters, sizes, classes, heaps, phase, sets)
            if cut != ints[PARTIAL]:
                chunk, growth = 0, 0
    ints[USED] += growth + phase[ints[PHASE]]
    ints[CONTEXT_TOKENS] += ints[DECODES]
    ints[STEP_DECODES] = ints[DECODES]
    ints[STEP_PREFILL] = chunk
    ints[ATTENDED] = chunk * (2 * ints[PARTIAL_DONE] + chunk) // 2
    if ints[PARTIAL] > 0:
        r = ints[PARTIAL] - 1
        ints[PARTIAL_DONE] += chunk
        if ints[PARTIAL_DONE] == requests[r, CONTEXT]:
            end_prefill(ints, requests, r)
            ints[PARTIAL] = 0
