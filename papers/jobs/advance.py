"""An engine that runs whole jobs, c at a time: for image generation, and to compare with queueing theory.

There is no batching. A job waits for its adapter's load, then takes the time that the step law gives for a step with
its prompt tokens and one decode for each of its outputs (iterations), times a noise factor. Jobs start in order of
arrival. The first token of a job is its last. Compiled only if used.
"""

from __future__ import annotations

import math

from numba import njit

from packer.papers.accept import accept, leave_queue
from packer.papers.cache.kernel import enter_batch, leave_batch, make_room, tidy
from packer.papers.state import CellState
from packer.twin.engine.charge import MIN_STEP_S
from packer.twin.engine.state import FINISHED
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law
from packer.twin.law.linear import linear_ms, state_vector


@njit(**ENGINE_FLAGS)
def spend(state: CellState, until_s: float) -> None:
    """Advance the time to `until_s` and integrate the state over the bins of the timeline."""
    server = state.server
    until_s = min(until_s, server.run_s)
    busy = server.running / server.max_seqs
    now = server.now_s
    server.busy_s += max(until_s - now, 0.0) * busy
    while now < until_s:
        k = min(int(now / server.bin_s), state.timeline.shape[0] - 1)
        end_s = min(until_s, (k + 1) * server.bin_s) if k + 1 < state.timeline.shape[0] else until_s
        dt = end_s - now
        row = state.timeline[k]
        row.busy += dt * busy
        row.running += dt * server.running
        row.waiting += dt * server.waiting
        row.kv_blocks += dt * server.used
        row.adapters += dt * server.active
        if end_s <= now:
            break
        now = end_s
    server.now_s = max(server.now_s, until_s)


@njit(**ENGINE_FLAGS)
def start(state: CellState, law: Law, r: int) -> bool:
    """Start job `r`, the first of the queue: load its adapter, then run it. Return False if its adapter has no room."""
    server, requests, own, adapters = state.server, state.requests, state.own, state.adapters
    a = requests[r].owner + 1
    if adapters[a].resident == 0 and not make_room(state, adapters[a].blocks, 1, a):
        return False
    leave_queue(state, r)
    load_s, rank = enter_batch(state, law.loading, a) * 1e-3, adapters[a].rank
    server.decodes += 1
    state_vector(
        state.vector, requests[r].output, requests[r].prompt, 1.0, rank, server.slots, server.slot_rank, 0.0, 0.0,
        law.settings, rank, rank, 0.0, 0.5 * requests[r].prompt * requests[r].prompt,
    )  # fmt: skip
    service_s = linear_ms(law.coefficients, state.vector) * 1e-3 * requests[r].last_s
    end_s = server.now_s + load_s + max(service_s, MIN_STEP_S)
    server.load_s += load_s
    server.stall_s += load_s
    requests[r].finish_s = end_s
    server.peak_running = max(server.peak_running, server.running)
    server.peak_blocks = max(server.peak_blocks, server.used)
    order = state.order  # running jobs, last to finish first
    i = own.batch
    while i > 0 and requests[order[i - 1]].finish_s < end_s:
        order[i] = order[i - 1]
        i -= 1
    order[i] = r
    own.batch += 1
    return True


@njit(**ENGINE_FLAGS)
def finish(state: CellState) -> None:
    """Finish the running job that ends first, at the current time."""
    server, requests, own = state.server, state.requests, state.own
    own.batch -= 1
    r = state.order[own.batch]
    requests[r].first_s = requests[r].first_seen_s = requests[r].finish_seen_s = requests[r].finish_s
    requests[r].status = FINISHED
    server.step += 1
    server.decodes -= 1
    k = min(int(server.now_s / server.bin_s), state.timeline.shape[0] - 1)
    state.timeline[k].decode += requests[r].output
    if leave_batch(state, requests[r].owner + 1):
        tidy(state, 0)


@njit(**ENGINE_FLAGS)
def wake_s(state: CellState) -> float:
    """When the next job ends or arrives."""
    next_s: float = state.server.next_s
    if state.own.batch > 0:
        next_s = min(next_s, state.requests[state.order[state.own.batch - 1]].finish_s)
    return next_s


@njit(**ENGINE_FLAGS)
def advance(state: CellState, law: Law, until_s: float) -> None:
    """As `engine.advance.advance`: finish jobs that end by `until_s`; accept and start those that arrive before it."""
    server, own = state.server, state.own
    last = until_s >= server.run_s
    while True:
        end_s = math.inf
        if own.batch > 0:
            end_s = state.requests[state.order[own.batch - 1]].finish_s
        next_s = server.next_s
        if end_s <= next_s:
            if end_s > until_s:
                break
            spend(state, end_s)
            finish(state)
        else:
            # A cluster may still offer jobs of `until_s`, except at the end of the run.
            if next_s > until_s or (next_s == until_s and not last):
                break
            spend(state, next_s)
            accept(state)
        while server.waiting > 0 and server.running < server.max_seqs and server.now_s < server.run_s:
            if not start(state, law, state.links[server.sentinel].due.after):
                break
    if last:
        spend(state, until_s)
        for i in range(own.batch):  # not finished by the end
            state.requests[state.order[i]].finish_s = math.nan
