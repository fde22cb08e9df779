"""The step loop of dLoRA's engine: batches of one merged adapter, whose LoRA costs nothing, or of several adapters.

Written from the artifact of Wu et al., dLoRA (OSDI 2024): github.com/LLMServe/dLoRA-artifact, vllm/core/scheduler.py.
Every step chooses its requests among all unfinished ones. The other requests keep their KV cache, or swap it out to the
host if a request needs room. Here the last request to arrive is swapped out first; the artifact takes the last one in
its list of ready requests. If a step could run no request, it takes the first one by arrival.
"""

from __future__ import annotations

import math

from numba import njit

from packer.papers.accept import accept, event_s
from packer.papers.cache.kernel import load_ms
from packer.papers.dlora.credit import adjust_shares, choose, first_in_queue, pay, pick_by_credit
from packer.papers.state import CellState, Own, state_of
from packer.twin.cluster.state import Servers
from packer.twin.engine.advance import go_on
from packer.twin.engine.charge import charge
from packer.twin.engine.containers import link_last, unlink
from packer.twin.engine.emit import gap_bin
from packer.twin.engine.schedule import blocks_of
from packer.twin.engine.state import ACCEPTED, FINISHED
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law
from packer.twin.law.linear import linear_ms, state_vector

WAITS, READY, SWAPPED = range(3)
"""`start` of a request: without KV cache, with KV cache on the GPU, or in host memory. `context`: its KV blocks."""
SKIPPED, TAKEN, FULL = range(3)
BY_CREDIT, UNMERGED, MERGED = range(3)
"""`policy`: `_credit_schedule`, `_strict_fcfs_schedule` and `_always_merge_schedule`."""
WATERMARK = 0.01  # Share of the KV blocks that stays free when a request starts or is swapped in (`BlockSpaceManager`).


@njit(**ENGINE_FLAGS)
def arrive(state: CellState, now: float) -> None:
    """Add requests sent by `now` to the queue in row order. Requests from another server keep their row and tokens."""
    server, requests = state.server, state.requests
    while server.next_s <= now:
        request = requests[server.inbox - 1]
        moved, generated, first_s = request.status == ACCEPTED, request.generated, request.first_s
        r = accept(state)
        if moved:
            request.generated, request.first_s, request.first_seen_s = generated, first_s, first_s
        request.start = WAITS
        request.context = request.next = request.key = 0
        # A request from another server has an older row: it goes to its place by arrival.
        before = state.links[r].due.before
        if before != server.sentinel and before > r:
            unlink(state.links["due"], r)
            while before != server.sentinel and before > r:
                before = state.links[before].due.before
            link_last(state.links["due"], state.links[before].due.after, r)


@njit(**ENGINE_FLAGS)
def swap_out(state: CellState, r: int) -> None:
    """Swap the KV cache of request `r` out to the host."""
    server, request = state.server, state.requests[r]
    server.used -= request.context
    server.running -= 1
    server.waiting += 1
    server.preemptions += 1
    server.step_preempted += 1
    state.own.extra_ms += request.context * state.own.swap_ms
    request.start = SWAPPED
    state.own.swapped_out = 1


@njit(**ENGINE_FLAGS)
def last_outside(state: CellState, spare: int) -> int:
    """The last request by arrival with KV cache on the GPU that is not in the batch, and not `spare`; -1: none."""
    server, queue = state.server, state.links["due"]
    r = queue[server.sentinel].before
    while r != server.sentinel:
        if state.requests[r].start == READY and state.requests[r].next != server.step + 1 and r != spare:
            return int(r)
        r = queue[r].before
    return -1


@njit(**ENGINE_FLAGS)
def take(state: CellState, r: int, must: bool) -> int:
    """Add request `r` to the batch if there is room. `must`: the batch is empty, so swap out others to make room."""
    server, own, request = state.server, state.own, state.requests[r]
    if own.batch >= server.max_seqs:
        return FULL
    tokens = request.prompt + request.generated
    grown = blocks_of(tokens, server.block_size)
    # A request with KV cache may need one block more for its next token.
    needed = 1 if request.start == READY else grown if request.start == WAITS else request.context + 1
    spare = 0 if must or request.start == READY else int(WATERMARK * server.kv_blocks)
    if must or request.start == READY:
        while server.kv_blocks - server.used < needed:
            victim = last_outside(state, r)
            if victim < 0:
                break
            swap_out(state, victim)
    if not must:
        if server.kv_blocks - server.used - needed < spare:
            if request.start == READY:
                swap_out(state, r)
            return SKIPPED
        # The artifact asserts that no step swaps both in and out (`SchedulerOutputs`).
        if request.start == SWAPPED and own.swapped_out == 1:
            return SKIPPED
        batched = server.step_prefill + server.step_decodes
        if request.start == WAITS and batched > 0 and batched + tokens > server.token_budget:
            return SKIPPED
    if request.start == WAITS:
        server.step_prefill += tokens
        server.attended += tokens * tokens // 2
        server.waiting_prompt -= request.prompt if request.generated == 0 else 0
    else:
        server.step_decodes += 1
        server.context_tokens += tokens
    if request.start == SWAPPED:
        own.extra_ms += request.context * own.swap_ms
        server.used += request.context
    if request.start != READY:
        server.running += 1
        server.waiting -= 1
    server.used += grown - request.context
    request.start, request.context, request.next = READY, grown, server.step + 1
    state.order[own.batch] = r
    own.batch += 1
    return TAKEN


