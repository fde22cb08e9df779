"""The step loop of `advance` for a server with asynchronous scheduling, prefix caching, or both."""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.arrays import Record
from packer.twin.engine.advance import go_on, is_idle
from packer.twin.engine.arrive import arrive_until, free_places
from packer.twin.engine.frontend import scrape
from packer.twin.engine.pipeline import begin, begin_next, deliver, plan_next, turn
from packer.twin.engine.plan import plan, planned_ms
from packer.twin.engine.pool import Pool
from packer.twin.engine.state import ServerState
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.law.law import Law


@njit(**INLINED)
def end_step(state: ServerState, law: Law, pool: Pool, pipeline: Record) -> None:
    """End the step in flight: deliver its tokens."""
    server = state.server
    server.now_s = server.end_s
    arrive_until(state, law.frontend, np.nextafter(server.now_s, 0.0))
    scrape(server, law.frontend, server.now_s)
    if pipeline[0].turned == 0:
        turn(state, pool)
        pipeline[0].turned = 1
    deliver(state, law, pool)
    if server.concurrency > 0:
        free_places(server, state.stream_s)
    server.in_flight = 0


@njit(**ENGINE_FLAGS)
def advance_ahead(state: ServerState, law: Law, pool: Pool, pipeline: Record, until_s: float) -> None:
    """As `engine.advance.advance`: execute every step that starts strictly before `until_s`."""
    server = state.server
    while True:
        over = False
        if server.in_flight == 1:
            over = server.end_s > until_s
            if not over:
                end_step(state, law, pool, pipeline)
        over = go_on(server, is_idle(server), min(server.next_s, server.reach_s), until_s, over)
        if over and until_s < server.run_s:
            return
        arrive_until(state, law.frontend, until_s if over else server.now_s)
        if over or server.exhausted == 1:
            return
        if pipeline[0].ahead == 1:
            begin_next(state, pipeline)
        elif is_idle(server):
            continue  # the requests that were sent are still at the front end
        else:
            plan(state, law, pool, False)
            if server.step_decodes + server.step_prefill == 0:
                continue
            begin(state, pipeline, planned_ms(state, law, pipeline[0].depth))
        if pipeline[0].depth == 2 and server.running + server.waiting > 0:
            plan_next(state, law, pool, pipeline)
