"""dLoRA's choice between a batch of one merged adapter and a batch by arrival, and the credits that keep it fair.

Written from Wu et al., dLoRA (OSDI 2024, section 4), and the scheduler of its artifact (github.com/LLMServe/
dLoRA-artifact, vllm/core/scheduler.py, `_credit_schedule`, `_adjust_credit`, `_adjust_merge_threshold`).
"""

from __future__ import annotations

from numba import njit

from packer.papers.state import CellState
from packer.twin.flags import ENGINE_FLAGS

STEP, FACTOR = 0.05, 1.1  # Step of a share if the current kind of batch serves more; factor if it serves less.


@njit(**ENGINE_FLAGS)
def first_in_queue(state: CellState) -> int:
    """Write the first requests by arrival, up to `max_seqs`, to `order` from place `max_seqs`. Return their number."""
    server, requests, queue = state.server, state.requests, state.links["due"]
    count, r = 0, queue[server.sentinel].after
    while r != server.sentinel and count < server.max_seqs:
        # `pay` recognises the first requests by arrival by this mark.
        requests[r].key = server.step + 1
        state.order[server.max_seqs + count] = r
        count += 1
        r = queue[r].after
    return count


@njit(**ENGINE_FLAGS)
def pick(state: CellState, a: int, count: int) -> int:
    """Append the first requests of adapter row `a` to the `count` picked ones in `order`. Return the new count."""
    server, queue = state.server, state.links["due"]
    r = queue[server.sentinel].after
    while r != server.sentinel and count < server.max_seqs:
        if state.requests[r].owner + 1 == a:
            state.order[2 * server.max_seqs + count] = r
            count += 1
        r = queue[r].after
    return count


@njit(**ENGINE_FLAGS)
def pick_by_credit(state: CellState) -> int:
    """Pick requests of adapters whose credit is due; return their number. Credit stays due until half of it is paid."""
    server, own, cached = state.server, state.own, state.cached
    count = 0
    for a in range(1, cached.size):
        cached[a].picked = 0
    while count < server.max_seqs:
        best = 0
        for a in range(1, cached.size):
            due = cached[a].picked == 0 and cached[a].credit >= 0.5 * own.credits
            if due and (best == 0 or cached[a].credit > cached[best].credit):
                best = a
        if best == 0:
            break
        cached[best].picked = 1
        if cached[best].credit >= own.credits or cached[best].credited == 1:
            cached[best].picked = 2
            count = pick(state, best, count)
    for a in range(1, cached.size):
        cached[a].credited = 1 if cached[a].picked == 2 else 0
    return count


@njit(**ENGINE_FLAGS)
def pay(state: CellState, first: int, picked: int, price: float, merged: int) -> None:
    """Transfer credit from adapters of picked requests to adapters whose requests would have run by arrival.

    `merged`: number of requests of the merged adapter that should run; 0: the batch is not merged.
    """
    requests, cached, order, most = state.requests, state.cached, state.order, state.server.max_seqs
    # Between batches of different sizes, half of the price is paid for each request left out.
    if merged > 0 and merged != first:
        payer = requests[order[2 * most]].owner + 1
        for i in range(first):
            a = requests[order[most + i]].owner + 1
            if a != payer:
                cached[payer].credit -= 0.5 * price
                cached[a].credit += 0.5 * price
        return
    by_arrival = 0
    for i in range(picked):
        by_arrival += requests[order[2 * most + i]].key == state.server.step + 1
    for i in range(picked):
        r = order[2 * most + i]
        if requests[r].key != state.server.step + 1:
            cached[requests[r].owner + 1].credit -= price
            cached[requests[order[most + by_arrival]].owner + 1].credit += price
            by_arrival += 1


@njit(**ENGINE_FLAGS)
def adjust_shares(state: CellState) -> None:
    """At a change, adapt the shares to the kind of batch that would have served more requests since the last one."""
    own = state.own
    if own.rounds == 0:
        return
    merged_ms, mixed_ms = own.merged_ms * own.rounds, own.mixed_ms * own.rounds
    if own.merged > 0:
        merged_ms += own.switch_ms
    else:
        mixed_ms += own.switch_ms
        merged_ms += own.switch_ms * own.turns
    merged, mixed = own.merged_count / merged_ms, own.mixed_count / mixed_ms
    if own.merged > 0:
        if merged > mixed and own.join_share - STEP > own.stay_share:
            own.join_share -= STEP
        elif merged < mixed:
            own.join_share *= FACTOR
    elif mixed > merged and own.stay_share + STEP < own.join_share:
        own.stay_share += STEP
    elif mixed < merged:
        own.stay_share /= FACTOR
    own.merged_count = own.mixed_count = own.turns = own.busiest = 0


@njit(**ENGINE_FLAGS)
def choose(state: CellState, first: int) -> int:
    """Choose the adapter row to merge for a batch, 0: none. `first`: number of requests by arrival in `order`."""
    own, cached = state.own, state.cached
    # The artifact's credits start at `credits` × (adapters - 1), these at 0: this is its 0 (`credit_base`).
    owed, most = -own.credits * (state.server.served - 1), 0
    for a in range(1, cached.size):
        if cached[a].credit >= owed and (most == 0 or cached[a].wanted > cached[most].wanted):
            most = a
    merged = own.merged
    if merged > 0 and cached[merged].credit >= owed and cached[merged].wanted >= own.stay_share * first:
        chosen, due = merged, cached[merged].wanted
        own.rounds += 1
    elif most > 0 and cached[most].wanted >= own.join_share * first:
        adjust_shares(state)
        chosen, due = most, min(cached[most].wanted, state.server.max_seqs)
        own.rounds = 1
    else:
        chosen, due = 0, 0
        own.turns += own.busiest != most
        own.busiest = most
    counted = cached[chosen if chosen > 0 else most].wanted
    own.merged_count += min(counted, state.server.max_seqs)
    own.mixed_count += first
    if chosen > 0:
        # `batch_credit_cost`: a seat of a merged batch is worth as much more as its steps are shorter.
        price = 1.0 / (own.merged_ms / own.mixed_ms * state.server.max_seqs)
        pay(state, first, pick(state, chosen, 0), price, due)
    return int(chosen)
