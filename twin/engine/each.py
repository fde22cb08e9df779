"""Token counts of each request, kept as in vLLM, for servers with priorities or drafts (speculative decoding).

With priorities, any running request may be preempted, and the requests behind it may miss a step. With drafts, each
decode advances by its own number of tokens. So every step visits all running requests (`each_plan`, `each_step`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray, Record, record
from packer.twin.engine.by_priority import put_by_key
from packer.twin.engine.state import ServerState
from packer.twin.engine.waiting import place, put_first
from packer.twin.flags import INLINED

EACH = record(
    ("computed", "i8"),  # tokens computed, with those of scheduled steps, as if all drafts were accepted
    ("outputs", "i8"),  # output tokens so far
    ("placeholders", "i8"),  # output tokens of steps in flight, as if all drafts were accepted
    ("in_flight", "i8"),  # tokens of steps in flight
    ("stale", "i8"),  # of these, tokens scheduled before a preemption
    ("drafts", "i8"),  # drafts proposed for the next step
    ("chunk", "i8"),  # 1: its prefill did not end with its last step
    ("held", "i8"),  # KV blocks that it holds
    ("hashed", "i8"),  # number of these that are hashed, so that they can be found
    ("tokens", "i8"),  # its tokens in the step that is being scheduled, 0: none
    ("tried", "i8"),  # number of these that are drafts
    ("member", "i8"),  # 1: it counts in `in_batch` of its adapter
    ("preempted", "i8"),  # 1: it was preempted and has not run since
)
TRIED = record(
    ("request", "i8"),
    ("tokens", "i8"),
    ("tried", "i8"),  # drafts; -1: no token comes out
    ("padded", "i8"),  # 1: the drafts are padding, and none is accepted
)
STEP = record(
    ("count", "i8"),  # requests
    ("more_ms", "f8"),  # part of its duration for drafts and their verification
)
WHOLE = record(
    # Settings.
    ("drafts", "i8"),  # num_speculative_tokens, with KV blocks held for them (`num_lookahead_tokens`)
    ("draft_slots", "i8"),  # tokens of the budget that the drafter needs for each request
    ("drops_block", "i8"),  # 1: the last block found in the cache is computed again
    ("max_model_len", "i8"),
    ("passes_itself", "i8"),  # 1: after a request preempted itself, those behind it still get their tokens
    ("caches_verified", "i8"),  # 1: blocks are hashed only when their tokens are verified
    ("pass_ms", "f8"),  # time of a pass of the drafter, ms
    ("token_ms", "f8"),  # time of each token of such a pass, ms
    # State.
    ("current", "i8"),  # which of `steps` is in flight; the other one is scheduled next
    ("limbo", "i8"),  # requests preempted in the last schedule; they wait from the next schedule on
    ("tried", "i8"),  # drafts verified so far
    ("kept", "i8"),  # drafts accepted so far
    ("steps", "i8"),  # decodes, summed over all steps
    ("more_s", "f8"),  # time of drafts and their verification
    ("decode_s", "f8"),  # time of steps with decodes
)


class Each(NamedTuple):
    """Arrays of a server besides `ServerState` and its pool, for n requests, at most s of them running, and m adapters.

    whole (1,) of `WHOLE`. rows (n,) of `EACH`. adapter (n,): each request's adapter, numbered in the fleet. chances
    float64 (m,): for each adapter of the fleet, the probability that a draft is accepted if all drafts before it are.
    running int64 (s,): requests in the order of `Scheduler.running`. limbo int64 (s,): preempted requests. batches
    (2, s) of `TRIED`. steps (2,) of `STEP`. lingers int64 (m + 1,): last step, + 1, in which an adapter had running
    requests but none of them was scheduled.
    """

    whole: Record
    rows: Record
    adapter: IntArray
    chances: FloatArray
    running: IntArray
    limbo: IntArray
    batches: Record
    steps: Record
    lingers: IntArray


def new_each(adapter: IntArray, seqs: int, chances: FloatArray, settings: dict[str, float]) -> Each:
    """Return a server without requests. `adapter`: that of each request to come. `settings`: fields of `WHOLE`."""
    whole = np.zeros(1, dtype=WHOLE)
    for field, value in settings.items():
        whole[field] = value
    seqs = max(1, min(seqs, len(adapter)))
    running, limbo = np.zeros((2, seqs), dtype=np.int64)
    return Each(
        whole, np.zeros(len(adapter), dtype=EACH), adapter, chances, running, limbo, np.zeros((2, seqs), dtype=TRIED),
        np.zeros(2, dtype=STEP), np.zeros(len(chances) + 1, dtype=np.int64),
    )  # fmt: skip


# ---- which drafts are accepted


@njit(**INLINED)
def uniform(request: int, outputs: int) -> float:
    """Pseudo-random number in (0, 1) for a request after this number of outputs; it depends on nothing else."""
    prime = 2147483647
    x = ((request + 1) * 48271 + (outputs + 1) * 40692) % prime
    x = ((x ^ (x >> 15)) + 1) * 1103515245 % prime
    x = ((x ^ (x >> 15)) + 1) * 69621 % prime
    x = ((x ^ (x >> 15)) + 1) * 48271 % prime
    return (x + 0.5) / prime


@njit(**INLINED)
def accepted(chance: float, request: int, outputs: int, drafts: int) -> int:
    """Number of accepted drafts: each is accepted with probability `chance` if all drafts before it are."""
    u, count, product = uniform(request, outputs), 0, chance
    while count < drafts and u < product:
        count += 1
        product *= chance
    return count


@njit(**INLINED)
def end_limbo(state: ServerState, each: Each) -> None:
    """Put preempted requests among the waiting ones, unless the step that was in flight computed their last token."""
    server, requests = state.server, state.requests
    for i in range(each.whole[0].limbo):
        r = each.limbo[i]
        # `emit_each` has finished it and has reduced the count of waiting requests.
        if each.rows[r].outputs == requests[r].output:
            continue
        server.waiting -= 1
        requests[r].generated = each.rows[r].outputs
        if server.by_priority == 1:
            server.waiting_prompt += requests[r].prompt
            put_by_key(state, r)
        else:
            a = requests[r].owner + 1
            put_first(server, requests, state.adapters, state.links["batch"], state.trees, r, a)
            place(server, state.adapters, state.heaps, a)
    each.whole[0].limbo = 0
