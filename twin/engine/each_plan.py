"""Schedule a step of a server that counts the tokens of each request (`engine.each`): vLLM's `Scheduler.schedule`.

Follows vllm/v1/core/sched/scheduler.py and async_scheduler.py of 0.32; differences in 0.33 are rules
(`packer.twin.engine_rules`). A chain of several MTP modules, whose prefill ends differently, is treated as one module.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray
from packer.twin.engine.admit import next_adapter
from packer.twin.engine.charge import law_ms, planned_ms
from packer.twin.engine.by_priority import take_by_key
from packer.twin.engine.each import Each, end_limbo
from packer.twin.engine.holding import find, hash_full, idle_blocks, shorten, sit_down, stand_up
from packer.twin.engine.pool import Pool, free_blocks, shared_blocks, take_blocks
from packer.twin.engine.schedule import blocks_of, to_admit
from packer.twin.engine.slots import join, leave, walk
from packer.twin.engine.state import ServerState
from packer.twin.engine.waiting import place, take_first
from packer.twin.flags import INLINED
from packer.twin.law.law import IS_PAPER, Law


@njit(**INLINED)
def known(state: ServerState, each: Each, r: int) -> int:
    """`Request.num_tokens`: prompt tokens plus output tokens so far."""
    return int(state.requests[r].prompt + each.rows[r].outputs)


@njit(**INLINED)
def hash_known(state: ServerState, each: Each, pool: Pool, r: int, tokens: int) -> None:
    """Hash the full blocks of the first `tokens` of request `r`, as far as the tokens that hashes cover are known."""
    if pool.all[0].caching == 1:
        full = min(tokens, known(state, each, r) - pool.all[0].lookahead) // state.server.block_size
        if full > each.rows[r].hashed:
            hash_full(state, pool, r, full)
            each.rows[r].hashed = full


@njit(**INLINED)
def give_up(state: ServerState, each: Each, pool: Pool, r: int, again: bool) -> None:
    """Free the blocks of request `r` and take it out of the batch. `again`: it will look for its blocks again."""
    row = each.rows[r]
    if pool.all[0].caching == 1:
        stand_up(state, pool, r, row.held, row.hashed, again)
    else:
        state.server.used -= row.held
    row.held = row.hashed = 0
    step_out(state, each, r)


@njit(**INLINED)
def step_out(state: ServerState, each: Each, r: int) -> None:
    """Stop counting request `r` in `in_batch` of its adapter."""
    if each.rows[r].member == 1:
        each.rows[r].member = 0
        a = state.requests[r].owner + 1
        leave(state, a, state.server.step - 1)
        place(state.server, state.adapters, state.heaps, a)


@njit(**INLINED)
def victim_of(state: ServerState, each: Each) -> int:
    """Index in `running` of the request that is preempted next: the last one, or the one of the lowest priority."""
    place = state.server.running - 1
    if state.server.by_priority == 1:
        for i in range(place):
            if state.requests[each.running[i]].key > state.requests[each.running[place]].key:
                place = i
    return int(place)


@njit(**INLINED)
def preempt(state: ServerState, each: Each, pool: Pool, i: int) -> None:
    """Preempt the request at index `i` of `running`. It waits from the next schedule on (`end_limbo`)."""
    server, r = state.server, each.running[i]
    row = each.rows[r]
    for k in range(i, server.running - 1):
        each.running[k] = each.running[k + 1]
    server.running -= 1
    server.waiting += 1
    server.preemptions += 1
    server.step_preempted += 1
    give_up(state, each, pool, r, True)
    row.computed = row.placeholders = row.drafts = row.tokens = 0
    row.stale, row.preempted = row.in_flight, 1
    each.limbo[each.whole[0].limbo] = r
    each.whole[0].limbo += 1


@njit(**INLINED)
def schedule_running(state: ServerState, each: Each, pool: Pool) -> tuple[int, int, bool]:
    """Give running requests their tokens; return what is left of both budgets (tokens, inputs), and if any prefills."""
    server, whole, requests = state.server, each.whole[0], state.requests
    budget = inputs = server.token_budget
    prefills, i = False, 0
    while i < server.running and budget > 0 and inputs > whole.draft_slots:
        r = each.running[i]
        row = each.rows[r]
        tokens, end = known(state, each, r), requests[r].prompt + requests[r].output
        new = min(tokens + row.drafts + row.placeholders - row.computed, min(budget, inputs - whole.draft_slots))
        new = min(new, whole.max_model_len - row.computed - 1)
        # Steps in flight give it its last token even if all their drafts are rejected.
        if (row.placeholders > 0 and row.computed + 2 - row.placeholders >= end) or new == 0:
            i += 1
            continue
        last = min(row.computed + new + whole.drafts, whole.max_model_len)
        growth, alive = blocks_of(last, server.block_size) - row.held, True
        while growth > free_blocks(state) and alive:
            k = victim_of(state, each)
            other = each.running[k]
            # It was scheduled in this step already: what it took of the budgets is free again.
            if each.rows[other].tokens > 0:
                budget += each.rows[other].tokens
                inputs += each.rows[other].tokens + whole.draft_slots
            preempt(state, each, pool, k)
            # If the victim stood before this request, this one has moved up.
            i -= k < i
            alive = other != r
        if not alive:
            if whole.passes_itself == 1:
                continue
            break
        if growth > 0:
            hold(state, pool, growth)
            row.held += growth
        hash_known(state, each, pool, r, row.computed + new)
        prefills = prefills or row.chunk == 1
        row.tokens = new
        # What goes beyond known tokens and tokens in flight is drafts.
        row.tried = max(new + row.computed - tokens - row.placeholders, 0) if row.drafts > 0 else 0
        row.drafts = 0
        budget -= new
        inputs -= new + whole.draft_slots
        i += 1
    return int(budget), int(inputs), prefills


@njit(**INLINED)
def hold(state: ServerState, pool: Pool, count: int) -> None:
    """Take `count` more blocks."""
    if pool.all[0].caching == 1:
        take_blocks(state, pool, count)
    else:
        state.server.used += count


@njit(**INLINED)
def regroup(state: ServerState, each: Each, loading: FloatArray) -> int:
    """Set the batch to the scheduled requests; return how many other adapters run (0 without `slots_of_running`)."""
    server, lingering = state.server, 0
    # Adapters leave the batch before others join, because each needs one of the same slots.
    for i in range(server.running):
        r = each.running[i]
        if each.rows[r].tokens == 0:
            step_out(state, each, r)
    for i in range(server.running):
        r = each.running[i]
        a = state.requests[r].owner + 1
        if each.rows[r].tokens > 0 and each.rows[r].member == 0:
            each.rows[r].member = 1
            join(state, loading, a)
            place(server, state.adapters, state.heaps, a)
    if server.slots_of_running == 1:
        for i in range(server.running):
            a = state.requests[each.running[i]].owner + 1
            if state.adapters[a].in_batch == 0 and each.lingers[a] != server.step + 1:
                each.lingers[a] = server.step + 1
                lingering += 1
    return lingering


@njit(**INLINED)
def next_waiting(state: ServerState, each: Each, lingering: int) -> int:
    """Row of the adapter whose first request is admissible next; 0 if none finds a slot."""
    server, adapters = state.server, state.adapters
    if server.active + lingering < server.slots or lingering == 0:
        return int(next_adapter(server, state.heaps))
    # No slot is left: only requests whose adapter is in the batch or lingers can be admitted.
    a = state.heaps[1, 0].row if server.heap_sizes[1] > 0 else 0
    for i in range(server.running):
        e = state.requests[each.running[i]].owner + 1
        waits = adapters[e].head > 0 and adapters[e].in_batch == 0 and each.lingers[e] == server.step + 1
        if waits and (a == 0 or adapters[e].first_key < adapters[a].first_key):
            a = e
    return int(a)


@njit(**INLINED)
def found(state: ServerState, each: Each, pool: Pool, r: int) -> int:
    """Number of blocks that request `r` takes from the cache; with `drops_block`, without the last `found_in` ones."""
    if pool.all[0].caching == 0:
        return 0
    hits = find(state, pool, r)
    if hits == 0 or each.whole[0].drops_block == 0:
        return int(hits)
    hits -= state.server.found_in
    if shared_blocks(pool, r, state.server.block_size) > 0:
        # `sit_down` reads the seat in which `find` noted the blocks.
        shorten(pool, pool.all[0].free_seat, hits)
    return int(hits)


@njit(**INLINED)
def admit_one(state: ServerState, law: Law, each: Each, pool: Pool, a: int, hits: int) -> None:
    """Admit the first waiting request of adapter row `a`, with `hits` blocks from the cache."""
    server, size = state.server, state.server.block_size
    r = state.adapters[a].head - 1
    row = each.rows[r]
    if pool.all[0].caching == 1:
        sit_down(state, pool, r, hits)
        if pool.found[r] < 0:
            pool.found[r] = hits * size
    if server.by_priority == 1:
        take_by_key(state, a)
    else:
        take_first(server, state.requests, state.adapters, state.links["batch"], state.trees, r, a)
    join(state, law.loading, a)
    place(server, state.adapters, state.heaps, a)
    each.running[server.running] = r
    server.running += 1
    row.computed, row.held, row.hashed, row.member, row.preempted = hits * size, hits, hits, 1, 0


@njit(**INLINED)
def schedule_waiting(
    state: ServerState, law: Law, each: Each, pool: Pool, left: tuple[int, int, bool], lingering: int
) -> int:
    """Admit waiting requests as far as the budgets in `left` allow; return how many adapter loads they wait for."""
    server, whole, size = state.server, each.whole[0], state.server.block_size
    budget, inputs, prefills = left
    awaited, grown = 0, budget < server.token_budget
    first = server.running
    while server.waiting > 0 and budget > 0 and inputs > whole.draft_slots and server.running < server.max_seqs:
        a = next_waiting(state, each, lingering)
        if a == 0:
            break
        r = state.adapters[a].head - 1
        row, tokens = each.rows[r], known(state, each, r)
        hits, most = found(state, each, pool, r), min(budget, inputs - whole.draft_slots)
        new, padded = tokens - hits * size, 0
        # Room for the drafts, the token before them and the sampled token (scheduler.py:1143–1148 of 0.32.0).
        fits = hits * size + whole.drafts + 2 <= whole.max_model_len
        if whole.drafts > 0 and new == 1 and not prefills and (grown or hits > 0) and fits:
            # vLLM schedules a request that lacks one token like a decode with (padded) drafts, or not at all.
            if 1 + whole.drafts > most:
                break
            new, padded = 1 + whole.drafts, 1
        new = min(new, most)
        last = min(hits * size + new + whole.drafts, whole.max_model_len)
        if server.whole_sequence == 1:
            last = max(last, tokens)
        idle = idle_blocks(pool, r, hits, size) if hits > 0 else 0
        if to_admit(server, last, hits * size) - hits + idle > free_blocks(state):
            break  # `allocate_slots` returned None
        awaited += state.adapters[a].resident == 0
        lingering -= lingering > 0 and state.adapters[a].in_batch == 0 and each.lingers[a] == server.step + 1
        admit_one(state, law, each, pool, a, hits)
        growth = blocks_of(min(hits * size + new + whole.drafts, whole.max_model_len), size) - hits
        hold(state, pool, growth)
        row.held += growth
        hash_known(state, each, pool, r, hits * size + new)
        row.tokens, row.tried, row.chunk = new, whole.drafts if padded == 1 else 0, 1
        budget -= new
        inputs -= new + whole.draft_slots
    for i in range(first, server.running):  # no drafts are proposed for them yet
        each.rows[each.running[i]].drafts = 0
    return awaited


@njit(**INLINED)
def note_batch(state: ServerState, each: Each, first: int) -> None:
    """`_update_after_schedule`: record what the next step computes; requests from index `first` on are new."""
    server, whole, count = state.server, each.whole[0], 0
    k = 1 - whole.current
    server.step_decodes = server.step_prefill = server.attended = server.context_tokens = 0
    for i in range(server.running):
        r = each.running[i]
        row, batch = each.rows[r], each.batches[k, count]
        if row.tokens == 0:
            continue
        count += 1
        decodes = i < first and row.chunk == 0
        if decodes:
            server.step_decodes += row.tokens
            server.context_tokens += row.computed + 1
        else:
            server.step_prefill += row.tokens
            server.attended += row.tokens * (2 * row.computed + row.tokens) // 2
        row.computed += row.tokens
        row.in_flight += row.tokens
        row.chunk = row.computed < known(state, each, r) + row.placeholders
        batch.request, batch.tokens, batch.tried = r, row.tokens, -1
        batch.padded = i >= first
        if row.chunk == 0:
            batch.tried = row.tried
            if server.depth == 2:
                # The next step is scheduled before this step's tokens are known (async_scheduler.py).
                row.placeholders += 1 + row.tried
                row.drafts = whole.drafts
        row.tokens = row.tried = 0
    each.steps[k].count = count


@njit(**INLINED)
def cost(state: ServerState, law: Law, each: Each) -> float:
    """Return the duration of the next step, ms: time of its tokens plus time of the drafter's passes."""
    server, whole, k = state.server, each.whole[0], 1 - each.whole[0].current
    step, decodes, prefill = each.steps[k], server.step_decodes, server.step_prefill
    ms: float = planned_ms(state, law)
    step.more_ms = 0.0
    if whole.drafts > 0:
        sampling = decoding = 0
        for i in range(step.count):
            sampling += each.batches[k, i].tried >= 0
            decoding += each.batches[k, i].tried > 0 and each.batches[k, i].padded == 0
        if sampling > 0:
            # The drafter's first pass reads all tokens of the step, others read one token of each request.
            tokens = decodes + prefill + (whole.drafts - 1) * sampling
            step.more_ms = whole.drafts * whole.pass_ms + tokens * whole.token_ms
            ms += step.more_ms
        if decoding > 0 and law.settings[IS_PAPER] == 0:
            # `ms` already includes the verification of drafts: only its share in `more_ms` is computed here.
            extra = law_ms(state, law, decodes, prefill)
            tried = 0
            for i in range(step.count):
                tried += max(each.batches[k, i].tried, 0) if each.batches[k, i].padded == 0 else 0
            step.more_ms += extra - law_ms(state, law, decodes - tried, prefill)
    return ms


@njit(**INLINED)
def plan_each(state: ServerState, law: Law, each: Each, pool: Pool) -> None:
    """`Scheduler.schedule`: set what the next step computes (`step_decodes`, `step_prefill`, `load_ms`)."""
    server = state.server
    end_limbo(state, each)
    server.step_preempted, server.load_ms = 0, 0.0
    left = schedule_running(state, each, pool)
    loads = server.adapter_loads
    lingering = regroup(state, each, law.loading)
    first, awaited = server.running, 0
    # vLLM admits no request in a step that preempted one.
    if server.step_preempted == 0:
        awaited = schedule_waiting(state, law, each, pool, left, lingering)
    if server.joiners > 0:
        walk(server, state.adapters, state.sets, state.members, law.loading)
    server.unawaited += max(0, server.adapter_loads - loads - awaited)
    note_batch(state, each, first)
    if server.step_decodes + server.step_prefill > 0:
        server.step += 1
