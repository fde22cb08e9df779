"""Duration of a step (`execute_model` and the loop around it), and its records."""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.engine.slots import largest_rank
from packer.twin.engine.state import (
    ACTIVE, ACTIVE_RANKS, ATTENDED, BIN_S, BUSY_S, CONTEXT_TOKENS, DT, END_S, LOAD_MS, LOAD_S, NOW, ON_HOST_COUNT,
    PEAK_BLOCKS, PEAK_RUNNING, REQUEST_RANKS, RUNNING, SERVED, SLOTS, SLOT_RANK, STALL_S, STEP_DECODES,
    STEP_PREEMPTED, STEP_PREFILL, T_ADAPTERS, T_BUSY, T_DECODE, T_KV, T_PREEMPTED, T_PREFILL, T_RUNNING,
    T_WAITING, TRACK_HOST, USED, WAITING,
)  # fmt: skip
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.law.law import IS_PAPER
from packer.twin.law.linear import linear_ms, state_vector
from packer.twin.law.paper import paper_ms

MIN_STEP_S = 5e-5  # no engine steps faster; keeps a zero step law from never ending


@njit(inline="always", **ENGINE_FLAGS)
def add_means(means: FloatArray, vector: FloatArray, decodes: int, step_ms: float) -> None:
    """Add a step to the sums of what the linear terms multiply, each weighted by the decodes of the step.

    means float64 (terms + 2,): the sums, then those of the step time and of the weights. Their quotients are
    the mean state that a token sees: calibration solves for coefficients on them.
    """
    n = vector.size
    for i in range(n):
        means[i] += decodes * vector[i]
    means[n] += decodes * step_ms
    means[n + 1] += decodes


@njit(**INLINED)
def law_ms(
    ints: IntArray, classes: IntArray, vector: FloatArray, coefficients: FloatArray, settings: FloatArray,
    decodes: float, prefill: float,
) -> float:  # fmt: skip
    """Time of a step with so many decodes and prefill tokens by the linear law, ms; fills `vector`."""
    state_vector(
        vector, decodes, prefill, ints[ACTIVE], ints[ACTIVE_RANKS], ints[SLOTS], ints[SLOT_RANK],
        ints[CONTEXT_TOKENS], ints[WAITING], settings, ints[REQUEST_RANKS],
        ints[RUNNING] * largest_rank(ints, classes),
        ints[ON_HOST_COUNT] if ints[TRACK_HOST] == 1 else ints[SERVED],
        ints[ATTENDED] if prefill > 0.0 else 0.0,
    )  # fmt: skip
    ms: float = linear_ms(coefficients, vector)
    return ms


@njit(**INLINED)
def step_ms(
    ints: IntArray, classes: IntArray, vector: FloatArray, means: FloatArray, coefficients: FloatArray,
    settings: FloatArray, load_ms: float,
) -> float:  # fmt: skip
    """Time of the step by its law, and of its loads, ms; fills `vector` where it is needed."""
    if settings[IS_PAPER] > 0:
        ms = paper_ms(coefficients, ints[STEP_DECODES], ints[WAITING], ints[ACTIVE], ints[SERVED])
        if means.size > 0:
            law_ms(ints, classes, vector, coefficients, settings, ints[STEP_DECODES], ints[STEP_PREFILL])
    else:
        ms = law_ms(ints, classes, vector, coefficients, settings, ints[STEP_DECODES], ints[STEP_PREFILL])
    if means.size > 0:
        add_means(means, vector, ints[STEP_DECODES], ms + load_ms)
    total: float = ms + load_ms
    return total


@njit(**INLINED)
def charge(ints: IntArray, floats: FloatArray, timeline: FloatArray, ms: float) -> None:
    """The step takes so long (DT, END_S): add it to totals and timeline."""
    dt = ms * 1e-3
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
    floats[STALL_S] += floats[LOAD_MS] * 1e-3 * ints[RUNNING]
    if ints[USED] > ints[PEAK_BLOCKS]:
        ints[PEAK_BLOCKS] = ints[USED]
    if ints[RUNNING] > ints[PEAK_RUNNING]:
        ints[PEAK_RUNNING] = ints[RUNNING]
