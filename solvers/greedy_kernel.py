"""First fit with bisection, compiled: `packer.solvers.first_fit` question by question, for trees as judges.

The same questions in the same order, so that `FirstFit` is its oracle. Only the objective "gpus" on one GPU type
is known here: admissible means neither starved nor a memory error.

Numba notices changes of this file only: after one of packer.predictors.features_kernel, kernels or physics, or of
packer.twin.kernel_law, clear its cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.predictors.features_kernel import fill
from packer.predictors.kernels import walk_one
from packer.twin.kernel_state import FLAGS

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
NodeArray = npt.NDArray[np.uint32]

FIRST_GUESS = 32
ROUNDS = 4
GUESS_SLACK = 1.0 + 1e-9
"""As in `packer.solvers.first_fit` and `packer.solvers.top_up`."""


class Judge(NamedTuple):
    """A trained model and a fleet as arrays.

    fleet float64 (m, 8), law, paper, engine: see `packer.predictors.features_kernel.fill`; slot int64 (m,): number
    of the slot rank that holds the adapter; ranks float64 (r,): slot ranks; kv float64 (r, p + 1): KV tokens by
    slot rank and `max_loras`, of which a server needs min_kv; feature … bias: see
    `packer.predictors.ensemble.Ensemble`; outputs int64 (4,): which are starved, served share, mean TTFT and ITL;
    bases int64 (4,): the features that they correct; slope, offset: calibration of the log odds; largest: limit
    of a correction; load float64 (m,): tok/s; candidates int64: values of `max_loras`, the last one being also
    the most adapters of a server.
    """

    fleet: FloatArray
    law: FloatArray
    paper: bool
    engine: FloatArray
    slot: IntArray
    ranks: FloatArray
    kv: FloatArray
    min_kv: float
    feature: NodeArray
    threshold: Float32Array
    left: NodeArray
    roots: NodeArray
    depths: NodeArray
    starts: NodeArray
    bias: FloatArray
    outputs: IntArray
    bases: IntArray
    slope: float
    offset: float
    largest: float
    load: FloatArray
    candidates: IntArray


class Room(NamedTuple):
    """Room to work in: the bin asked about, its features, and what is known of it with other slots.

    adapters int64 and share float64 (ones), (p,): the bin; ends int64 (2,); one float64 (3, 1): slots, slot rank,
    KV tokens; row float64 (1, F); x float32 (F + 1,), its last −∞; options int64 (c,): slots to try; score float64
    (c, 4): feasible, then what is to be large; known int64 (c,): 0 not asked, 1 asked; asked int64 (c,): in which
    order; tally int64 (2,): how many were asked, and were feasible.
    """

    adapters: IntArray
    share: FloatArray
    ends: IntArray
    one: FloatArray
    row: FloatArray
    x: Float32Array
    options: IntArray
    score: FloatArray
    known: IntArray
    asked: IntArray
    tally: IntArray


@njit(**FLAGS)
def output(judge: Judge, x: Float32Array, k: int) -> float:
    """One output of the model for one question."""
    at = judge.outputs[k]
    total = walk_one(
        x, judge.feature, judge.threshold, judge.left, judge.roots, judge.depths,
        judge.starts[at], judge.starts[at + 1],
    )  # fmt: skip
    found: float = judge.bias[at] + total
    return found


@njit(**FLAGS)
def figure(judge: Judge, room: Room, k: int) -> float:
    """A figure: the feature that it corrects times the correction."""
    base = max(room.row[0, judge.bases[k]], 1e-3)
    correction = min(max(output(judge, room.x, k), -judge.largest), judge.largest)
    found: float = base * math.exp(correction)
    return found


@njit(**FLAGS)
def ask(judge: Judge, room: Room, n: int, slots: int, score: FloatArray) -> bool:
    """Whether the first `n` adapters in the room are feasible with so many slots; writes the score (4,)."""
    top = 0
    for j in range(n):
        top = max(top, judge.slot[room.adapters[j]])
    score[:] = 0.0
    kv = judge.kv[top, slots]
    if kv < judge.min_kv:
        return False
    room.ends[1] = n
    room.one[0, 0], room.one[1, 0], room.one[2, 0] = slots, judge.ranks[top], kv
    fill(
        room.ends, room.adapters, room.share, room.one[0], room.one[1], room.one[2], judge.fleet, judge.law,
        judge.paper, judge.engine, room.row,
    )  # fmt: skip
    for f in range(room.row.shape[1]):
        room.x[f] = room.row[0, f]
    odds = judge.slope * output(judge, room.x, 0) + judge.offset
    chance = 1.0 / (1.0 + math.exp(-min(max(odds, -50.0), 50.0)))
    if chance >= 0.5:
        score[1] = min(figure(judge, room, 1), 1.0)
        return False
    ttft, itl = figure(judge, room, 2), figure(judge, room, 3)
    score[0] = 1.0
    score[1] = -round(chance * 20.0) / 20.0
    score[2] = -(ttft + 100.0 * itl)
    score[3] = -ttft
    return True


@njit(**FLAGS)
def higher(score: FloatArray, a: int, b: int) -> int:
    """1 if row a is above row b, −1 if below, 0 if equal; the first entry that differs decides."""
    for c in range(score.shape[1]):
        if score[a, c] != score[b, c]:
            return 1 if score[a, c] > score[b, c] else -1
    return 0


@njit(**FLAGS)
def forget(room: Room, options: int) -> None:
    """Nothing is known of these options."""
    room.known[:options] = 0
    room.tally[:] = 0


@njit(**FLAGS)
def question(judge: Judge, room: Room, n: int, k: int) -> None:
    """Ask about option `k`, once."""
    if room.known[k]:
        return
    room.known[k] = 1
    room.asked[room.tally[0]] = k
    room.tally[0] += 1
    if ask(judge, room, n, room.options[k], room.score[k]):
        room.tally[1] += 1


@njit(**FLAGS)
def best_feasible(room: Room, options: int) -> int:
    """The feasible option of the highest score, the first of equals; −1 if there is none."""
    best = -1
    for k in range(options):
        if room.known[k] and room.score[k, 0] > 0.0 and (best < 0 or higher(room.score, k, best) > 0):
            best = k
    return best


@njit(**FLAGS)
def climb(judge: Judge, room: Room, n: int, options: int, start: int, until_feasible: bool) -> int:
    """Hill climbing over the options, both neighbours at once; the best feasible one on the way, or −1."""
    at = start
    question(judge, room, n, at)
    while not (until_feasible and room.tally[1] > 0):
        if at > 0:
            question(judge, room, n, at - 1)
        if at < options - 1:
            question(judge, room, n, at + 1)
        top = room.asked[0]
        for i in range(1, room.tally[0]):
            k = room.asked[i]
            order = higher(room.score, k, top)
            if order > 0 or (order == 0 and abs(k - start) < abs(top - start)):
                top = k
        if top == at:
            break
        at = top
    best: int = best_feasible(room, options)
    return best


@njit(**FLAGS)
def list_options(judge: Judge, room: Room, n: int, also: int) -> int:
    """Slots worth trying for `n` adapters, and `also` (0: nothing), ascending; how many."""
    found = 0
    for i in range(judge.candidates.size + 1):
        value = n
        if i < judge.candidates.size and judge.candidates[i] < n:
            value = judge.candidates[i]
        if also > 0 and also <= value:
            if also < value:
                room.options[found] = also
                found += 1
            also = 0
        room.options[found] = value
        found += 1
        if value == n:
            break
    if also > 0:
        room.options[found] = also
        found += 1
    return found


@njit(**FLAGS)
def feasible(judge: Judge, room: Room, n: int, hint: int, thorough: bool) -> int:
    """Slots with which the first `n` adapters in the room are feasible, 0 if there are none."""
    options = list_options(judge, room, n, 0)
    forget(room, options)
    if hint > 0:
        start = 0
        for k in range(1, options):
            if abs(room.options[k] - hint) < abs(room.options[start] - hint):
                start = k
        found = climb(judge, room, n, options, start, True)
        if found >= 0 or not thorough:
            return room.options[found] if found >= 0 else 0
    for k in range(options):
        question(judge, room, n, k)
    found = best_feasible(room, options)
    return room.options[found] if found >= 0 else 0


@njit(**FLAGS)
def best_slots(judge: Judge, room: Room, n: int, slots: int) -> int:
    """The slots that serve the first `n` adapters best, near those they have."""
    options = list_options(judge, room, n, slots)
    forget(room, options)
    start = 0
    while room.options[start] != slots:
        start += 1
    found = climb(judge, room, n, options, start, False)
    return room.options[found] if found >= 0 else slots


@njit(**FLAGS)
def next_size(low: int, high: int, limit: int, n: int, step: int, found: bool) -> int:
    """Where `packer.solvers.search.largest` asks next; it has a bracket once both ends have moved."""
    if low > 0 and high <= limit:
        return (low + high) // 2
    return min(low + step, high - 1) if found else max(high - step, low + 1)


@njit(**FLAGS)
def prefix(judge: Judge, room: Room, queue: IntArray, hint: int, guess: int, step: int) -> tuple[int, int]:
    """Adapters and slots of the largest feasible prefix of the queue; (0, 0) if there is none."""
    limit = min(queue.size, judge.candidates[-1])
    room.adapters[:limit] = queue[:limit]
    low, slots, high, n = 0, 0, limit + 1, min(guess, limit)
    while low < high - 1:
        found = feasible(judge, room, n, hint, high - low == 2)
        if found > 0:
            low, slots, hint = n, found, found
        else:
            high = n
        n = next_size(low, high, limit, n, step, found > 0)
        step *= 2
    return low, slots


@njit(**FLAGS)
def fits(judge: Judge, room: Room, held: int, slots: int, rest: IntArray, n: int) -> int:
    """Slots of the bin with `n` more adapters, or 0 if that is too much."""
    total = held + n
    if total > judge.candidates[-1]:
        return 0
    room.adapters[held:total] = rest[:n]
    chosen = total if slots == held else slots
    return chosen if ask(judge, room, total, chosen, room.score[0]) else 0


@njit(**FLAGS)
def first_fitting(judge: Judge, room: Room, held: int, slots: int, rest: IntArray) -> int:
    """Position of the heaviest single adapter that fits, in a list sorted by falling load; −1 if none does."""
    low, high = 0, rest.size - 1
    if fits(judge, room, held, slots, rest[high:], 1) == 0:
        return -1
    while low < high:
        middle = (low + high) // 2
        if fits(judge, room, held, slots, rest[middle:], 1) > 0:
            high = middle
        else:
            low = middle + 1
    return high


@njit(**FLAGS)
def grow(judge: Judge, room: Room, held: int, slots: int, rest: IntArray) -> tuple[int, int]:
    """How many of the first adapters of the list fit, and the slots then."""
    limit = rest.size
    low, best, high, n, step = 0, slots, limit + 1, 1, 1
    while low < high - 1:
        found = fits(judge, room, held, slots, rest, n)
        if found > 0:
            low, best = n, found
        else:
            high = n
        n = next_size(low, high, limit, n, step, found > 0)
        step *= 2
    room.adapters[held : held + low] = rest[:low]
    return low, best


@njit(**FLAGS)
def top_up(judge: Judge, room: Room, held: int, slots: int, rest: IntArray) -> tuple[int, int]:
    """The bin in the room with adapters of `rest` (by falling load) added: how many it holds, and its slots."""
    for _ in range(ROUNDS):
        first = first_fitting(judge, room, held, slots, rest)
        if first < 0:
            break
        rest = rest[first:]
        more, slots = grow(judge, room, held, slots, rest)
        held += more
        rest = rest[more:]
        if rest.size == 0:
            break
    return held, slots


@njit(**FLAGS)
def first_guess(judge: Judge, queue: IntArray, target: float) -> tuple[int, int]:
    """How many adapters carry the load of the latest GPU, and how far to step from there."""
    limit = min(queue.size, judge.candidates[-1])
    if target < 0.0:
        return min(FIRST_GUESS, limit), FIRST_GUESS
    total, guess = 0.0, 0
    while guess < limit:
        total += judge.load[queue[guess]]
        if total > target * GUESS_SLACK:
            break
        guess += 1
    guess = max(1, guess)
    return guess, max(1, guess // 16)


@njit(**FLAGS)
def first_fit(
    judge: Judge, room: Room, order: IntArray, falling: IntArray, placed: IntArray, ends: IntArray,
    slots: IntArray, left: IntArray,
) -> tuple[int, int]:  # fmt: skip
    """Pack a fleet in the given order; `falling`: all adapters by falling load, then by number.

    Writes int64 (m,) each: `placed`, the adapters bin after bin; `ends`, where each bin ends in it; `slots` of
    each bin; `left`, adapters that an empty GPU can't serve. Returns the numbers of bins and of those left.
    """
    waiting = np.ones(order.size, dtype=np.bool_)
    queue = order.copy()
    rest = falling.copy()
    bins, n_left, done = 0, 0, 0
    hint, target = 0, -1.0
    while queue.size > 0:
        guess, step = first_guess(judge, queue, target)
        held, chosen = prefix(judge, room, queue, hint, guess, step)
        if held == 0:
            left[n_left] = queue[0]
            n_left += 1
            waiting[queue[0]] = False
            queue = queue[1:]
            continue
        waiting[queue[:held]] = False
        room.adapters[:held] = queue[:held]
        queue, rest = queue[held:], rest[waiting[rest]]
        if queue.size > 0 and judge.load[rest[-1]] < judge.load[queue[0]]:
            held, chosen = top_up(judge, room, held, chosen, rest)
            waiting[room.adapters[:held]] = False
            queue, rest = queue[waiting[queue]], rest[waiting[rest]]
        chosen = best_slots(judge, room, held, chosen)
        placed[done : done + held] = room.adapters[:held]
        done += held
        ends[bins], slots[bins] = done, chosen
        bins += 1
        hint = chosen
        target = 0.0
        for j in range(held):
            target += judge.load[room.adapters[j]]
    return bins, n_left
