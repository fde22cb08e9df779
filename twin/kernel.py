"""The step loop of one vLLM V1 engine with LoRA adapters, compiled by Numba.

Work per step does not grow with the batch. A running decode is never touched one by one: it sits in the bucket of
the step in which it will finish (`due`), in a counter of the step phase in which it takes its next KV block
(`phase`), and in the list of running requests by admission (`older`, `newer`), from whose young end vLLM preempts.
Waiting requests form one FIFO per adapter; adapters with waiting requests sit in one of two heaps by the arrival
order of their first request: those active in the batch, and the others. `tests/naive_twin.py` is the slow oracle.

Scheduling follows vllm/v1/core/sched/scheduler.py (`Scheduler.schedule`), slots vllm/lora/worker_manager.py.
"""

from __future__ import annotations

import math

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.twin.kernel_state import (
    HEAP_FLAGS,
    count_before,
    fenwick_add,
    heap_pop,
    heap_push,
    heap_update,
    link_last,
    unlink,
)

FLAGS = HEAP_FLAGS
HISTOGRAM_BINS = 2400
HISTOGRAM_FLOOR_MS = 0.01
HISTOGRAM_PER_E = 140.0          # bins per factor e: a resolution of 0.7 %
MIN_STEP_S = 5e-5                # no engine steps faster; keeps a zero step law from never ending

# Rows of the totals.
(STEPS, PREEMPTIONS, HOST_LOADS, DISK_LOADS, REFUSED, SENT, BUSY_S, LOAD_S, PEAK_BLOCKS, PEAK_RUNNING, GAPS,
 LEFT_RUNNING, LEFT_WAITING) = range(13)  # fmt: skip
N_TOTALS = 13
# Columns of the timeline: integrals over each bin, except the last two, which are counts.
(T_BUSY, T_RUNNING, T_WAITING, T_KV, T_ADAPTERS, T_PREFILL, T_DECODE, T_PREEMPTED) = range(8)
N_TIMELINE = 8


@njit(**FLAGS)
def linear_ms(c, b, p, a, ranks, slots, slot_rank, context, scanned, graph_max):
    """The linear step law, ms; see packer.twin.latency."""
    t = b + p
    ms = c[0] + c[1] * b + c[2] * p + c[5] * a + c[6] * ranks + c[10] * a * t + c[11] * a * p + c[13] * context
    if p > 0:
        ms += c[3]
    if a > 0:
        ms += c[4] + c[7] * slots + c[8] * slot_rank + (c[9] + c[12] * slots + c[17] * slot_rank) * t
    if t > graph_max:
        ms += c[14] + c[15] * (t - graph_max)
    return ms + c[16] * scanned


@njit(**FLAGS)
def paper_ms(c, b, pending, a, n_adapters):
    """The paper's step law, ms: arXiv 2602.24044, equation (1)."""
    return c[0] * b + c[1] * pending + c[2] * pending * a / n_adapters + (c[3] * b + c[4]) * (c[5] * a + c[6])


@njit(**FLAGS)
def gap_bin(gap_s):
    """Bin of the histogram that a gap between tokens falls into."""
    k = int(math.log(gap_s * (1e3 / HISTOGRAM_FLOOR_MS)) * HISTOGRAM_PER_E)
    return 0 if k < 0 else (HISTOGRAM_BINS - 1 if k >= HISTOGRAM_BINS else k)


