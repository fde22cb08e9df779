"""The step loop of one vLLM V1 engine with LoRA adapters, compiled by Numba.

Work per step does not grow with the batch. A running decode is never touched one by one: it sits in the
bucket of the step in which it will finish (`due`), in a counter of the step phase in which it takes its next
KV block (`phase`), and in the list of running requests by admission (`older`, `newer`), from whose young end
vLLM preempts. Waiting requests form one FIFO per adapter; adapters with waiting requests sit in one of two
heaps by the arrival order of their first request: those active in the batch, and the others. Refused requests
leave only a count. `tests/oracles/naive_twin.py` is the slow oracle.

Scheduling follows vllm/v1/core/sched/scheduler.py (`Scheduler.schedule`), slots vllm/lora/worker_manager.py.
Numba notices changes of this file only: after one of kernel_state.py or kernel_law.py clear its cache.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from packer.twin.kernel_law import PER_WAITING, add_means, gap_bin, linear_ms, paper_ms
from packer.twin.kernel_state import (
    ADAPTER_LOADS, BUSY_S, CONTEXT, DISK_LOADS, EXHAUSTED, FINISH, FIRST, FLAGS, GENERATED, KEY, LAST,
    LEFT_RUNNING, LEFT_WAITING, LOAD_S, NEXT, OUTPUT, OWNER, PEAK_BLOCKS, PEAK_RUNNING, PREEMPTIONS,
    PROMPT, REFUSED, SENT, SENT_AT, START, STEPS, T_ADAPTERS, T_BUSY, T_DECODE, T_KV, T_PREEMPTED,
    T_PREFILL, T_RUNNING, T_WAITING, TAKEN, FloatArray, IntArray, count_before,
    fenwick_add, heap_pop, heap_push, heap_update, link_last, unlink,
)  # fmt: skip

MIN_STEP_S = 5e-5  # no engine steps faster; keeps a zero step law from never ending


@njit(**FLAGS)
def run(
    arrive_s: FloatArray, owner: IntArray, prompt: IntArray, output: IntArray, marks_wait: bool,
    ranks: IntArray, adapter_blocks: IntArray, c: FloatArray, paper_form: bool, graph_max: float,
    loading: FloatArray, duration_s: float, slots: int, slot_rank: int, kv_blocks: int, block_size: int,
    token_budget: int, max_seqs: int, max_outstanding: int, max_cpu_loras: int, cold_start: bool,
    bin_s: float, times: FloatArray, req: IntArray, finished: npt.NDArray[np.int8], refused: IntArray,
    links: IntArray, due: IntArray, adapters: IntArray, adapter_links: IntArray, phase: IntArray,
    tree: IntArray, totals: FloatArray, histogram: IntArray, timeline: FloatArray,
    means: FloatArray,
) -> None:  # fmt: skip
    """Simulate one server; writes into the arrays of `new_state`.

    arrive_s float64 (n,): sorted, all < duration_s. owner, prompt, output int64: the marks, adapter and
    lengths of a request. `marks_wait` False: one mark per arrival. True: the i-th mark is that of the i-th
    request accepted, so that marks that are independent of the times need not be drawn for refused requests;
    where there are too few of them the run ends with totals[EXHAUSTED] = 1. ranks int64 (m,); adapter_blocks
    int64 (m,): KV blocks that a resident adapter takes (unified policy; else 0); c float64: step law; loading
    (4,): ms from host (base, per rank) and from disk (base, per rank).
    """
    n, m, capacity = arrive_s.size, ranks.size, times.shape[0]
    older, newer = links[0], links[1]
    due_prev, due_next = due[0], due[1]
    in_batch, resident, cpu_resident, cpu_used, first_key, heap_active, heap_idle = (
        adapters[0], adapters[1], adapters[2], adapters[3], adapters[4], adapters[5], adapters[6]
    )  # fmt: skip
    head, tail, heap_place, idle_prev, idle_next = (
        adapter_links[0], adapter_links[1], adapter_links[2], adapter_links[3], adapter_links[4]
    )  # fmt: skip
    ring = due_prev.size - capacity
    counting = tree.size > 1
    n_resident, n_cpu = 0, 0
    all_on_host = max_cpu_loras >= m and not cold_start
    size_active, size_idle = 0, 0

    now, step, arrived, taken = 0.0, 0, 0, 0
    waiting, decodes, running, active, active_ranks = 0, 0, 0, 0, 0
    used, context, front = 0, 0, 0
    partial, partial_done = -1, 0  # the one request whose prefill is cut by the budget

    while True:
        # ---- arrivals up to now; an idle engine jumps to the next one
        if running == 0 and waiting == 0:
            if arrived >= n:
                break
            if arrive_s[arrived] > now:
                now = arrive_s[arrived]
        while arrived < n and arrive_s[arrived] <= now:
            if running + waiting >= max_outstanding:
                if not marks_wait:
                    refused[owner[arrived]] += 1
                arrived += 1
                continue
            if taken == capacity:
                totals[EXHAUSTED] = 1
                return
            r = taken
            taken += 1
            mark = r if marks_wait else arrived
            a = owner[mark]
            req[r, OWNER] = a
            req[r, PROMPT] = prompt[mark]
            req[r, OUTPUT] = output[mark]
            req[r, GENERATED] = 0
            req[r, KEY] = r
            req[r, NEXT] = -1
            times[r, FIRST] = math.nan
            times[r, FINISH] = math.nan
            times[r, SENT_AT] = arrive_s[arrived]
            arrived += 1
            waiting += 1
            if counting:
                fenwick_add(tree, r, 1)
            if head[a] < 0:
                head[a] = r
                tail[a] = r
                first_key[a] = r
                if in_batch[a] > 0:
                    size_active = heap_push(heap_active, size_active, heap_place, first_key, a)
                else:
                    size_idle = heap_push(heap_idle, size_idle, heap_place, first_key, a)
            else:
                req[tail[a], NEXT] = r
                tail[a] = r
        if now >= duration_s:
            break

        # ---- running requests first: one token each, the next chunk of a cut prefill; preempt if blocks lack
        chunk, held = 0, 0
        growth = phase[step % block_size]
        if partial >= 0:
            chunk = req[partial, CONTEXT] - partial_done
            if chunk > token_budget - decodes:
                chunk = token_budget - decodes
            held = -(-partial_done // block_size)
            growth += -(-(partial_done + chunk) // block_size) - held
        preempted = 0
        while used + growth > kv_blocks:
            a = idle_next[m]
            if a < m and adapter_blocks[a] > 0:  # unified policy: idle adapters leave before requests do
                unlink(idle_prev, idle_next, a)
                resident[a] = 0
                n_resident -= 1
                used -= adapter_blocks[a]
                continue
            r = older[capacity]  # the latest admitted
            unlink(older, newer, r)
            a = req[r, OWNER]
            if r == partial:
                growth -= -(-(partial_done + chunk) // block_size) - held
                used -= held
                partial, partial_done, chunk = -1, 0, 0
            else:
                before = req[r, CONTEXT] + step - 1 - req[r, START]
                used -= -(-before // block_size)
                context -= before
                own = (req[r, START] + 1 - req[r, CONTEXT]) % block_size
                phase[own] -= 1
                if own == step % block_size:
                    growth -= 1
                req[r, GENERATED] += step - req[r, START]
                times[r, LAST] = now
                decodes -= 1
                unlink(due_prev, due_next, r)
            running -= 1
            preempted += 1
            in_batch[a] -= 1
            cpu_used[a] = step
            front -= 1
            waiting += 1
            req[r, KEY] = front
            req[r, NEXT] = head[a]
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
        ended_first = -1  # requests whose prefill ends in this step, linked by NEXT
        if partial >= 0:
            partial_done += chunk
            if partial_done == req[partial, CONTEXT]:
                req[partial, NEXT] = ended_first
                ended_first = partial
                partial, partial_done = -1, 0

        # ---- waiting requests in order of arrival, passing over those whose adapter finds no slot
        load_ms = 0.0
        scanned = 0
        if waiting > 0 and preempted == 0:
            last_key = -1  # key of the last request looked at
            while budget > 0 and running < max_seqs and partial < 0:
                a = -1
                if size_active > 0:
                    a = heap_active[0]
                if size_idle > 0 and active < slots and (a < 0 or first_key[heap_idle[0]] < first_key[a]):
                    a = heap_idle[0]
                if a < 0:
                    scanned = waiting  # all of them were looked at, none fits a slot
                    last_key = -1
                    break
                r = head[a]
                last_key = req[r, KEY]
                tokens = req[r, PROMPT] + req[r, GENERATED]
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
                if used + blocks > kv_blocks:
                    break
                # admit r
                used += blocks
                waiting -= 1
                if counting and last_key >= 0:
                    fenwick_add(tree, r, -1)
                head[a] = req[r, NEXT]
                if head[a] >= 0:
                    first_key[a] = req[head[a], KEY]
                if in_batch[a] == 0:
                    size_idle = heap_pop(heap_idle, size_idle, heap_place, first_key, heap_place[a])
                    if head[a] >= 0:
                        size_active = heap_push(heap_active, size_active, heap_place, first_key, a)
                    active += 1
                    active_ranks += ranks[a]
                    if resident[a] == 1:
                        unlink(idle_prev, idle_next, a)
                    else:  # takes a free slot, or that of the least recently used
                        if n_resident == slots:
                            e = idle_next[m]
                            unlink(idle_prev, idle_next, e)
                            resident[e] = 0
                            n_resident -= 1
                            used -= adapter_blocks[e]
                        resident[a] = 1
                        n_resident += 1
                        totals[ADAPTER_LOADS] += 1
                        load_ms += loading[0] + loading[1] * ranks[a]
                        if not all_on_host:
                            if cpu_resident[a] == 0:
                                if n_cpu == max_cpu_loras:
                                    e = -1
                                    for i in range(m):
                                        evictable = cpu_resident[i] == 1 and in_batch[i] == 0
                                        if evictable and (e < 0 or cpu_used[i] < cpu_used[e]):
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
                link_last(older, newer, capacity, r)
                req[r, CONTEXT] = tokens
                budget -= take
                prefill_tokens += take
                if take < tokens:
                    partial, partial_done = r, take
                else:
                    req[r, NEXT] = ended_first
                    ended_first = r
            # Preempted requests (keys < 0) are never passed over: they come first, and their slots are free.
            if counting and last_key > 0 and size_idle > 0 and active >= slots:
                scanned = count_before(tree, last_key)

        # ---- the step itself
        if paper_form:
            ms = paper_ms(c, batch_decodes, waiting, active, m)
        else:
            ms = linear_ms(
                c, batch_decodes, prefill_tokens, active, active_ranks, slots, slot_rank, context, scanned,
                graph_max,
            ) + c[PER_WAITING] * waiting  # fmt: skip
        if means.size > 0:
            add_means(
                means, batch_decodes, prefill_tokens, active, active_ranks, slots, slot_rank, context,
                scanned, waiting, graph_max, ms + load_ms,
            )  # fmt: skip
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
        if now > duration_s:  # the run is over before this step's tokens come out
            step += 1
            continue
        if batch_decodes > 0:
            histogram[gap_bin(dt)] += batch_decodes

        # ---- tokens come out: prefills that ended start to decode, due decodes finish
        while ended_first >= 0:
            r = ended_first
            ended_first = req[r, NEXT]
            if req[r, GENERATED] == 0:
                times[r, FIRST] = now
            else:
                histogram[gap_bin(now - times[r, LAST])] += 1
            req[r, START] = step
            decodes += 1
            context += req[r, CONTEXT]
            phase[(step + 1 - req[r, CONTEXT]) % block_size] += 1
            last_step = step + req[r, OUTPUT] - req[r, GENERATED] - 1
            link_last(due_prev, due_next, capacity + last_step % ring, r)
        bucket = capacity + step % ring
        while due_next[bucket] != bucket:
            r = due_next[bucket]
            unlink(due_prev, due_next, r)
            a = req[r, OWNER]
            times[r, FINISH] = now
            finished[r] = 1
            size = req[r, CONTEXT] + step - req[r, START]
            used -= -(-size // block_size)
            context -= size
            phase[(req[r, START] + 1 - req[r, CONTEXT]) % block_size] -= 1
            unlink(older, newer, r)
            decodes -= 1
            running -= 1
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
    totals[SENT] = arrived
    totals[TAKEN] = taken
    totals[REFUSED] = arrived - taken
    totals[LEFT_RUNNING] = running
    totals[LEFT_WAITING] = waiting
