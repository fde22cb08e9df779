"""LightLLM's batch by the order in which its requests finish, and the most cells that it will ever need.

In a batch that decodes, each request gets one token in each step: who finishes when is known at admission.
`order` holds the running requests, last to finish first; a request's `start` is the decode step that ends it.
"""

from __future__ import annotations

from numba import njit

from packer.papers.state import CellState
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def insert(state: CellState, r: int) -> int:
    """Put request `r`, whose `start` is set, into the batch's order; returns its place."""
    own, requests, order = state.own, state.requests, state.order
    i = own.batch
    while i > 0 and requests[order[i - 1]].start < requests[r].start:
        order[i] = order[i - 1]
        i -= 1
    order[i] = r
    own.batch += 1
    return int(i)


@njit(**ENGINE_FLAGS)
def remove(state: CellState, i: int) -> None:
    """Take what stands at place `i` out of the order."""
    own, order = state.own, state.order
    own.batch -= 1
    for k in range(i, own.batch):
        order[k] = order[k + 1]


@njit(**ENGINE_FLAGS)
def peak(state: CellState) -> int:
    """Most cells that the batch needs at any time until it is done, without its adapters.

    When the k-th to finish, counted from the last, gets its last token, it and those after it hold what they
    hold now and one cell more for each step until then (S-LoRA, `ReqQueue._can_add_new_req`).
    """
    own, requests, order = state.own, state.requests, state.order
    held, most = 0, 0
    for i in range(own.batch):
        r = order[i]
        remaining = requests[r].start - own.decode_steps
        held += requests[r].prompt + requests[r].output - remaining
        most = max(most, held + (i + 1) * remaining)
    return most
