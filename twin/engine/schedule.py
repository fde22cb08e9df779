"""The first half of vLLM's `Scheduler.schedule` (vllm/v1/core/sched/scheduler.py): the running requests.

Each decode gets one token; the request whose prefill was cut gets its next chunk. If KV blocks are too few, the request
admitted last is preempted (`self.running.pop()`) and goes to the front of the queue.

`pool`: None if blocks are only counted and steps are scheduled one by one. `ahead`: whether the step is scheduled while
the previous one is executed, so that the tokens of that one are not there yet.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import Record
from packer.twin.engine.containers import unlink
from packer.twin.engine.holding import hash_full, leave_phase, stand_up
from packer.twin.engine.pool import Pool, free_blocks, take_blocks
from packer.twin.engine.slots import leave, make_room
from packer.twin.engine.state import NONE, ServerState
from packer.twin.engine.waiting import place, put_first
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


@njit(**INLINED)
def blocks_of(tokens: int, block_size: int) -> int:
    """Number of KV blocks that hold `tokens` tokens."""
    return (tokens + block_size - 1) // block_size


@njit(inline="always", **ENGINE_FLAGS)
def to_admit(server: Record, tokens: int, cached: int) -> int:
    """KV blocks that a request of `tokens` tokens needs to be admitted, including those that hold its `cached` tokens.

    Layers with a window keep all tokens of the steps in flight (`SlidingWindowSpec.max_admission_blocks_per_request`).
    """
    new = min(tokens - cached, server.depth * server.token_budget)
    held = int((tokens - server.windowed * max(tokens - server.window - new, 0)) / server.share_held)
    blocks: int = min(blocks_of(max(tokens, held), server.block_size), server.kv_blocks)
    return blocks


@njit(inline="always", **ENGINE_FLAGS)
def phase_of(state: ServerState, r: int) -> int:
    """Step, modulo `block_size`, in which decode `r` needs a further block: when its context fills one."""
    phase: int = (state.requests[r].start + 1 - state.requests[r].context) % state.server.block_size
    return phase


@njit(inline="always", **ENGINE_FLAGS)
def context_of(state: ServerState, r: int) -> int:
    """Tokens of decode `r` that were computed, or scheduled, before the step that is being scheduled."""
    tokens: int = state.requests[r].context + state.server.step - 1 - state.requests[r].start
    return tokens


@njit(**INLINED)
def end_prefill(server: Record, requests: Record, r: int) -> None:
    """Append request `r` to the requests whose prefill ends with this step."""
    requests[r].next = 0
    if server.ended == 0:
        server.ended = r + 1
    else:
        requests[server.ended_last - 1].next = r + 1
    server.ended_last = r + 1


@njit(**CALLED)
def preempt(state: ServerState, pool: Pool | None, ahead: bool) -> None:
    """Preempt the request admitted last: it loses its blocks and starts over, with its tokens as prompt.

    A request whose last token the step in flight computes only waits for the end of that step.
    """
    server, requests, links, size = state.server, state.requests, state.links, state.server.block_size
    r = links[server.sentinel].batch.before  # `self.running.pop()`
    request = requests[r]
    a = request.owner + 1
    unlink(links["batch"], r)
    server.running -= 1
    server.step_preempted += 1
    server.preemptions += 1
    done = False
    if r + 1 == server.partial:
        held = server.partial_done
        full = held // size
        server.partial = 0
    else:
        held = context_of(state, r)
        # Blocks of a prefill are hashed with it; a decode's token in flight does not fill a block yet.
        full = max(request.context // size, (held - ahead) // size)
        if request.start != server.step - 1:  # else `emit` sets it when the token comes out
            request.last_s = server.end_s if server.in_flight == 1 else server.now_s
        # With a step in flight this counts its token, too: the request still gets it.
        request.generated += server.step - request.start
        done = request.generated == request.output
        # `turn` has already taken a request whose last token is in flight out of these counts.
        if not done:
            server.context_tokens -= held
            server.decodes -= 1
            unlink(links["due"], r)
            state.phase[phase_of(state, r)] -= 1
            if pool is not None and pool.seat[r] > 0:
                leave_phase(pool, pool.seat[r])
    if pool is not None and pool.all[0].caching == 1:
        stand_up(state, pool, r, blocks_of(held, size), full, not done)
    else:
        server.used -= blocks_of(held, size)
    if done:
        # It stands in no queue: until `finish`, only the count includes it.
        server.waiting += 1
        return
    put_first(server, requests, state.adapters, links["batch"], state.trees, r, a)  # `self.waiting.appendleft`
    leave(state, a, server.step - 1)
    place(server, state.adapters, state.heaps, a)


@njit(inline="always", **ENGINE_FLAGS)
def chunk_of(server: Record, requests: Record) -> tuple[int, int]:
    """Tokens of the cut prefill that this step computes, and the blocks that they need; 0, 0 without a cut prefill."""
    if server.partial == 0:
        return 0, 0
    done, size = server.partial_done, server.block_size
    # It stands last in `self.running`: it gets what the decodes leave of the budget.
    chunk = min(requests[server.partial - 1].context - done, server.token_budget - server.decodes)
    return chunk, blocks_of(done + chunk, size) - blocks_of(done, size)


@njit(**INLINED)
def grow_counted(state: ServerState, pool: Pool | None, ahead: bool) -> int:
    """Take blocks, which are only counted, for the running requests; return the tokens that the cut prefill gets."""
    server, phase = state.server, state.phase
    while True:
        chunk, growth = chunk_of(server, state.requests)
        # Each decode whose context has filled its last block in this phase needs one new block.
        needed = growth + phase[server.phase]
        if server.used + needed > server.kv_blocks:
            make_room(server, state.adapters, needed, NONE)
        if server.used + needed <= server.kv_blocks:
            server.used += needed
            return int(chunk)
        preempt(state, pool, ahead)


@njit(**INLINED)
def hash_phase(state: ServerState, pool: Pool, phase: int, new: int) -> None:
    """Hash the blocks that decodes of this phase fill, counting `new` tokens of the step that is being scheduled."""
    s = pool.seats[phase].after
    while s != phase:
        r = pool.seats[s].request
        hash_full(state, pool, r, (context_of(state, r) + new) // state.server.block_size)
        s = pool.seats[s].after


@njit(**INLINED)
def grow_hashed(state: ServerState, pool: Pool, ahead: bool) -> int:
    """As `grow_counted`, with prefix caching: taken blocks lose their hash. The order is that of `self.running`.

    Requests take blocks one by one. When no block is free, the last request is preempted. A block that a decode fills
    is hashed when the step that fills it is scheduled. With a token in flight (`ahead`), it is hashed one step later,
    because `request.num_tokens` does not count that token yet (`allocate_slots`).
    """
    server, phase, taken = state.server, state.server.phase, 0
    while taken < state.phase[phase]:
        count = min(free_blocks(state), state.phase[phase] - taken)
        if count == 0:
            preempt(state, pool, ahead)
        take_blocks(state, pool, count)
        taken += count
    if ahead:
        hash_phase(state, pool, phase, 0)
    else:
        # Decodes that need a block in the next step fill their last one in this step.
        hash_phase(state, pool, phase + 1 if phase + 1 < server.block_size else 0, 1)
    chunk, growth = chunk_of(server, state.requests)
    if growth > free_blocks(state):
        preempt(state, pool, ahead)  # the request of the cut prefill itself
        return 0
    if chunk > 0:
        take_blocks(state, pool, growth)
        hash_full(state, pool, server.partial - 1, (server.partial_done + chunk) // server.block_size)
    return int(chunk)


@njit(**INLINED)
def schedule_running(state: ServerState, pool: Pool | None, ahead: bool) -> None:
    """Give the running requests their tokens; sets what the step computes (`step_decodes`, `step_prefill`)."""
    server = state.server
    server.step_preempted = server.ended = 0
    if pool is not None and pool.all[0].caching == 1:
        chunk = grow_hashed(state, pool, ahead)
    else:
        chunk = grow_counted(state, pool, ahead)
    server.context_tokens += server.decodes
    server.step_decodes, server.step_prefill = server.decodes, chunk
    # A token attends to all tokens before the chunk and, on average, to half of the chunk.
    server.attended = chunk * (2 * server.partial_done + chunk) // 2
    if server.partial > 0:
        r = server.partial - 1
        server.partial_done += chunk
        if server.partial_done == state.requests[r].context:
            end_prefill(server, state.requests, r)
            server.partial = 0
