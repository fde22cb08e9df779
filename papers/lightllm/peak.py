"""LightLLM's batch in the order in which its requests finish, and the largest number of cells that it will need.

In a decode, each request of the batch gets one token, so the finishing step of a request is known at its admission.
`order` holds the running requests, last to finish first; a request's `start` is the decode step that ends it.
"""

from __future__ import annotations

from numba import njit

from packer.papers.state import CellState
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def insert(state: CellState, r: int) -> int:
    """Insert request `r`, whose `start` is set, into the batch's order and return its place."""
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
    """Remove the request at place `i` from the order."""
    own, order = state.own, state.order
    own.batch -= 1
    for k in range(i, own.batch):
        order[k] = order[k + 1]


@njit(**ENGINE_FLAGS)
def peak(state: CellState) -> int:
    """Largest number of cells that the batch needs until its last request finishes, without its adapters.

    When a request finishes, it and the requests that finish later hold the cells that they hold now, and one more
    each for every step until then (S-LoRA, `ReqQueue._can_add_new_req`).
    """
    own, requests, order = state.own, state.requests, state.order
    held, most = 0, 0
    for i in range(own.batch):
        r = order[i]
        remaining = requests[r].start - own.decode_steps
        held += requests[r].prompt + requests[r].output - remaining
        most = max(most, held + (i + 1) * remaining)
    return most
