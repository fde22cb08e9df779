"""The waiting requests of one adapter in vLLM 0.10 to 0.13, which puts passed-over requests back in reverse order.

A treap in the order of the keys. `start` and `next` of a request are its left and right child, negative if the subtree
is mirrored: its order is then reversed. The `key` of a root is the key of the request, that of a child is relative to
the key of its parent: a tree is reversed at its root, in constant time, and a part of a tree after a split.
"""

from __future__ import annotations

from numba import njit

from packer.arrays import Record
from packer.twin.engine.containers import sift
from packer.twin.engine.state import IDLE
from packer.twin.flags import CALLED, INLINED


@njit(**INLINED)
def weight(tree: int) -> int:
    """A number that looks random, by request: the parent has the smaller one, so depth grows like the logarithm."""
    mixed = abs(tree) * 0x9E3779B1 & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B & 0xFFFFFFFF
    return int(mixed ^ mixed >> 13)


@njit(**INLINED)
def hang(requests: Record, parent: int, right: bool, tree: int, key: int) -> None:
    """Hang a tree below `parent`, if that is not 0; `key`: of its root, relative to the parent's key."""
    requests[abs(tree) - 1].key = key
    if parent > 0 and right:
        requests[parent - 1].next = tree
    elif parent > 0:
        requests[parent - 1].start = tree


@njit(**INLINED)
def upright(requests: Record, tree: int) -> int:
    """If a tree is mirrored, exchange its subtrees and mirror these instead; return its root's number."""
    request = requests[abs(tree) - 1]
    if tree < 0:
        for child in (request.start, request.next):
            if child != 0:
                requests[abs(child) - 1].key *= -1
        request.start, request.next = -request.next, -request.start
    return abs(tree)


@njit(**CALLED)
def split(requests: Record, tree: int, end_key: int) -> tuple[int, int]:
    """Split a tree into the requests with keys below `end_key` and the others."""
    below = above = key = 0
    left = right = left_key = right_key = 0  # the requests whose next child is to be found, and their keys
    while tree != 0:
        root = upright(requests, tree)
        key += requests[root - 1].key
        if key < end_key:
            hang(requests, left, True, root, key - left_key)
            below = root if below == 0 else below
            left, left_key, tree = root, key, requests[root - 1].next
        else:
            hang(requests, right, False, root, key - right_key)
            above = root if above == 0 else above
            right, right_key, tree = root, key, requests[root - 1].start
    if left > 0:
        requests[left - 1].next = 0
    if right > 0:
        requests[right - 1].start = 0
    return below, above


@njit(**CALLED)
def join(requests: Record, below: int, above: int) -> int:
    """Join two trees; all keys of the first are smaller."""
    whole = parent = parent_key = below_key = above_key = 0
    right = False
    while below != 0 or above != 0:
        lower = above == 0 or (below != 0 and weight(below) < weight(above))
        root = below if lower else above
        ends = below == 0 or above == 0  # a whole tree remains
        if not ends:
            root = upright(requests, root)
        key = requests[abs(root) - 1].key + (below_key if lower else above_key)
        hang(requests, parent, right, root, key - parent_key)
        whole = root if whole == 0 else whole
        if ends:
            break
        parent, parent_key, right = root, key, lower
        if lower:
            below, below_key = requests[root - 1].next, key
        else:
            above, above_key = requests[root - 1].start, key
    return int(whole)


@njit(**INLINED)
def last_key(requests: Record, tree: int, end_key: int) -> int:
    """Return the largest key below `end_key`, which some key is."""
    key, found, way = 0, end_key, 1
    while tree != 0:
        request = requests[abs(tree) - 1]
        key += way * request.key
        way = way if tree > 0 else -way
        if key < end_key:
            found = key
        tree = request.next if (key < end_key) == (way > 0) else request.start
    return found


@njit(**INLINED)
def note_first(requests: Record, adapter: Record) -> None:
    """Set `head` and `first_key` to the first request of the adapter's tree."""
    tree, key, way = adapter.tail, 0, 1
    adapter.head = 0
    while tree != 0:
        request = requests[abs(tree) - 1]
        key += way * request.key
        way = way if tree > 0 else -way
        adapter.head, adapter.first_key = abs(tree), key
        tree = request.start if way > 0 else request.next


@njit(**CALLED)
def put_in(requests: Record, adapter: Record, r: int) -> None:
    """Put request `r` before or behind all waiting requests of its adapter, as its key says; `tail` is the root."""
    requests[r].start = requests[r].next = 0
    if adapter.head == 0 or requests[r].key > adapter.first_key:
        adapter.tail = join(requests, adapter.tail, r + 1)
    else:
        adapter.tail = join(requests, r + 1, adapter.tail)
    note_first(requests, adapter)


@njit(**CALLED)
def take_out(requests: Record, adapter: Record) -> None:
    """Remove the first waiting request of an adapter."""
    adapter.tail = split(requests, adapter.tail, adapter.first_key + 1)[1]
    note_first(requests, adapter)


@njit(**CALLED)
def reverse_skipped(server: Record, requests: Record, adapters: Record, heaps: Record, end_key: int) -> None:
    """Put the requests with keys below `end_key` that found no slot before all others, in reverse order.

    They are first requests of adapters outside the batch (`FCFSRequestQueue.prepend_requests` of vLLM 0.10 to 0.13).
    """
    # With a free slot at its end, the walk has passed over no request.
    if server.active < server.slots or server.heap_sizes[IDLE] == 0:
        return
    idle, size = heaps[0], server.heap_sizes[IDLE]
    low = idle[0].key
    if low >= end_key:
        return
    high = low  # no other waiting request has a key between these two: it would have been admitted
    for i in range(size):
        adapter = adapters[idle[i].row]
        if adapter.first_key < end_key:
            high = max(high, last_key(requests, adapter.tail, end_key))
    for i in range(size):
        adapter = adapters[idle[i].row]
        if adapter.first_key < end_key:
            below, above = split(requests, adapter.tail, end_key)
            # Reflecting the keys in their own range reverses the order and keeps them distinct.
            requests[below - 1].key = low + high - requests[below - 1].key
            adapter.tail = join(requests, -below, above)
            note_first(requests, adapter)
    for i in range(size):  # all keys changed: build the heap again, one adapter after the other
        adapters[idle[i].row].place = i
        sift(idle, i + 1, adapters, i)
