"""What a server keeps of each request where priorities or drafts make one unlike another: tokens, counted as vLLM does.

With priorities any running request may be preempted, and those behind it miss a step; with drafts each decode advances
by its own number of tokens. So every step goes through all running requests (`each_plan`, `each_step`), as vLLM's does.
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
    (
        "computed",
        "i8",
    ),  # tokens computed, those of steps that are scheduled included; drafts as if all were kept
    ("outputs", "i8"),  # tokens that came out
    ("placeholders", "i8"),  # tokens that steps in flight compute, drafts as if all were kept
    ("in_flight", "i8"),  # tokens of steps in flight
    ("stale", "i8"),  # of these, those from before a preemption
    ("drafts", "i8"),  # proposed for the next step
    ("chunk", "i8"),  # 1: its last step left tokens of the prefill
    ("held", "i8"),  # KV blocks
    ("hashed", "i8"),  # of these, how many can be found
    ("tokens", "i8"),  # in the step that is being scheduled, 0: not in it
    ("tried", "i8"),  # of these, drafts
    ("member", "i8"),  # 1: its adapter belongs to the batch because of it
    ("preempted", "i8"),  # 1: since it ran last
)
TRIED = record(
    ("request", "i8"),
    ("tokens", "i8"),
    ("tried", "i8"),  # drafts; -1: no token comes out
    ("padded", "i8"),  # 1: the drafts are padding, none of which is kept
)
STEP = record(
    ("count", "i8"),  # requests
    ("decodes", "i8"),  # tokens of decodes, drafts included
    ("prefill", "i8"),
    ("preempted", "i8"),
    ("load_ms", "f8"),
    ("ms", "f8"),
    ("more_ms", "f8"),  # of this, drafts and their verification
)
WHOLE = record(
    # Settings.
    ("depth", "i8"),  # steps that are scheduled at once: 1, or 2 with asynchronous scheduling
    ("drafts", "i8"),  # num_speculative_tokens, for which the KV cache has room (`num_lookahead_tokens`)
    ("draft_slots", "i8"),  # tokens of the budget that the drafter needs for each request
    ("drops_block", "i8"),  # 1: the last block that was found is computed again
    ("max_model_len", "i8"),
    ("passes_itself", "i8"),  # 1: after a request preempted itself, those behind it still get their tokens
    ("caches_verified", "i8"),  # 1: blocks can be found when their tokens are known
    ("pass_ms", "f8"),  # a pass of the drafter, ms
    ("token_ms", "f8"),  # and each of its tokens
    # State.
    ("current", "i8"),  # which of `steps` is in flight
    ("ahead", "i8"),  # 1: the other one is scheduled
    ("limbo", "i8"),  # requests preempted in the last schedule, which wait from the next one on
    ("tried", "i8"),  # drafts so far
    ("kept", "i8"),  # those that were kept
    ("steps", "i8"),  # of decodes, one for each request
    ("more_s", "f8"),  # drafts and their verification
    ("decode_s", "f8"),  # steps with decodes
)


class Each(NamedTuple):
    """What a server has besides `ServerState` and its pool, for n requests, s at once, and m adapters.

    whole (1,) of `WHOLE`; rows (n,) of `EACH`; adapter (n,): in the fleet; chances float64 (m,): of each of these, that
    a draft is kept if those before it are;
    running, limbo int64 (s,): requests in the order of `Scheduler.running`, those that were preempted; batches (2, s)
    of `TRIED`; steps (2,) of `STEP`; lingers int64 (m + 1,): step in which an adapter was found to belong to running
    requests outside the batch alone, + 1.
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
    """A server without requests, to which those of these adapters may come; `settings`: fields of `WHOLE`."""
    whole = np.zeros(1, dtype=WHOLE)
    for field, value in settings.items():
        whole[field] = value
    seqs = max(1, min(seqs, len(adapter)))
    running, limbo = np.zeros((2, seqs), dtype=np.int64)
    return Each(
        whole, np.zeros(len(adapter), dtype=EACH), adapter, chances, running, limbo, np.zeros((2, seqs), dtype=TRIED),
        np.zeros(2, dtype=STEP), np.zeros(len(chances) + 1, dtype=np.int64),
    )  # fmt: skip


# ---- what a request says


@njit(**INLINED)
def uniform(request: int, outputs: int) -> float:
    """A number in (0, 1) that stands for what a request says after so many outputs: it depends on nothing else."""
    prime = 2147483647
    x = ((request + 1) * 48271 + (outputs + 1) * 40692) % prime
    x = ((x ^ (x >> 15)) + 1) * 1103515245 % prime
    x = ((x ^ (x >> 15)) + 1) * 69621 % prime
    x = ((x ^ (x >> 15)) + 1) * 48271 % prime
    return (x + 0.5) / prime


@njit(**INLINED)
def accepted(chance: float, request: int, outputs: int, drafts: int) -> int:
    """Drafts that are kept: each with this chance, if those before it are."""
    u, count, product = uniform(request, outputs), 0, chance
    while count < drafts and u < product:
        count += 1
        product *= chance
    return count


@njit(**INLINED)
def end_limbo(state: ServerState, each: Each) -> None:
    """Requests that were preempted wait, unless the step that was in flight computed their last token."""
    server, requests = state.server, state.requests
    for i in range(each.whole[0].limbo):
        r = each.limbo[i]
        if each.rows[r].outputs == requests[r].output:
            continue
        server.waiting -= 1
        requests[r].generated = each.rows[r].outputs
        if server.by_priority == 1:
            server.waiting_prompt += requests[r].prompt
            put_by_key(state, r)
        else:
            a = requests[r].owner + 1
            put_first(server, requests, state.adapters, r, a)
            place(server, state.adapters, state.heaps, a)
    each.whole[0].limbo = 0
