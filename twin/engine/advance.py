"""The step loop of one vLLM V1 engine with LoRA adapters (`EngineCore.step`), resumable at any time.

A step has a beginning (arrivals, schedule, duration) and an end (tokens). In between, a cluster's router sees
the server as it is during the step. LLVM inlines all parts here (`INLINED`), because a call per part and step, with
all these arrays, would cost as much as the step. Numba compiles the parts as separate functions (`compile.py`).

With asynchronous scheduling (vllm/v1/core/sched/async_scheduler.py; `EngineCore.step_with_batch_queue`) a step is
scheduled while the previous step is executed, before the tokens of that step are known. A request whose last token is
computed by the step in flight is not scheduled again, but keeps its seat and its blocks until that step ends. A
preempted request still gets the token that the step in flight computes.

`pool`: None if blocks are only counted and steps are scheduled one by one. `each`: None if requests are not counted one
by one. `tuning`: None if the server does not train. Numba compiles the loop for each of these cases.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.arrays import Record
from packer.twin.engine.admit import admit
from packer.twin.engine.arrive import arrive_until, free_places
from packer.twin.engine.charge import charge, planned_ms
from packer.twin.engine.each import Each
from packer.twin.engine.each_plan import cost, plan_each
from packer.twin.engine.each_step import emit_each
from packer.twin.engine.emit import emit, turn
from packer.twin.engine.frontend import scrape
from packer.twin.engine.pool import Pool
from packer.twin.engine.schedule import schedule_running
from packer.twin.engine.state import ServerState
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.law.law import Law
from packer.twin.tuning.state import Tuning
from packer.twin.tuning.step import step_beside_ms, work_idle


@njit(inline="always", **ENGINE_FLAGS)
def is_idle(server: Record) -> bool:
    """Whether the engine has no request, and no scheduled step, which may compute tokens of finished requests only."""
    return bool(server.running == 0 and server.waiting == 0 and server.planned == 0)


@njit(inline="always", **ENGINE_FLAGS)
def go_on(server: Record, idle: bool, next_s: float, until_s: float, over: bool) -> bool:
    """Let an idle engine jump to `next_s`; return whether no step begins before `until_s`, as is the case if `over`."""
    if idle and server.now_s < next_s < until_s:
        server.now_s = next_s
    return over or (idle and next_s >= until_s) or server.now_s >= until_s


@njit(**INLINED)
def end(state: ServerState, law: Law, pool: Pool | None, each: Each | None) -> None:
    """End the step in flight: deliver its tokens."""
    server = state.server
    server.now_s = server.end_s
    # A request that is sent exactly now comes after the tokens: a cluster offers it only after this call.
    arrive_until(state, law.frontend, each, np.nextafter(server.now_s, 0.0))
    scrape(server, law.frontend, server.now_s)
    if each is not None:
        emit_each(state, law.frontend, each, pool)
    else:
        # `plan` has turned already if it scheduled the next step ahead.
        if server.turned == 0:
            turn(state, pool)
        emit(state, law.frontend, pool)
    if server.concurrency > 0:
        free_places(server, state.stream_s)
    server.in_flight = 0


@njit(**INLINED)
def plan(
    state: ServerState, law: Law, pool: Pool | None, each: Each | None, tuning: Tuning | None, ahead: bool
) -> float:
    """`Scheduler.schedule`: set what the next step computes; return its duration, ms, or -1 if it has no tokens.

    `ahead`: a step is in flight, and keeps its fields: those of the next step become `planned…`.
    """
    server, ms = state.server, -1.0
    if pool is not None and each is None and ahead and server.turned == 0:
        turn(state, pool)
    ended, load_ms = server.ended, server.load_ms
    decodes, prefill, preempted = server.step_decodes, server.step_prefill, server.step_preempted
    if each is not None:
        plan_each(state, law, each, pool)
    else:
        schedule_running(state, pool, ahead)
        admit(state, law.loading, pool, ahead)
    if server.step_decodes + server.step_prefill > 0:
        if each is not None:
            ms = cost(state, law, each)
        elif tuning is not None:
            ms = step_beside_ms(tuning, state, law)
        else:
            ms = planned_ms(state, law)
    if pool is not None and ahead:
        server.planned_ended = server.ended
        server.planned_decodes, server.planned_prefill = server.step_decodes, server.step_prefill
        server.planned_preempted, server.planned_load_ms = server.step_preempted, server.load_ms
        server.ended, server.load_ms = ended, load_ms
        server.step_decodes, server.step_prefill, server.step_preempted = decodes, prefill, preempted
        server.planned, server.planned_ms = ms >= 0.0, ms
    return ms


@njit(**INLINED)
def begin(state: ServerState, pool: Pool | None, each: Each | None, ms: float) -> None:
    """Start executing the step that was scheduled last; it takes `ms` unless it was scheduled ahead."""
    server = state.server
    if pool is not None and server.planned == 1:
        server.ended = server.planned_ended
        server.step_decodes, server.step_prefill = server.planned_decodes, server.planned_prefill
        server.step_preempted, server.load_ms = server.planned_preempted, server.planned_load_ms
        server.planned, ms = 0, server.planned_ms
    charge(server, state.timeline, ms)
    server.in_flight, server.turned = 1, 0
    if each is not None:
        whole = each.whole[0]
        whole.current = 1 - whole.current
        whole.more_s += each.steps[whole.current].more_ms * 1e-3
        if server.step_decodes > 0:
            whole.decode_s += ms * 1e-3


@njit(**ENGINE_FLAGS)
def advance(
    state: ServerState, law: Law, until_s: float, pool: Pool | None = None, each: Each | None = None,
    tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """Execute every step that starts strictly before `until_s`; finish the steps that end by then.

    A step that would start exactly at `until_s` waits, because it must see the requests that arrive then. Splitting a
    run into several calls, with requests offered in between, does not change the result. If `until_s` is the end of the
    run, all requests sent have arrived. Returns early, with `exhausted` set, if a stream has no rows left.
    """
    server = state.server
    while True:
        over = False
        if server.in_flight == 1:
            over = server.end_s > until_s
            if not over:
                end(state, law, pool, each)
        idle, next_s = is_idle(server), min(server.next_s, server.reach_s)
        if tuning is not None and idle:
            next_s = work_idle(tuning, server, until_s)
        over = go_on(server, idle, next_s, until_s, over)
        # Later arrivals wait for the next call: a cluster may offer further requests of that time.
        if over and until_s < server.run_s:
            return
        arrive_until(state, law.frontend, each, until_s if over else server.now_s)
        if over or server.exhausted == 1:
            return
        if is_idle(server):
            continue  # the requests that were sent are still at the front end
        ms = 0.0
        for ahead in range(server.depth):  # the next step and, with asynchronous scheduling, the one after it
            # A step that the previous pass of the loop scheduled ahead only has to begin.
            if server.running + server.waiting > 0 and server.planned == 0:
                ms = plan(state, law, pool, each, tuning, ahead == 1)
            if ms < 0.0:  # a request preempted itself before others got tokens: such a step takes no time
                break
            if ahead == 0:
                begin(state, pool, each, ms)
