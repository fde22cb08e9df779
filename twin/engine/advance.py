"""The step loop of one vLLM V1 engine with LoRA adapters (`EngineCore.step`), resumable at any time.

A step has a beginning (arrivals, schedule, duration) and an end (tokens). In between, a cluster's router sees
the server as it is during the step. LLVM inlines all parts here (`INLINED`): a call per part and step, with
all these arrays, would cost as much as the step. To Numba they are functions, compiled one by one (`compile.py`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.twin.engine.admit import admit
from packer.twin.engine.arrive import arrive, free_places
from packer.twin.engine.charge import charge, step_ms
from packer.twin.engine.emit import emit
from packer.twin.engine.frontend import scrape
from packer.twin.engine.schedule import schedule_running
from packer.twin.engine.state import (
    BLOCK_SIZE, BUCKET, CONCURRENCY, END_S, EXHAUSTED, IN_FLIGHT, LOAD_MS, NEXT_S, NOW, PHASE, REACH_S, RING, RUNNING,
    RUN_S, STEP, WAITING, ServerState,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law
from packer.twin.tuning.state import Tuning
from packer.twin.tuning.step import step_beside_ms, work_idle


@njit(**ENGINE_FLAGS)
def advance(state: ServerState, law: Law, until_s: float, tuning: Tuning | None = None) -> None:
    """Execute every step that starts strictly before `until_s`; finish those that end by then.

    A step that would start exactly at `until_s` waits: it must see what arrives then. May be called again and
    again, with requests offered in between; how a run is cut changes nothing. With `until_s` = RUN_S all that
    was sent has arrived. Returns early with EXHAUSTED if a stream has no rows left.
    """
    (ints, floats, stream_s, requests, times, status, links, adapters, sizes, classes, heaps, phase,
     histogram, timeline, vector, means, sets, series) = state  # fmt: skip
    coefficients, settings, loading, frontend = law
    while True:
        # ---- the step in flight ends
        over = False
        if ints[IN_FLIGHT] == 1:
            if floats[END_S] > until_s:
                over = True
            else:
                floats[NOW] = floats[END_S]
                before = np.nextafter(floats[NOW], 0.0)
                if floats[NEXT_S] <= before or floats[REACH_S] <= before:
                    arrive(
                        ints, floats, stream_s, requests, times, status, adapters, sizes, classes, heaps, series,
                        frontend, before,
                    )  # fmt: skip
                scrape(ints, floats, frontend, floats[NOW])
                emit(
                    ints, floats, requests, times, status, links, adapters, sizes, classes, heaps, phase,
                    histogram, sets, series, frontend,
                )  # fmt: skip
                if ints[CONCURRENCY] > 0:
                    free_places(ints, floats, stream_s)
                ints[IN_FLIGHT] = 0
                ints[STEP] += 1
                ints[PHASE] = ints[PHASE] + 1 if ints[PHASE] + 1 < ints[BLOCK_SIZE] else 0
                ints[BUCKET] = ints[BUCKET] + 1 if ints[BUCKET] + 1 < ints[RING] else 0
        # ---- an idle engine jumps to the next arrival, at the front end or in the engine
        idle = ints[RUNNING] == 0 and ints[WAITING] == 0
        next_s = min(floats[NEXT_S], floats[REACH_S])
        if tuning is not None and idle:
            next_s = work_idle(tuning, floats, until_s)
        if idle and floats[NOW] < next_s < until_s:
            floats[NOW] = next_s
        over = over or (idle and next_s >= until_s) or floats[NOW] >= until_s
        if over and until_s < floats[RUN_S]:
            return
        # ---- the next step begins
        now = until_s if over else floats[NOW]
        if floats[NEXT_S] <= now or floats[REACH_S] <= now:
            arrive(
                ints, floats, stream_s, requests, times, status, adapters, sizes, classes, heaps, series,
                frontend, now,
            )  # fmt: skip
        if over or ints[EXHAUSTED] == 1:
            return
        if ints[RUNNING] == 0 and ints[WAITING] == 0:
            continue  # what was sent is still at the front end
        schedule_running(
            ints, floats, requests, times, links, adapters, sizes, classes, heaps, phase, sets,
        )  # fmt: skip
        admit(
            ints, floats, requests, links, adapters, sizes, classes, heaps, sets, loading,
        )  # fmt: skip
        if tuning is None:
            ms = step_ms(ints, classes, vector, means, coefficients, settings, floats[LOAD_MS])
        else:
            ms = step_beside_ms(
                tuning, ints, floats, classes, vector, means, coefficients, settings, floats[LOAD_MS],
            )  # fmt: skip
        charge(ints, floats, timeline, ms)
        ints[IN_FLIGHT] = 1
