"""What a step costs, and what is written down of it."""

from __future__ import annotations

from numba import njit

from packer.twin.engine.state import (
    ACTIVE, ACTIVE_RANKS, BIN_S, BUSY_S, CONTEXT_TOKENS, DT, END_S, LOAD_MS, LOAD_S, NOW, PEAK_BLOCKS,
    PEAK_RUNNING, RUNNING, SCANNED, SERVED, SLOTS, SLOT_RANK, STEP_DECODES, STEP_PREEMPTED, STEP_PREFILL,
    T_ADAPTERS, T_BUSY, T_DECODE, T_KV, T_PREEMPTED, T_PREFILL, T_RUNNING, T_WAITING, USED, WAITING,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.kernel_law import PER_WAITING, add_means, linear_ms, paper_ms

MIN_STEP_S = 5e-5  # no engine steps faster; keeps a zero step law from never ending


@njit(inline="always", **ENGINE_FLAGS)
def charge(ints, floats, timeline, vector, means, c, settings) -> None:
    """Compute the step's duration (DT, END_S) by the step law and the loads; add it to totals and timeline."""
    if settings[0] > 0:
        ms = paper_ms(c, ints[STEP_DECODES], ints[WAITING], ints[ACTIVE], ints[SERVED])
    else:
        ms = (
            linear_ms(
                c,
                ints[STEP_DECODES],
                ints[STEP_PREFILL],
                ints[ACTIVE],
                ints[ACTIVE_RANKS],
                ints[SLOTS],
                ints[SLOT_RANK],
                ints[CONTEXT_TOKENS],
                ints[SCANNED],
                settings[1],
            )
            + c[PER_WAITING] * ints[WAITING]
        )
    if means.size > 0:
        add_means(
            means,
            ints[STEP_DECODES],
            ints[STEP_PREFILL],
            ints[ACTIVE],
            ints[ACTIVE_RANKS],
            ints[SLOTS],
            ints[SLOT_RANK],
            ints[CONTEXT_TOKENS],
            ints[SCANNED],
            ints[WAITING],
            settings[1],
            ms + floats[LOAD_MS],
        )
    dt = (ms + floats[LOAD_MS]) * 1e-3
    if dt < MIN_STEP_S:
        dt = MIN_STEP_S
    floats[DT] = dt
    floats[END_S] = floats[NOW] + dt
    row = timeline[int(floats[NOW] / floats[BIN_S])]
    row[T_BUSY] += dt
    row[T_RUNNING] += dt * ints[RUNNING]
    row[T_WAITING] += dt * ints[WAITING]
    row[T_KV] += dt * ints[USED]
    row[T_ADAPTERS] += dt * ints[ACTIVE]
    row[T_PREFILL] += ints[STEP_PREFILL]
    row[T_DECODE] += ints[STEP_DECODES]
    row[T_PREEMPTED] += ints[STEP_PREEMPTED]
    floats[BUSY_S] += dt
    floats[LOAD_S] += floats[LOAD_MS] * 1e-3
    if ints[USED] > ints[PEAK_BLOCKS]:
        ints[PEAK_BLOCKS] = ints[USED]
    if ints[RUNNING] > ints[PEAK_RUNNING]:
        ints[PEAK_RUNNING] = ints[RUNNING]
