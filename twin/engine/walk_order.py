"""The order in which vLLM walks over the adapters of a batch: that of a Python set.

`InputBatch.make_lora_inputs` (vllm/v1/worker/gpu_input_batch.py) makes a set of the adapters of the batch anew in each
step, from a dict, thus in the order in which they entered the batch. Places follow CPython's Objects/setobject.c
(`set_add_entry`, `set_table_resize`): an adapter that enters comes last, and gives way to those whose place it hits;
once these have left it moves up.

The order is needed only where an adapter of the batch may be evicted, or several leave in one step: it is made on
demand, for the current step and the one before.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray
from packer.twin.engine.state import (
    ENTERED, ENTRIES, ENTRY, HASH, HASHED, IN_BATCH, JOINED, JOINERS, JOINING, JOIN_STEP, LAST_USE, LEAVE_BEFORE,
    LEAVE_STEP, SET_MASK, SET_STEP, SET_STEP_OTHER, SPARE, STEP, WALKED,
)  # fmt: skip
from packer.twin.flags import CALLED, INLINED

LINEAR_PROBES = 9
PERTURB_SHIFT = 5
SMALLEST = 8


@njit(**INLINED)
def add(sets: IntArray, row: int, mask: int, adapters: IntArray, a: int) -> None:
    """Put adapter row `a` into a set of mask + 1 places."""
    perturb = adapters[a, HASHED]
    home = perturb & mask
    while True:
        last = home + LINEAR_PROBES if home + LINEAR_PROBES <= mask else home
        for i in range(home, last + 1):
            if sets[row, i] == 0:
                sets[row, i] = a
                return
        perturb >>= PERTURB_SHIFT
        home = (home * 5 + 1 + perturb) & mask


@njit(**CALLED)
def grow(sets: IntArray, row: int, mask: int, adapters: IntArray, members: int) -> int:
    """Move the members of a set, in its order, to the smallest power of 2 beyond four times as many places."""
    larger = SMALLEST
    while larger <= 4 * members:
        larger *= 2
    for i in range(mask + 1):
        sets[SPARE, i] = sets[row, i]
    for i in range(larger):
        sets[row, i] = 0
    for i in range(mask + 1):
        if sets[SPARE, i] > 0:
            add(sets, row, larger - 1, adapters, sets[SPARE, i])
    return larger - 1


@njit(**INLINED)
def note_leave(ints: IntArray, last_step: int) -> None:
    """An adapter leaves the batch, to which it belonged last in `last_step`."""
    if ints[LEAVE_STEP] <= last_step:
        ints[LEAVE_BEFORE] = ints[LEAVE_STEP]
        ints[LEAVE_STEP] = last_step + 1


@njit(**INLINED)
def as_before(ints: IntArray, step: int, made: int) -> bool:
    """Whether the batch of a step has the adapters, by entry, of that of the step `made` before it."""
    left = ints[LEAVE_STEP] if ints[LEAVE_STEP] <= step else ints[LEAVE_BEFORE]
    return bool(0 < made <= step + 1 and ints[JOIN_STEP] <= made and left < made)


@njit(**CALLED)
def order(ints: IntArray, adapters: IntArray, sets: IntArray, step: int) -> int:
    """The row of `sets` that holds the batch of a step, the current one or the one before, in the order of the walk.

    Its members are in the list by entry: those in the batch that joined by then, and those touched last in that step.
    Who left earlier is taken out of the list on the way. The row of the current step is made after that of the last.
    """
    newer = 1 if ints[SET_STEP_OTHER] > ints[SET_STEP] else 0
    if as_before(ints, step, ints[SET_STEP + newer]):
        ints[SET_STEP + newer] = step + 1
        return newer
    row = 1 - newer
    mask, members, kept = SMALLEST - 1, 0, 0
    for i in range(SMALLEST):
        sets[row, i] = 0
    for k in range(ints[ENTRIES]):
        a = sets[ENTRY, k]
        runs, last = adapters[a, IN_BATCH] > 0, adapters[a, LAST_USE]
        if not runs and last < step + 2:
            adapters[a, ENTERED] = 0
            continue
        sets[ENTRY, kept] = a
        kept += 1
        if (runs and adapters[a, JOINED] <= step + 1) or last == step + 2:
            add(sets, row, mask, adapters, a)
            members += 1
            if 5 * members >= 3 * mask:
                mask = grow(sets, row, mask, adapters, members)
    ints[ENTRIES] = kept
    for i in range(mask + 1):
        if sets[row, i] > 0:
            adapters[sets[row, i], WALKED + row] = i
    ints[SET_STEP + row] = step + 1
    ints[SET_MASK + row] = mask
    return row


@njit(**CALLED)
def make_room_to_enter(ints: IntArray, adapters: IntArray, sets: IntArray) -> None:
    """Who is neither in the batch nor was touched in the last step leaves the list by entry."""
    kept = 0
    for k in range(ints[ENTRIES]):
        a = sets[ENTRY, k]
        if adapters[a, IN_BATCH] > 0 or adapters[a, LAST_USE] > ints[STEP]:
            sets[ENTRY, kept] = a
            kept += 1
        else:
            adapters[a, ENTERED] = 0
    ints[ENTRIES] = kept


@njit(**INLINED)
def enter(ints: IntArray, adapters: IntArray, sizes: IntArray, sets: IntArray) -> None:
    """Those that joined in this step come last in the list by entry."""
    if ints[ENTRIES] + ints[JOINERS] > sets.shape[1]:
        make_room_to_enter(ints, adapters, sets)
    n = ints[ENTRIES]
    for k in range(ints[JOINERS]):
        a = sets[JOINING, k]
        if adapters[a, ENTERED] == 1:
            i = 0
            while sets[ENTRY, i] != a:
                i += 1
            n -= 1
            for j in range(i, n):
                sets[ENTRY, j] = sets[ENTRY, j + 1]
        adapters[a, ENTERED] = 1
        adapters[a, HASHED] = sizes[a, HASH]
        sets[ENTRY, n] = a
        n += 1
    ints[ENTRIES] = n
    if ints[JOINERS] > 0:
        ints[JOIN_STEP] = ints[STEP] + 1
    ints[JOINERS] = 0
