"""The first half of vLLM's `Scheduler.schedule` (vllm/v1/core/sched/scheduler.py): the running requests.

Each decode gets one token; the request whose prefill was cut gets its next chunk. If KV blocks are too few, the request
admitted last is preempted (`self.running.pop()`) and goes to the front of the queue.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import Record
from packer.twin.engine.containers import unlink
from packer.twin.engine.slots import leave, make_room
from packer.twin.engine.state import NONE, ServerState
from packer.twin.engine.waiting import place, put_behind_skipped, put_first
from packer.twin.flags import CALLED, ENGINE_FLAGS, INLINED


@njit(**INLINED)
def blocks_of(tokens: int, block_size: int) -> int:
    """Number of KV blocks that hold `tokens` tokens."""
    return (tokens + block_size - 1) // block_size


@njit(**INLINED)
def phase_of(requests: Record, r: int, block_size: int) -> int:
    """Step, modulo `block_size`, in which decode `r` needs a further block: when its context fills one."""
    phase: int = (requests[r].start + 1 - requests[r].context) % block_size
    return phase


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
def preempt(state: ServerState) -> None:
    """Preempt the request admitted last: it loses its blocks and starts over, with its tokens as prompt."""
    server, requests, links = state.server, state.requests, state.links
    size = server.block_size
    r = links[server.sentinel].batch.before  # `self.running.pop()`
    request = requests[r]
    a = request.owner + 1
    unlink(links["batch"], r)
    if r + 1 == server.partial:
        server.used -= blocks_of(server.partial_done, size)
        server.partial = 0
    else:
        held = request.context + server.step - 1 - request.start
        server.used -= blocks_of(held, size)
        server.context_tokens -= held
        state.phase[phase_of(requests, r, size)] -= 1
        request.generated += server.step - request.start
        request.last_s = server.now_s
        server.decodes -= 1
        unlink(links["due"], r)
    server.running -= 1
    server.step_preempted += 1
    server.preemptions += 1
    if server.skipped_first == 1:
        put_behind_skipped(server, requests, state.adapters, state.heaps, r, a)
    else:
        put_first(server, requests, state.adapters, r, a)  # `self.waiting.appendleft`
    leave(state, a, server.step - 1)
    place(server, state.adapters, state.heaps, a)


@njit(inline="always", **ENGINE_FLAGS)
def chunk_of(server: Record, requests: Record) -> tuple[int, int]:
    """Tokens of the cut prefill that this step computes, and the blocks that they need; 0, 0 without a cut prefill."""
    if server.partial == 0:
        return 0, 0
    done, size = server.partial_done, server.block_size
    chunk = min(requests[server.partial - 1].context - done, server.token_budget - server.decodes)
    return chunk, blocks_of(done + chunk, size) - blocks_of(done, size)


@njit(**INLINED)
def compute(server: Record, requests: Record, chunk: int) -> None:
    """Set the step to compute one token of each decode and `chunk` tokens of the cut prefill."""
    server.context_tokens += server.decodes
    server.step_decodes, server.step_prefill = server.decodes, chunk
    server.attended = chunk * (2 * server.partial_done + chunk) // 2
    if server.partial > 0:
        r = server.partial - 1
        server.partial_done += chunk
        if server.partial_done == requests[r].context:
            end_prefill(server, requests, r)
            server.partial = 0


@njit(**INLINED)
def schedule_running(state: ServerState) -> None:
    """Give the running requests their tokens; sets what the step computes (`step_decodes`, `step_prefill`)."""
    server, phase = state.server, state.phase
    server.step_preempted = server.ended = 0
    chunk, growth = chunk_of(server, state.requests)
    # Each decode whose context has filled its last block in this phase needs one new block.
    while server.used + growth + phase[server.phase] > server.kv_blocks:
        make_room(server, state.adapters, growth + phase[server.phase], NONE)
        if server.used + growth + phase[server.phase] > server.kv_blocks:
            cut = server.partial
            preempt(state)
            if cut != server.partial:
                chunk, growth = 0, 0
    server.used += growth + phase[server.phase]
    compute(server, state.requests, chunk)
