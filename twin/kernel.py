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

import numpy as np
from numba import njit

from packer.twin.kernel_state import (
    HEAP_FLAGS,
    count_before,
    fenwick_add,
    heap_pop,
    heap_push,
    heap_update,
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


@njit(inline="always", **FLAGS)
def linear_ms(c, b, p, a, ranks, slots, context, scanned, graph_max):
    """The linear step law, ms; see packer.twin.latency."""
    t = b + p
    ms = c[0] + c[1] * b + c[2] * p + c[5] * a + c[6] * ranks + c[9] * a * t + c[10] * a * p + c[12] * context
    if p > 0:
        ms += c[3]
    if a > 0:
        ms += c[4] + c[7] * slots + (c[8] + c[11] * slots) * t
    if t > graph_max:
        ms += c[13] + c[14] * (t - graph_max)
    return ms + c[15] * scanned


@njit(inline="always", **FLAGS)
def paper_ms(c, b, pending, a, n_adapters):
    """The paper's step law, ms: arXiv 2602.24044, equation (1)."""
    return c[0] * b + c[1] * pending + c[2] * pending * a / n_adapters + (c[3] * b + c[4]) * (c[5] * a + c[6])


@njit(**FLAGS)
def run(
    arrive_s, adapter_of, prompt, output, ranks, adapter_blocks,
    c, paper_form, graph_max, loading, duration_s, slots, kv_blocks, block_size, token_budget, max_seqs,
    max_outstanding, max_cpu_loras, bin_s,
):  # fmt: skip
    """Simulate one server.

    Arrays: arrive_s float64 (n,) sorted; adapter_of, prompt, output int64 (n,); ranks int64 (m,);
    adapter_blocks int64 (m,): KV blocks that a resident adapter takes (unified policy; else 0); c float64: step law;
    loading float64 (4,): ms from host (base, per rank) and from disk (base, per rank).

    Returns (first_s, finish_s: float64 (n,), NaN where it did not happen; state int8 (n,): 0 not arrived, 1 waiting,
    2 prefilling, 3 decoding, 4 finished, 5 refused; totals float64 (N_TOTALS,); histogram of gaps between tokens,
    int64 (HISTOGRAM_BINS,); timeline float64 (bins, N_TIMELINE)).
    """
    n, m = arrive_s.size, ranks.size
    first_s = np.full(n, np.nan)
    finish_s = np.full(n, np.nan)
    last_s = np.zeros(n)                      # end of the step of the last token before a preemption
    state = np.zeros(n, np.int8)
    generated = np.zeros(n, np.int64)         # output tokens before the current prefill
    start_step = np.zeros(n, np.int64)        # step in which the current prefill ended
    context0 = np.zeros(n, np.int64)          # tokens of the current prefill
    key = np.zeros(n, np.int64)               # place in the queue: arrival order; preempted ones below 0
    behind = np.full(n, -1, np.int64)         # next in the adapter's FIFO
    older = np.full(n, -1, np.int64)
    newer = np.full(n, -1, np.int64)
    due_next = np.full(n, -1, np.int64)
    due_prev = np.full(n, -1, np.int64)
    ring = 2
    for i in range(n):
        ring = max(ring, output[i] + 2)
    due = np.full(ring, -1, np.int64)
    phase = np.zeros(block_size, np.int64)
    youngest = -1

    head = np.full(m, -1, np.int64)
    tail = np.full(m, -1, np.int64)
    in_batch = np.zeros(m, np.int64)          # running requests of each adapter
    resident = np.zeros(m, np.bool_)
    idle_prev = np.full(m, -1, np.int64)      # resident adapters outside the batch, least recently used first
    idle_next = np.full(m, -1, np.int64)
    idle_first, idle_last, n_resident = -1, -1, 0
    cpu_resident = np.zeros(m, np.bool_)
    cpu_used = np.zeros(m, np.int64)
    n_cpu = 0
    all_on_host = max_cpu_loras >= m
    first_key = np.zeros(m, np.int64)
    heap_place = np.full(m, -1, np.int64)
    heap_active = np.zeros(m, np.int64)
    heap_idle = np.zeros(m, np.int64)
    size_active, size_idle = 0, 0
    tree = np.zeros(n + 1 if c[15] > 0.0 and not paper_form else 1, np.int64)   # waiting requests by arrival order

    totals = np.zeros(N_TOTALS)
    histogram = np.zeros(HISTOGRAM_BINS, np.int64)
    n_bins = int(math.ceil(duration_s / bin_s))
    timeline = np.zeros((n_bins, N_TIMELINE))

    now, step, arrived = 0.0, 0, 0
    waiting, decodes, running, active, active_ranks = 0, 0, 0, 0, 0
    used, context, outstanding, front = 0, 0, 0, 0
    partial, partial_done = -1, 0             # the one request whose prefill is cut by the budget

    while now < duration_s:
        # ---- arrivals up to now; an idle engine jumps to the next one
        if running == 0 and waiting == 0:
            if arrived >= n or arrive_s[arrived] >= duration_s:
                break
            now = max(now, arrive_s[arrived])
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
            chunk = min(context0[partial] - partial_done, budget)
            held = -(-partial_done // block_size)
            growth += -(-(partial_done + chunk) // block_size) - held
        preempted = 0
        while used + growth > kv_blocks:
            if idle_first >= 0 and adapter_blocks[idle_first] > 0:
                a = idle_first                # unified policy: idle adapters leave before requests do
                idle_first = idle_next[a]
                if idle_first >= 0:
                    idle_prev[idle_first] = -1
                else:
                    idle_last = -1
                resident[a] = False
                n_resident -= 1
                used -= adapter_blocks[a]
                continue
            r = youngest
            youngest = older[r]
            if youngest >= 0:
                newer[youngest] = -1
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
                p, q = due_prev[r], due_next[r]
                if p >= 0:
                    due_next[p] = q
                else:
                    due[(start_step[r] + output[r] - generated[r] + step - start_step[r] - 1) % ring] = q
                if q >= 0:
                    due_prev[q] = p
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
                idle_prev[a] = idle_last
                idle_next[a] = -1
                if idle_last >= 0:
                    idle_next[idle_last] = a
                else:
                    idle_first = a
                idle_last = a
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
                take = min(tokens, budget)
                blocks = -(-take // block_size)
                if not resident[a]:
                    blocks += adapter_blocks[a]
                while used + blocks > kv_blocks and idle_first >= 0 and adapter_blocks[idle_first] > 0:
                    e = idle_first
                    if e == a:
                        e = idle_next[a]
                        if e < 0:
                            break
                    p, q = idle_prev[e], idle_next[e]
                    if p >= 0:
                        idle_next[p] = q
                    else:
                        idle_first = q
                    if q >= 0:
                        idle_prev[q] = p
                    else:
                        idle_last = p
                    resident[e] = False
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
                    if resident[a]:           # leaves the idle list
                        p, q = idle_prev[a], idle_next[a]
                        if p >= 0:
                            idle_next[p] = q
                        else:
                            idle_first = q
                        if q >= 0:
                            idle_prev[q] = p
                        else:
                            idle_last = p
                    else:                     # takes a free slot, or that of the least recently used
                        if n_resident == slots:
                            e = idle_first
                            idle_first = idle_next[e]
                            if idle_first >= 0:
                                idle_prev[idle_first] = -1
                            else:
                                idle_last = -1
                            resident[e] = False
                            n_resident -= 1
                            used -= adapter_blocks[e]
                        resident[a] = True
                        n_resident += 1
                        totals[HOST_LOADS] += 1
                        load_ms += loading[0] + loading[1] * ranks[a]
                        if not all_on_host:
                            if not cpu_resident[a]:
                                if n_cpu == max_cpu_loras:
                                    e = -1
                                    for i in range(m):
                                        if cpu_resident[i] and in_batch[i] == 0 and (e < 0 or cpu_used[i] < cpu_used[e]):
                                            e = i
                                    if e >= 0:
                                        cpu_resident[e] = False
                                        n_cpu -= 1
                                cpu_resident[a] = True
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
                older[r] = youngest
                newer[r] = -1
                if youngest >= 0:
                    newer[youngest] = r
                youngest = r
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
                c, batch_decodes, prefill_tokens, active, active_ranks, slots, context, scanned, graph_max
            )
        dt = max((ms + load_ms) * 1e-3, MIN_STEP_S)
        bin_ = min(int(now / bin_s), n_bins - 1)
        now += dt
        row = timeline[bin_]
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
        totals[PEAK_BLOCKS] = max(totals[PEAK_BLOCKS], used)
        totals[PEAK_RUNNING] = max(totals[PEAK_RUNNING], running)
        if now > duration_s:                  # the run is over before this step's tokens come out
            step += 1
            break
        if batch_decodes > 0:
            slot = int(math.log(dt * 1e3 / HISTOGRAM_FLOOR_MS) * HISTOGRAM_PER_E)
            histogram[min(max(slot, 0), HISTOGRAM_BINS - 1)] += batch_decodes

        # ---- tokens come out: prefills that ended start to decode, due decodes finish
        while ended_first >= 0:
            r = ended_first
            ended_first = behind[r]
            behind[r] = -1
            if generated[r] == 0:
                first_s[r] = now
            else:
                slot = int(math.log((now - last_s[r]) * 1e3 / HISTOGRAM_FLOOR_MS) * HISTOGRAM_PER_E)
                histogram[min(max(slot, 0), HISTOGRAM_BINS - 1)] += 1
            start_step[r] = step
            state[r] = 3
            decodes += 1
            context += context0[r]
            phase[(step + 1 - context0[r]) % block_size] += 1
            place = (step + output[r] - generated[r] - 1) % ring
            due_prev[r] = -1
            due_next[r] = due[place]
            if due[place] >= 0:
                due_prev[due[place]] = r
            due[place] = r
        r = due[step % ring]
        due[step % ring] = -1
        while r >= 0:
            a = adapter_of[r]
            finish_s[r] = now
            state[r] = 4
            size = context0[r] + step - start_step[r]
            used -= -(-size // block_size)
            context -= size
            phase[(start_step[r] + 1 - context0[r]) % block_size] -= 1
            p, q = older[r], newer[r]
            if p >= 0:
                newer[p] = q
            if q >= 0:
                older[q] = p
            else:
                youngest = p
            decodes -= 1
            running -= 1
            outstanding -= 1
            in_batch[a] -= 1
            cpu_used[a] = step
            if in_batch[a] == 0:
                active -= 1
                active_ranks -= ranks[a]
                idle_prev[a] = idle_last
                idle_next[a] = -1
                if idle_last >= 0:
                    idle_next[idle_last] = a
                else:
                    idle_first = a
                idle_last = a
                if head[a] >= 0:
                    size_active = heap_pop(heap_active, size_active, heap_place, first_key, heap_place[a])
                    size_idle = heap_push(heap_idle, size_idle, heap_place, first_key, a)
            r = due_next[r]
        step += 1

    totals[STEPS] = step
    totals[LEFT_RUNNING] = running
    totals[LEFT_WAITING] = waiting
    while arrived < n and arrive_s[arrived] < duration_s:     # came during the last step
        arrived += 1
        totals[SENT] += 1
    return first_s, finish_s, state, totals, histogram, timeline
