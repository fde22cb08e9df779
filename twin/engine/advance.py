"""The step loop of one vLLM V1 engine with LoRA adapters (`EngineCore.step`), resumable at any time.

A step has a beginning (arrivals, schedule, duration) and an end (tokens). In between, a cluster's router sees
the server as it is during the step. LLVM inlines all parts here (`INLINED`), because a call per part and step, with
all these arrays, would cost as much as the step. Numba compiles the parts as separate functions (`compile.py`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.arrays import Record
from packer.twin.engine.admit import admit
from packer.twin.engine.arrive import arrive_until, free_places
from packer.twin.engine.charge import charge, step_ms
from packer.twin.engine.emit import emit, next_step
from packer.twin.engine.frontend import scrape
from packer.twin.engine.schedule import schedule_running
from packer.twin.engine.state import ServerState
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law
from packer.twin.tuning.state import Tuning
from packer.twin.tuning.step import step_beside_ms, work_idle


@njit(inline="always", **ENGINE_FLAGS)
def is_idle(server: Record) -> bool:
    """Whether the engine has no request."""
    return bool(server.running == 0 and server.waiting == 0)


@njit(inline="always", **ENGINE_FLAGS)
def go_on(server: Record, idle: bool, next_s: float, until_s: float, over: bool) -> bool:
    """Let an idle engine jump to `next_s`; return whether no step begins before `until_s`, as is the case if `over`."""
    if idle and server.now_s < next_s < until_s:
        server.now_s = next_s
    return over or (idle and next_s >= until_s) or server.now_s >= until_s


@njit(**ENGINE_FLAGS)
def advance(state: ServerState, law: Law, until_s: float, tuning: Tuning | None = None) -> None:
    """Execute every step that starts strictly before `until_s`; finish the steps that end by then.

    A step that would start exactly at `until_s` waits, because it must see the requests that arrive then. Splitting a
    run into several calls, with requests offered in between, does not change the result. If `until_s` is the end of the
    run, all requests sent have arrived. Returns early, with `exhausted` set, if a stream has no rows left.
    """
    server, frontend = state.server, law.frontend
    while True:
        # ---- the step in flight ends
        over = False
        if server.in_flight == 1:
            over = server.end_s > until_s
            if not over:
                server.now_s = server.end_s
                arrive_until(state, frontend, np.nextafter(server.now_s, 0.0))
                scrape(server, frontend, server.now_s)
                emit(state, frontend)
                if server.concurrency > 0:
                    free_places(server, state.stream_s)
                server.in_flight = 0
                next_step(server)
        idle, next_s = is_idle(server), min(server.next_s, server.reach_s)
        if tuning is not None and idle:
            next_s = work_idle(tuning, server, until_s)
        over = go_on(server, idle, next_s, until_s, over)
        if over and until_s < server.run_s:
            return
        # ---- the next step begins
        arrive_until(state, frontend, until_s if over else server.now_s)
        if over or server.exhausted == 1:
            return
        if is_idle(server):
            continue  # the requests that were sent are still at the front end
        schedule_running(state)
        admit(state, law.loading)
        charge(
            server,
            state.timeline,
            step_ms(state, law) if tuning is None else step_beside_ms(tuning, state, law),
        )
        server.in_flight = 1
