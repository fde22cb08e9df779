"""The step loop of LightLLM as S-LoRA and CaraServe use it: a step is either a prefill or a decode.

Written from S-LoRA (arXiv 2311.03285) and its public router. A pool of cells holds the KV cache and the adapters. A
request is admitted if the batch with its adapters can never need more cells than there are, so nothing is preempted.
Adapters that no running request uses leave by the rule of the cache policy (S-LoRA's: at once). Every `max_wait` decode
steps the queue is checked, and admitted requests are prefilled while the decodes wait. Compiled only if used.
"""

from __future__ import annotations

import math

from numba import njit

from packer.papers.accept import leave_queue
from packer.papers.cache.kernel import enter_batch, leave_batch, make_room, put, tidy
from packer.papers.cache.loading import ASYNC, CPU_ASSIST, PREFETCH
from packer.papers.lightllm.peak import insert, peak, remove
from packer.papers.lightllm.queue import arrive, fetch, finish_loads, give_up
from packer.papers.state import CellState
from packer.twin.cluster.state import next_event_s
from packer.twin.engine.advance import go_on
from packer.twin.engine.charge import charge
from packer.twin.engine.containers import link_last
from packer.twin.engine.emit import gap_bin
from packer.twin.engine.state import FINISHED
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.law.law import Law
from packer.twin.law.linear import linear_ms, state_vector

REFUSED, ADMITTED, PASSED_OVER = range(3)
SMOOTHING = 0.7


@njit(**ENGINE_FLAGS)
def join(state: CellState, law: Law, r: int, a: int) -> None:
    """Add request `r` of adapter row `a` to the batch, load its adapter, and add the load's time to `load_ms`.

    Until the request's first token, its `last_s` holds the load's time, ms.
    """
    server, adapters = state.server, state.adapters
    if adapters[a].resident == 0:
        make_room(state, adapters[a].blocks, 1, a)
        adapters[a].last_use = server.step + 1
    state.requests[r].last_s = enter_batch(state, law.loading, a)
    server.load_ms += state.requests[r].last_s
    make_room(state, state.requests[r].prompt + 1, 0, a)
    server.used += state.requests[r].prompt + 1


@njit(**INLINED)
def leave(state: CellState, r: int) -> None:
    """Remove request `r`, which has its last token, from the batch."""
    server, requests = state.server, state.requests
    requests[r].finish_s = requests[r].finish_seen_s = server.now_s
    requests[r].status = FINISHED
    tokens = requests[r].prompt + requests[r].output
    server.used -= tokens
    server.context_tokens -= tokens
    leave_batch(state, requests[r].owner + 1)


@njit(**ENGINE_FLAGS)
def try_to_admit(state: CellState, law: Law, r: int) -> int:
    """Try to admit request `r`. Return REFUSED, ADMITTED, or PASSED_OVER if its adapter is still being loaded."""
    server, requests, adapters, own, cached = (state.server, state.requests, state.adapters, state.own, state.cached)
    a = requests[r].owner + 1
    if own.loading_mode == ASYNC and adapters[a].resident == 0:
        if cached[a].loading == 0 and not fetch(state, law, a):
            return REFUSED
        return PASSED_OVER
    joins = adapters[a].in_batch == 0
    if (
        own.batch >= server.max_seqs
        or server.step_prefill + requests[r].prompt > server.token_budget
        or (joins and server.active >= own.slot_limit)
    ):
        return REFUSED
    # The prefill gives the first token, and each decode another one.
    requests[r].start = own.decode_steps + requests[r].output - 1
    place = insert(state, r)
    blocks = own.active_blocks + own.loading_blocks + (adapters[a].blocks if joins else 0)
    if peak(state) >= server.kv_blocks - blocks:
        remove(state, place)
        return REFUSED
    leave_queue(state, r)
    join(state, law, r, a)
    if adapters[a].last_use == server.step + 1:
        server.step_decodes += requests[r].prompt
    server.step_prefill += requests[r].prompt
    requests[r].next = server.ended
    server.ended = r + 1
    return ADMITTED


@njit(**ENGINE_FLAGS)
def walk(state: CellState, law: Law, newest_first: bool, only_batch: bool) -> None:
    """Admit requests in queue order until one is refused. `only_batch`: only requests with adapters in the batch."""
    server, queue = state.server, state.links["due"]
    r = queue[server.sentinel].before if newest_first else queue[server.sentinel].after
    while r != server.sentinel:
        after = queue[r].before if newest_first else queue[r].after
        tried = not only_batch or state.adapters[state.requests[r].owner + 1].in_batch > 0
        if tried and try_to_admit(state, law, r) == REFUSED:
            return
        r = after


