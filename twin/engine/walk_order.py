"""vLLM walks over the adapters of a batch in the order of a Python set.

`InputBatch.make_lora_inputs` (vllm/v1/worker/gpu_input_batch.py) makes a new set of the adapters of the batch in each
step, from a dict, thus in the order in which the adapters entered the batch. Places follow CPython's
Objects/setobject.c (`set_add_entry`, `set_table_resize`): an adapter that enters is added last, and takes another place
if its own is taken. Once the adapter in its place has left, it moves there.

The order is needed only if an adapter of the batch may be evicted, or if several leave in one step. It is computed on
demand, for the current step and the previous one.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray, Record
from packer.twin.flags import CALLED, INLINED

LINEAR_PROBES = 9
PERTURB_SHIFT = 5
SMALLEST = 8


@njit(**INLINED)
def add(sets: IntArray, row: int, mask: int, adapters: Record, a: int) -> None:
    """Put adapter row `a` into a set of mask + 1 places."""
    perturb = adapters[a].hash
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
def grow(sets: IntArray, row: int, mask: int, adapters: Record, members: Record, count: int) -> int:
    """Grow a set to the smallest power of 2 above 4 × `count`; move its members in its order; return the new mask."""
    larger = SMALLEST
    while larger <= 4 * count:
        larger *= 2
    for i in range(mask + 1):
        members[i].spare = sets[row, i]
    for i in range(larger):
        sets[row, i] = 0
    for i in range(mask + 1):
        if members[i].spare > 0:
            add(sets, row, larger - 1, adapters, members[i].spare)
    return larger - 1


@njit(**INLINED)
def note_leave(server: Record, last_step: int) -> None:
    """Record that an adapter leaves the batch; `last_step` is the last step in which it was in the batch."""
    if server.leave_step <= last_step:
        server.leave_before = server.leave_step
        server.leave_step = last_step + 1


@njit(**INLINED)
def as_before(server: Record, step: int, made: int) -> bool:
    """Whether the batch of `step` has the same adapters, in order of entry, as the batch of step `made` - 1."""
    # Adapters that left after `step` were in its batch: what counts is when others left before.
    left = server.leave_step if server.leave_step <= step else server.leave_before
    return bool(0 < made <= step + 1 and server.join_step <= made and left < made)


@njit(**CALLED)
def order(server: Record, adapters: Record, sets: IntArray, members: Record, step: int) -> int:
    """Return the row of `sets` that begins with the batch of `step`, the current or the previous one, in walk order.

    These adapters are in the list by entry: those in the batch that joined by then, and those last touched in `step`.
    Adapters that left earlier are removed from the list. The previous step's row must be made before the current one's.
    """
    newer = 1 if server.set_step[1] > server.set_step[0] else 0
    if as_before(server, step, server.set_step[newer]):
        server.set_step[newer] = step + 1
        return newer
    row = 1 - newer
    mask, count, kept = SMALLEST - 1, 0, 0
    for i in range(SMALLEST):
        sets[row, i] = 0
    for k in range(server.entries):
        a = members[k].entry
        runs, last = adapters[a].in_batch > 0, adapters[a].last_use
        if not runs and last < step + 2:
            adapters[a].entered = 0
            continue
        members[kept].entry = a
        kept += 1
        if (runs and adapters[a].joined <= step + 1) or last == step + 2:
            add(sets, row, mask, adapters, a)
            count += 1
            # CPython grows a set when three fifths of its places are taken (`set_add_entry`).
            if 5 * count >= 3 * mask:
                mask = grow(sets, row, mask, adapters, members, count)
    server.entries = kept
    count = 0  # only the order matters from now on: remove empty places
    for i in range(mask + 1):
        a = sets[row, i]
        sets[row, count] = a
        count += a > 0
    for i in range(count):
        adapters[sets[row, i]].walked[row] = i
    server.set_step[row] = step + 1
    server.set_count[row] = count
    return row


@njit(**CALLED)
def make_room_to_enter(server: Record, adapters: Record, members: Record) -> None:
    """Remove adapters from the list by entry that are neither in the batch nor were touched in the last step."""
    kept = 0
    for k in range(server.entries):
        a = members[k].entry
        if adapters[a].in_batch > 0 or adapters[a].last_use > server.step:
            members[kept].entry = a
            kept += 1
        else:
            adapters[a].entered = 0
    server.entries = kept


@njit(**INLINED)
def enter(server: Record, adapters: Record, members: Record) -> None:
    """Move the adapters that joined in this step to the end of the list by entry."""
    if server.entries + server.joiners > members.size:
        make_room_to_enter(server, adapters, members)
    n = server.entries
    for k in range(server.joiners):
        a = members[k].joining
        # A dict keeps the place of an entry that stays; an adapter that left and came back is the last one.
        if adapters[a].entered == 1:
            i = 0
            while members[i].entry != a:
                i += 1
            n -= 1
            for j in range(i, n):
                members[j].entry = members[j + 1].entry
        adapters[a].entered = 1
        members[n].entry = a
        n += 1
    server.entries = n
    if server.joiners > 0:
        server.join_step = server.step + 1
    server.joiners = 0
