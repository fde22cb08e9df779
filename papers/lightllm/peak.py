"""LightLLM's batch by the order in which its requests finish, and the most cells that it will ever need.

In a batch that decodes, each request gets one token in each step: who finishes when is known at admission.
`sets[0]` holds the running requests, last to finish first; a request's START is the decode step that ends it.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray
from packer.twin.engine.state import BATCH, DECODE_STEPS, OUTPUT, PROMPT, START
from packer.twin.flags import ENGINE_FLAGS


@njit(**ENGINE_FLAGS)
def insert(ints: IntArray, requests: IntArray, order: IntArray, r: int) -> int:
    """Put request `r`, whose START is set, into the batch's order; returns its place."""
    i = ints[BATCH]
    while i > 0 and requests[order[i - 1], START] < requests[r, START]:
        order[i] = order[i - 1]
        i -= 1
    order[i] = r
    ints[BATCH] += 1
    return int(i)


@njit(**ENGINE_FLAGS)
def remove(ints: IntArray, order: IntArray, i: int) -> None:
    """Take what stands at place `i` out of the order."""
    ints[BATCH] -= 1
    for k in range(i, ints[BATCH]):
        order[k] = order[k + 1]


@njit(**ENGINE_FLAGS)
def peak(ints: IntArray, requests: IntArray, order: IntArray) -> int:
    """Most cells that the batch needs at any time until it is done, without its adapters.

    When the k-th to finish, counted from the last, gets its last token, it and those after it hold what they
    hold now and one cell more for each step until then (S-LoRA, `ReqQueue._can_add_new_req`).
    """
    held, most = 0, 0
    for i in range(ints[BATCH]):
        r = order[i]
        remaining = requests[r, START] - ints[DECODE_STEPS]
        held += requests[r, PROMPT] + requests[r, OUTPUT] - remaining
        most = max(most, held + (i + 1) * remaining)
    return most