@njit(**ENGINE_FLAGS)
def admit(state: CellState, law: Law) -> int:
    """Admit requests that fit and return their number. Sets `step_prefill`, `load_ms` and the list `ended`.

    Until the step is charged, `step_decodes` holds the prompt tokens of requests whose adapter must be loaded.
    """
    server, own = state.server, state.own
    server.step_prefill = server.step_decodes = server.ended = 0
    server.load_ms = 0.0
    before, newest_first = server.running, False
    if own.abort_after_s < math.inf:
        arrived = server.waiting - own.left
        own.arrivals = SMOOTHING * arrived + (1.0 - SMOOTHING) * own.arrivals
        give_up(state)
        newest_first = own.arrivals >= own.admissions
    if server.active >= own.cluster:
        walk(state, law, newest_first, True)
    walk(state, law, newest_first, False)
    admitted = server.running - before
    if admitted > 0:
        own.admissions = SMOOTHING * admitted + (1.0 - SMOOTHING) * own.admissions
    own.left = server.waiting
    return int(admitted)


@njit(**ENGINE_FLAGS)
def prefetch(state: CellState) -> None:
    """Load the adapters of the next batch during the decodes, while cells are free."""
    server, links, adapters, own, cached = state.server, state.links, state.adapters, state.own, state.cached
    own.tag += 1
    tokens = 0
    r = links[server.sentinel].due.after
    while r != server.sentinel:
        tokens += state.requests[r].prompt
        a = state.requests[r].owner + 1
        absent = adapters[a].resident == 0
        full = server.used + adapters[a].blocks > server.kv_blocks or server.residents >= own.slot_limit
        if tokens > server.token_budget or (absent and full):
            return
        if absent:
            put(state, a)
            server.unawaited += 1
            link_last(adapters["idle"], 0, a)
        cached[a].tagged = own.tag
        r = links[r].due.after