@njit(**ENGINE_FLAGS)
def bring(state: CellState, law: Law, a: int) -> None:
    """Load adapter row `a`, which this step uses, unless it is on the GPU. The least wanted unused adapter leaves."""
    server, adapters, cached = state.server, state.adapters, state.cached
    cached[a].counted = server.step + 1
    if adapters[a].resident == 1:
        return
    if server.residents >= server.slots:
        least = 0
        for e in range(1, cached.size):
            free = adapters[e].resident == 1 and cached[e].counted != server.step + 1
            if free and (least == 0 or cached[e].wanted < cached[least].wanted):
                least = e
        adapters[least].resident = 0
        server.residents -= 1
    adapters[a].resident = 1
    server.residents += 1
    server.adapter_loads += 1
    server.load_ms += load_ms(adapters[a], law.loading)


@njit(**ENGINE_FLAGS)
def fill_merged(state: CellState, a: int) -> None:
    """Fill the batch by arrival with requests of adapter row `a`. If it was just merged, try at most `max_seqs`."""
    server, queue = state.server, state.links["due"]
    left = server.max_seqs if state.own.rounds == 1 else state.cached[a].wanted
    r = queue[server.sentinel].after
    while r != server.sentinel and left > 0:
        after = queue[r].after
        if state.requests[r].owner + 1 == a:
            left -= 1
            if take(state, r, False) == FULL:
                return
        r = after


@njit(**ENGINE_FLAGS)
def fill_by_arrival(state: CellState) -> None:
    """Fill the batch by arrival, up to the first request of more adapters than slots."""
    server, queue, cached = state.server, state.links["due"], state.cached
    adapters, r = 0, queue[server.sentinel].after
    while r != server.sentinel:
        after, a = queue[r].after, state.requests[r].owner + 1
        if cached[a].tagged != server.step + 1:
            if adapters >= server.slots:
                return
            cached[a].tagged = server.step + 1
            adapters += 1
        if take(state, r, False) == FULL:
            return
        r = after


@njit(**ENGINE_FLAGS)
def fill_mixed(state: CellState, base: int, count: int) -> None:
    """Fill the batch with the `count` requests from place `base` in `order`, of at most as many adapters as slots."""
    server, cached = state.server, state.cached
    adapters = 0
    for k in range(base, base + count):
        r = state.order[k]
        a = state.requests[r].owner + 1
        if cached[a].tagged != server.step + 1:
            if adapters >= server.slots:
                continue
            cached[a].tagged = server.step + 1
            adapters += 1
        if take(state, r, False) == FULL:
            return


@njit(**ENGINE_FLAGS)
def fill_up(state: CellState, first: int, picked: int) -> int:
    """Append requests by arrival to the picked ones, up to `max_seqs`, and pay for them. Return their number."""
    server, order = state.server, state.order
    for k in range(picked):
        # Mark the picked requests; `take` marks those of the batch with the step's number, + 1.
        state.requests[order[2 * server.max_seqs + k]].next = -server.step - 1
    count = picked
    for i in range(first):
        r = order[server.max_seqs + i]
        if count < server.max_seqs and state.requests[r].next != -server.step - 1:
            order[2 * server.max_seqs + count] = r
            count += 1
    pay(state, first, count, 1.0 / server.max_seqs, 0)
    return count


@njit(**ENGINE_FLAGS)
def plan(state: CellState) -> int:
    """Choose the requests of the next step. Return the adapter row that is merged in it, 0: none."""
    server, own = state.server, state.own
    own.batch = own.swapped_out = 0
    server.step_prefill = server.step_decodes = server.step_preempted = server.attended = 0
    server.context_tokens = 0
    server.load_ms = own.extra_ms = 0.0
    first = first_in_queue(state)
    picked = pick_by_credit(state) if own.policy == BY_CREDIT else 0
    merge, base = 0, server.max_seqs
    if own.policy == MERGED:
        merge, own.rounds = state.requests[state.order[base]].owner + 1, 0
    elif picked == 0 and own.policy == BY_CREDIT:
        merge = choose(state, first)
    elif picked > 0:
        first, base = fill_up(state, first, picked), 2 * server.max_seqs
    if merge == 0:
        if own.merged > 0:
            adjust_shares(state)
            own.rounds = 1
        else:
            own.rounds += 1
        if own.policy == UNMERGED:
            fill_by_arrival(state)
        else:
            fill_mixed(state, base, first)
    else:
        fill_merged(state, merge)
    if own.batch == 0:
        take(state, state.order[server.max_seqs], True)
        merge = 0
    if merge != own.merged:
        own.extra_ms += own.switch_ms
    own.merged = merge
    return int(merge)