@njit(**FLAGS)
def run(
    arrive_s, adapter_of, prompt, output, ranks, adapter_blocks,
    c, paper_form, graph_max, loading, duration_s, slots, slot_rank, kv_blocks, block_size, token_budget, max_seqs,
    max_outstanding, max_cpu_loras, cold_start, bin_s,
    times, counts, links, per_adapter, adapter_links, state, due, phase, tree, totals, histogram, timeline,
):  # fmt: skip
    """Simulate one server; writes into the arrays of `new_state`.

    Arrays: arrive_s float64 (n,) sorted; adapter_of, prompt, output int64 (n,); ranks int64 (m,);
    adapter_blocks int64 (m,): KV blocks that a resident adapter takes (unified policy; else 0); c float64: step law;
    loading float64 (4,): ms from host (base, per rank) and from disk (base, per rank).
    """
    n, m = arrive_s.size, ranks.size
    first_s, finish_s, last_s = times[0], times[1], times[2]
    generated, start_step, context0, key = counts[0], counts[1], counts[2], counts[3]
    behind, older, newer = links[0], links[1], links[2]
    due_prev, due_next = due[0], due[1]
    in_batch, resident, cpu_resident, cpu_used, first_key, heap_active, heap_idle = (
        per_adapter[0], per_adapter[1], per_adapter[2], per_adapter[3], per_adapter[4], per_adapter[5], per_adapter[6]
    )  # fmt: skip
    head, tail, heap_place, idle_prev, idle_next = (
        adapter_links[0], adapter_links[1], adapter_links[2], adapter_links[3], adapter_links[4]
    )  # fmt: skip
    ring = due_prev.size - n
    n_resident, n_cpu = 0, 0
    all_on_host = max_cpu_loras >= m and not cold_start
    size_active, size_idle = 0, 0

    now, step, arrived = 0.0, 0, 0
    waiting, decodes, running, active, active_ranks = 0, 0, 0, 0, 0
    used, context, outstanding, front = 0, 0, 0, 0
    partial, partial_done = -1, 0             # the one request whose prefill is cut by the budget

    while now < duration_s:
        # ---- arrivals up to now; an idle engine jumps to the next one
        if running == 0 and waiting == 0:
            if arrived >= n or arrive_s[arrived] >= duration_s:
                break
            if arrive_s[arrived] > now:
                now = arrive_s[arrived]
        while arrived < n and arrive_s[arrived] <= now:
            r = arrived
            arrived += 1
            totals[SENT] += 1
            if outstanding >= max_outstanding:
                state[r] = 5
                totals[REFUSED] += 1
                continue
            outstanding += 1
            waiting += 1
            state[r] = 1
            key[r] = r
            if tree.size > 1:
                fenwick_add(tree, r, 1)
            a = adapter_of[r]
            if head[a] < 0:
                head[a] = r
                tail[a] = r
                first_key[a] = r
                if in_batch[a] > 0:
                    size_active = heap_push(heap_active, size_active, heap_place, first_key, a)
                else:
                    size_idle = heap_push(heap_idle, size_idle, heap_place, first_key, a)
            else:
                behind[tail[a]] = r
                tail[a] = r

        # ---- running requests first: one token each, the next chunk of a cut prefill; preempt if blocks lack
        budget = token_budget - decodes
        chunk = 0
        growth = phase[step % block_size]
        held = 0
        if partial >= 0:
            chunk = context0[partial] - partial_done
            if chunk > budget:
                chunk = budget
            held = -(-partial_done // block_size)
            growth += -(-(partial_done + chunk) // block_size) - held
        preempted = 0
        while used + growth > kv_blocks:
            if idle_next[m] < m and adapter_blocks[idle_next[m]] > 0:
                a = idle_next[m]              # unified policy: idle adapters leave before requests do
                unlink(idle_prev, idle_next, a)
                resident[a] = 0
                n_resident -= 1
                used -= adapter_blocks[a]
                continue
            r = older[n]                      # the latest admitted
            unlink(older, newer, r)
            a = adapter_of[r]
            if r == partial:
                growth -= -(-(partial_done + chunk) // block_size) - held
                used -= held
                partial, partial_done, chunk = -1, 0, 0
            else:
                before = context0[r] + step - 1 - start_step[r]
                used -= -(-before // block_size)
                context -= before
                own = (start_step[r] + 1 - context0[r]) % block_size
                phase[own] -= 1
                if own == step % block_size:
                    growth -= 1
                generated[r] += step - start_step[r]
                last_s[r] = now
                decodes -= 1
                unlink(due_prev, due_next, r)
            running -= 1
            preempted += 1
            in_batch[a] -= 1
            cpu_used[a] = step
            front -= 1
            key[r] = front
            state[r] = 1
            waiting += 1
            behind[r] = head[a]
            was_waiting = head[a] >= 0
            head[a] = r
            if not was_waiting:
                tail[a] = r
            first_key[a] = front
            if in_batch[a] == 0:
                active -= 1
                active_ranks -= ranks[a]
                link_last(idle_prev, idle_next, m, a)
                if was_waiting:
                    size_active = heap_pop(heap_active, size_active, heap_place, first_key, heap_place[a])
                size_idle = heap_push(heap_idle, size_idle, heap_place, first_key, a)
            elif was_waiting:
                heap_update(heap_active, size_active, heap_place, first_key, heap_place[a])
            else:
                size_active = heap_push(heap_active, size_active, heap_place, first_key, a)
        used += growth
        budget = token_budget - decodes - chunk
        prefill_tokens = chunk
        batch_decodes = decodes
        context += decodes
        ended_first = -1                      # requests whose prefill ends in this step, linked by `behind`
        if partial >= 0:
            partial_done += chunk
            if partial_done == context0[partial]:
                behind[partial] = ended_first
                ended_first = partial
                partial, partial_done = -1, 0

        # ---- waiting requests in order of arrival, passing over those whose adapter finds no slot
        load_ms = 0.0
        scanned, last_key = 0, -1
        if preempted == 0:
            while budget > 0 and running < max_seqs and partial < 0:
                a = -1
                if size_active > 0:
                    a = heap_active[0]
                if size_idle > 0 and active < slots and (a < 0 or first_key[heap_idle[0]] < first_key[a]):
                    a = heap_idle[0]
                if a < 0:
                    scanned = waiting         # all of them were looked at, none fits a slot
                    last_key = -1
                    break
                r = head[a]
                tokens = prompt[r] + generated[r]
                take = tokens if tokens < budget else budget
                blocks = -(-take // block_size)
                if resident[a] == 0:
                    blocks += adapter_blocks[a]
                while used + blocks > kv_blocks:
                    e = idle_next[m]
                    if e == a:
                        e = idle_next[a]
                    if e == m or adapter_blocks[e] == 0:
                        break
                    unlink(idle_prev, idle_next, e)
                    resident[e] = 0
                    n_resident -= 1
                    used -= adapter_blocks[e]
                last_key = key[r]
                if used + blocks > kv_blocks:
                    break
                # admit r
                used += blocks
                head[a] = behind[r]
                if head[a] >= 0:
                    first_key[a] = key[head[a]]
                waiting -= 1
                if tree.size > 1 and key[r] >= 0:
                    fenwick_add(tree, key[r], -1)
                if in_batch[a] == 0:
                    size_idle = heap_pop(heap_idle, size_idle, heap_place, first_key, heap_place[a])
                    if head[a] >= 0:
                        size_active = heap_push(heap_active, size_active, heap_place, first_key, a)
                    active += 1
                    active_ranks += ranks[a]
                    if resident[a] == 1:
                        unlink(idle_prev, idle_next, a)
                    else:                     # takes a free slot, or that of the least recently used
                        if n_resident == slots:
                            e = idle_next[m]
                            unlink(idle_prev, idle_next, e)
                            resident[e] = 0
                            n_resident -= 1
                            used -= adapter_blocks[e]
                        resident[a] = 1
                        n_resident += 1
                        totals[HOST_LOADS] += 1
                        load_ms += loading[0] + loading[1] * ranks[a]
                        if not all_on_host:
                            if cpu_resident[a] == 0:
                                if n_cpu == max_cpu_loras:
                                    e = -1
                                    for i in range(m):
                                        if cpu_resident[i] == 1 and in_batch[i] == 0 and (e < 0 or cpu_used[i] < cpu_used[e]):
                                            e = i
                                    if e >= 0:
                                        cpu_resident[e] = 0
                                        n_cpu -= 1
                                cpu_resident[a] = 1
                                n_cpu += 1
                                totals[DISK_LOADS] += 1
                                load_ms += loading[2] + loading[3] * ranks[a]
                            cpu_used[a] = step
                elif head[a] >= 0:
                    heap_update(heap_active, size_active, heap_place, first_key, heap_place[a])
                else:
                    size_active = heap_pop(heap_active, size_active, heap_place, first_key, heap_place[a])
                in_batch[a] += 1
                running += 1
                link_last(older, newer, n, r)
                state[r] = 2
                context0[r] = tokens
                budget -= take
                prefill_tokens += take
                if take < tokens:
                    partial, partial_done = r, take
                else:
                    behind[r] = ended_first
                    ended_first = r

            if last_key > 0 and tree.size > 1 and size_idle > 0 and active >= slots:
                scanned = count_before(tree, last_key)

        # ---- the step itself
        if paper_form:
            ms = paper_ms(c, batch_decodes, waiting, active, m)
        else:
            ms = linear_ms(
                c, batch_decodes, prefill_tokens, active, active_ranks, slots, slot_rank, context, scanned, graph_max
            )
        dt = (ms + load_ms) * 1e-3
        if dt < MIN_STEP_S:
            dt = MIN_STEP_S
        row = timeline[int(now / bin_s)]
        now += dt
        row[T_BUSY] += dt
        row[T_RUNNING] += dt * running
        row[T_WAITING] += dt * waiting
        row[T_KV] += dt * used
        row[T_ADAPTERS] += dt * active
        row[T_PREFILL] += prefill_tokens
        row[T_DECODE] += batch_decodes
        row[T_PREEMPTED] += preempted
        totals[BUSY_S] += dt
        totals[LOAD_S] += load_ms * 1e-3
        totals[PREEMPTIONS] += preempted
        if used > totals[PEAK_BLOCKS]:
            totals[PEAK_BLOCKS] = used
        if running > totals[PEAK_RUNNING]:
            totals[PEAK_RUNNING] = running
        if now > duration_s:                  # the run is over before this step's tokens come out
            step += 1
            break
        if batch_decodes > 0:
            histogram[gap_bin(dt)] += batch_decodes

        # ---- tokens come out: prefills that ended start to decode, due decodes finish
        while ended_first >= 0:
            r = ended_first
            ended_first = behind[r]
            behind[r] = -1
            if generated[r] == 0:
                first_s[r] = now
            else:
                histogram[gap_bin(now - last_s[r])] += 1
            start_step[r] = step
            state[r] = 3
            decodes += 1
            context += context0[r]
            phase[(step + 1 - context0[r]) % block_size] += 1
            link_last(due_prev, due_next, n + (step + output[r] - generated[r] - 1) % ring, r)
        bucket = n + step % ring
        while due_next[bucket] != bucket:
            r = due_next[bucket]
            unlink(due_prev, due_next, r)
            a = adapter_of[r]
            finish_s[r] = now
            state[r] = 4
            size = context0[r] + step - start_step[r]
            used -= -(-size // block_size)
            context -= size
            phase[(start_step[r] + 1 - context0[r]) % block_size] -= 1
            unlink(older, newer, r)
            decodes -= 1
            running -= 1
            outstanding -= 1
            in_batch[a] -= 1
            cpu_used[a] = step
            if in_batch[a] == 0:
                active -= 1
                active_ranks -= ranks[a]
                link_last(idle_prev, idle_next, m, a)
                if head[a] >= 0:
                    size_active = heap_pop(heap_active, size_active, heap_place, first_key, heap_place[a])
                    size_idle = heap_push(heap_idle, size_idle, heap_place, first_key, a)
        step += 1

    totals[STEPS] = step
    totals[LEFT_RUNNING] = running
    totals[LEFT_WAITING] = waiting
    while arrived < n and arrive_s[arrived] < duration_s:     # came during the last step
        arrived += 1
        totals[SENT] += 1


class State(NamedTuple):
    """Arrays that the kernel works in, in the order of its arguments.

    times (3, n): first token, finish (NaN where it did not happen), last token before a preemption, s. state (n,):
    0 not arrived, 1 waiting, 2 prefilling, 3 decoding, 4 finished, 5 refused. The lists are doubly linked rings
    around a sentinel: running requests by admission, resident adapters outside the batch by last use, and for each
    of the coming steps the requests that finish in it.
    """

    times: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    links: npt.NDArray[np.int64]
    per_adapter: npt.NDArray[np.int64]
    adapter_links: npt.NDArray[np.int64]
    state: npt.NDArray[np.int8]
    due: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    tree: npt.NDArray[np.int64]
    totals: npt.NDArray[np.float64]
    histogram: npt.NDArray[np.int64]
    timeline: npt.NDArray[np.float64]


def new_state(
    n: int, m: int, longest_output: int, block_size: int, bins: int, *, count_waiting: bool
) -> State:
    """Arrays for n requests of m adapters. `count_waiting`: the step law needs the requests passed over.

    They are made here and not in the kernel because that halves its compilation time.
    """
    due = np.empty((2, n + longest_output + 2), dtype=np.int64)
    due[:, n:] = np.arange(n, due.shape[1])
    links = np.empty((3, n + 1), dtype=np.int64)
    links[0] = -1
    links[1:, n] = n
    adapter_links = np.full((5, m + 1), -1, dtype=np.int64)
    adapter_links[3:, m] = m
    times = np.full((3, n), np.nan)
    counts = np.empty((4, n), dtype=np.int64)
    counts[0] = 0
    return State(
        times,
        counts,
        links,
        np.zeros((7, m), dtype=np.int64),
        adapter_links,
        np.zeros(n, dtype=np.int8),
        due,
        np.zeros(block_size, dtype=np.int64),
        np.zeros(n + 1 if count_waiting else 1, dtype=np.int64),
        np.zeros(N_TOTALS),
        np.zeros(HISTOGRAM_BINS, dtype=np.int64),
        np.zeros((bins, N_TIMELINE)),
    )
