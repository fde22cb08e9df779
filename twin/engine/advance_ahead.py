"""The step loop of `advance` for a server that schedules ahead, caches prefixes, or both."""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.twin.engine.arrive import arrive, free_places
from packer.twin.engine.frontend import scrape
from packer.twin.engine.pipeline import begin, begin_next, deliver, plan_next, turn
from packer.twin.engine.plan import plan, planned_ms
from packer.twin.engine.pool import Pool, Records
from packer.twin.engine.state import (
    CONCURRENCY, END_S, EXHAUSTED, IN_FLIGHT, NEXT_S, NOW, REACH_S, RUNNING, RUN_S, STEP_DECODES, STEP_PREFILL, WAITING,
    ServerState,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.law.law import Law


@njit(**INLINED)
def arrive_until(state: ServerState, law: Law, now: float) -> None:
    """Take in what was sent up to `now`."""
    if state.floats[NEXT_S] <= now or state.floats[REACH_S] <= now:
        arrive(
            state.ints, state.floats, state.stream_s, state.requests, state.times, state.status, state.adapters,
            state.sizes, state.classes, state.heaps, state.series, law.frontend, now,
        )  # fmt: skip


@njit(**INLINED)
def end_step(state: ServerState, law: Law, pool: Pool, pipeline: Records) -> None:
    """The step in flight ends."""
    ints, floats = state.ints, state.floats
    floats[NOW] = floats[END_S]
    arrive_until(state, law, np.nextafter(floats[NOW], 0.0))
    scrape(ints, floats, law.frontend, floats[NOW])
    if pipeline[0].turned == 0:
        turn(state, pool)
        pipeline[0].turned = 1
    deliver(state, law, pool)
    if ints[CONCURRENCY] > 0:
        free_places(ints, floats, state.stream_s)
    ints[IN_FLIGHT] = 0


@njit(**ENGINE_FLAGS)
def advance_ahead(state: ServerState, law: Law, pool: Pool, pipeline: Records, until_s: float) -> None:
    """As `engine.advance.advance`: every step that starts before `until_s`; how a run is cut changes nothing."""
    ints, floats = state.ints, state.floats
    while True:
        over = False
        if ints[IN_FLIGHT] == 1:
            over = floats[END_S] > until_s
            if not over:
                end_step(state, law, pool, pipeline)
        idle = ints[RUNNING] == 0 and ints[WAITING] == 0
        next_s = min(floats[NEXT_S], floats[REACH_S])
        if idle and floats[NOW] < next_s < until_s:
            floats[NOW] = next_s
        over = over or (idle and next_s >= until_s) or floats[NOW] >= until_s
        if over and until_s < floats[RUN_S]:
            return
        now = until_s if over else floats[NOW]
        arrive_until(state, law, now)
        if over or ints[EXHAUSTED] == 1:
            return
        if pipeline[0].ahead == 1:
            begin_next(state, pipeline)
        elif ints[RUNNING] == 0 and ints[WAITING] == 0:
            continue  # what was sent is still at the front end
        else:
            plan(state, law, pool, False)
            if ints[STEP_DECODES] + ints[STEP_PREFILL] == 0:
                continue
            begin(state, pipeline, planned_ms(state, law, pipeline[0].depth))
        if pipeline[0].depth == 2 and ints[RUNNING] + ints[WAITING] > 0:
            plan_next(state, law, pool, pipeline)