@njit(**ENGINE_FLAGS)
def begin(state: CellState, law: Law, merge: int) -> None:
    """Start the planned step: count its adapters, load them, and compute the time of the step."""
    server, own, requests, adapters = state.server, state.own, state.requests, state.adapters
    server.active = server.active_ranks = 0
    request_ranks, largest = 0, 0
    for i in range(own.batch):
        a = requests[state.order[i]].owner + 1
        rank = adapters[a].rank
        request_ranks += rank
        largest = max(largest, rank)
        if state.cached[a].counted != server.step + 1:
            server.active += 1
            server.active_ranks += rank
            state.cached[a].counted = server.step + 1
    for i in range(own.batch):
        bring(state, law, requests[state.order[i]].owner + 1)
    if merge > 0:
        state_vector(
            state.vector, server.step_decodes, server.step_prefill, 0.0, 0.0, 0.0, 0.0, server.context_tokens,
            server.waiting, law.settings, 0.0, 0.0, 0.0, server.attended,
        )  # fmt: skip
    else:
        state_vector(
            state.vector, server.step_decodes, server.step_prefill, server.active, server.active_ranks,
            server.slots, server.slot_rank, server.context_tokens, server.waiting, law.settings, request_ranks,
            own.batch * largest, server.served, server.attended,
        )  # fmt: skip
    charge(server, state.timeline, linear_ms(law.coefficients, state.vector) + server.load_ms + own.extra_ms)


@njit(**ENGINE_FLAGS)
def emit(state: CellState) -> None:
    """Give each request of the batch a token. Requests with all their tokens leave."""
    server, own, requests, now = state.server, state.own, state.requests, state.server.now_s
    for i in range(own.batch):
        r = state.order[i]
        if r < 0:  # the request was withdrawn
            continue
        request = requests[r]
        if request.generated == 0:
            request.first_s = request.first_seen_s = now
        else:
            state.histogram[gap_bin(now - request.last_s)] += 1
        request.generated += 1
        request.last_s = now
        if request.generated >= request.output:
            request.finish_s = request.finish_seen_s = now
            request.status = FINISHED
            forget(state, r)
    own.batch = 0
    server.decodes = server.running


@njit(**ENGINE_FLAGS)
def forget(state: CellState, r: int) -> None:
    """Remove request `r` from the server."""
    server, request = state.server, state.requests[r]
    a = request.owner + 1
    unlink(state.links["due"], r)
    state.cached[a].wanted -= 1
    state.classes[state.adapters[a].rank_class].unfinished -= 1
    if request.start == READY:
        server.running -= 1
        server.used -= request.context
    else:
        server.waiting -= 1
    if request.start == WAITS and request.generated == 0:
        server.waiting_prompt -= request.prompt


@njit(**ENGINE_FLAGS)
def advance(state: CellState, law: Law, until_s: float) -> None:
    """As `engine.advance.advance`: run every step that starts before `until_s`. Splitting a run changes no result."""
    server = state.server
    while True:
        over = False
        if server.in_flight == 1:
            over = server.end_s > until_s
            if not over:
                server.now_s = server.end_s
                emit(state)
                server.in_flight = 0
                server.step += 1
        idle = server.running == 0 and server.waiting == 0
        over = go_on(server, idle, server.next_s, until_s, over)
        if over and until_s < server.run_s:
            return
        arrive(state, until_s if over else server.now_s)
        if over:
            return
        if server.running == 0 and server.waiting == 0:
            continue
        begin(state, law, plan(state))
        server.in_flight = 1


@njit(**ENGINE_FLAGS)
def withdraw(c: Servers, memory: Own, s: int, r: int) -> None:
    """Remove accepted request `r` from server `s`. It keeps its tokens; another server computes their KV cache."""
    state = state_of(c, memory, s)
    for i in range(state.own.batch):
        if state.order[i] == r:
            state.order[i] = -1
    forget(state, r)
    # `ClusterView.blocks_of` takes a request without this time as accepted by no engine.
    state.requests[r].reached_s = math.nan
    state.server.taken -= 1
    state.server.sent -= 1
    c.wake_s[s] = event_s(state)