@njit(**ENGINE_FLAGS)
def assisted_ms(state: CellState, ms: float) -> float:
    """Time, ms, of a prefill that takes `ms` on the GPU if the CPU computes for adapters that are being loaded.

    Adapters are loaded one after the other. During a load, the CPU computes for its request and all that load later.
    """
    server, requests, own = state.server, state.requests, state.own
    done, spent_ms, cores, slowest_ms = 0.0, 0.0, 0, 0.0
    r = server.ended - 1  # last admitted first
    while r >= 0:
        adapter = state.adapters[requests[r].owner + 1]
        if adapter.last_use == server.step + 1:
            prompt = requests[r].prompt
            own_cores = -(-prompt // own.core_tokens)
            cores += own_cores
            slowest_ms = max(slowest_ms, -(-prompt // own_cores) * own.token_rank_ms * adapter.rank)
        turns = -(-cores // own.cores)
        # Share of the prefill that is done during this load: each layer waits for the slower of GPU and CPU.
        done += requests[r].last_s / max(ms, slowest_ms * turns)
        spent_ms += requests[r].last_s
        r = requests[r].next - 1
    return float(spent_ms + max(0.0, 1.0 - done) * ms + own.sync_ms)


@njit(**ENGINE_FLAGS)
def begin_prefill(state: CellState, law: Law, admitted: int) -> None:
    """Start the step that prefills the admitted requests; the step law counts only these requests."""
    server, requests, own = state.server, state.requests, state.own
    adapters, ranks, request_ranks, largest = 0, 0, 0, 0
    r = server.ended - 1
    while r >= 0:
        a = requests[r].owner + 1
        rank = state.adapters[a].rank
        request_ranks += rank
        largest = max(largest, rank)
        if state.cached[a].counted != server.step + 1:
            state.cached[a].counted = server.step + 1
            adapters += 1
            ranks += rank
        r = requests[r].next - 1
    missing = server.step_decodes
    server.step_decodes, own.prefilling = 0, 1
    state_vector(
        state.vector, 0.0, server.step_prefill, adapters, ranks, server.slots, server.slot_rank, 0.0,
        server.waiting, law.settings, request_ranks, admitted * largest, 0.0,
        0.5 * server.step_prefill * server.step_prefill / max(admitted, 1),
    )  # fmt: skip
    ms = linear_ms(law.coefficients, state.vector)
    if own.loading_mode == CPU_ASSIST and missing > 0:
        server.load_ms = assisted_ms(state, ms) - ms
    charge(server, state.timeline, ms + server.load_ms)


@njit(**ENGINE_FLAGS)
def begin_decode(state: CellState, law: Law) -> None:
    """Start the step in which each request of the batch gets a token."""
    server, own = state.server, state.own
    server.load_ms = 0.0
    decodes = own.batch
    make_room(state, decodes, 0, 0)
    server.used += decodes
    server.step_decodes, server.step_prefill, own.prefilling = decodes, 0, 0
    state_vector(
        state.vector, decodes, 0.0, server.active, server.active_ranks, server.slots, server.slot_rank,
        server.context_tokens, server.waiting, law.settings, server.request_ranks,
        decodes * state.classes[server.largest].rank, 0.0, 0.0,
    )  # fmt: skip
    ms = linear_ms(law.coefficients, state.vector)
    charge(server, state.timeline, ms)


@njit(**ENGINE_FLAGS)
def emit(state: CellState) -> None:
    """Output the tokens at the end of the step. Requests with all their tokens leave."""
    server, requests, order, own = state.server, state.requests, state.order, state.own
    now = server.now_s
    if own.prefilling == 1:
        r = server.ended - 1
        while r >= 0:
            requests[r].first_s = requests[r].first_seen_s = requests[r].last_s = now
            server.context_tokens += requests[r].prompt + 1
            r = requests[r].next - 1
        server.ended = 0
    else:
        own.decode_steps += 1
        server.context_tokens += own.batch
        last_s, k = math.nan, 0
        for i in range(own.batch):
            r = order[i]
            # Most requests got their last token in the same step, so the bin is rarely computed again.
            if requests[r].last_s != last_s:
                last_s = requests[r].last_s
                k = gap_bin(now - last_s)
            state.histogram[k] += 1
            requests[r].last_s = now
    finished = False
    while own.batch > 0 and requests[order[own.batch - 1]].start <= own.decode_steps:
        own.batch -= 1
        leave(state, order[own.batch])
        finished = True
    server.decodes = own.batch
    if finished:
        # S-LoRA drops prefetched adapters, too, once the batch is empty.
        tidy(state, own.tag if own.batch > 0 else 0)


@njit(**ENGINE_FLAGS)
def advance(state: CellState, law: Law, until_s: float) -> None:
    """As `engine.advance.advance`: run every step that starts before `until_s`. Splitting a run changes no result."""
    server, own = state.server, state.own
    while True:
        over = False
        if server.in_flight == 1:
            over = server.end_s > until_s
            if not over:
                server.now_s = server.end_s
                emit(state)
                server.in_flight = 0
                server.step += 1
        idle = own.blocked == 1 or (server.running == 0 and server.waiting == 0)
        over = go_on(server, idle, wake_s(state), until_s, over)
        if over and until_s < server.run_s:
            return
        now = until_s if over else server.now_s
        finish_loads(state, law, now)
        arrive(state, law, now)
        finish_loads(state, law, now)  # loads that take no time
        if over:
            return
        own.blocked = 0
        if server.running == 0 and server.waiting == 0:
            continue
        admitted = 0
        if server.waiting > 0 and (server.running == 0 or own.since >= own.max_wait):
            admitted = admit(state, law)
        if admitted > 0:
            own.since = 0
            begin_prefill(state, law, admitted)
        elif server.running == 0:
            # Nothing runs and nothing is admitted: the server waits for a load to end or for an arrival.
            own.blocked = 1 if server.waiting > 0 else 0
            continue
        else:
            since, wait = own.since, own.max_wait
            # S-LoRA prefetches twice between two checks of the queue.
            if own.loading_mode == PREFETCH and since < wait and since in (wait // 2, wait - 3):
                prefetch(state)
            begin_decode(state, law)
            own.since = min(own.since + 1, own.max_wait)
        server.in_flight = 1


@njit(**ENGINE_FLAGS)
def wake_s(state: CellState) -> float:
    """Time of the next event of an idle server."""
    next_s: float = state.server.next_s
    if state.server.waiting > 0:
        next_s = min(next_s, state.own.load_end_s)
    return next_s


@njit(**ENGINE_FLAGS)
def event_s(state: CellState) -> float:
    """When the server next has something to do, infinite if it is idle."""
    if state.server.in_flight == 0 and state.own.blocked == 1:
        return float(wake_s(state))
    return float(next_event_s(state.server))
