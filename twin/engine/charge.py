"""Duration of a step (`execute_model` and the loop around it), and its entries in totals and timeline."""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, Record
from packer.twin.engine.slots import largest_rank
from packer.twin.engine.state import ServerState
from packer.twin.flags import ENGINE_FLAGS, INLINED
from packer.twin.law.law import IS_PAPER, Law
from packer.twin.law.linear import AT, linear_ms, state_vector
from packer.twin.law.paper import paper_ms

MIN_STEP_S = 5e-5  # no engine steps faster; without it, a run with a step law of 0 would never end


@njit(inline="always", **ENGINE_FLAGS)
def add_means(means: FloatArray, vector: FloatArray, decodes: int, step_ms: float) -> None:
    """Add the quantities that the linear terms multiply in a step to `means`, weighted by the decodes of the step.

    means float64 (terms + 2,): the weighted sums of the quantities, of the step time, and the sum of the weights. Sums
    / weights are the mean state that a token sees, for which calibration solves for coefficients.
    """
    n = vector.size
    for i in range(n):
        means[i] += decodes * vector[i]
    means[n] += decodes * step_ms
    means[n + 1] += decodes


@njit(**INLINED)
def law_ms(state: ServerState, law: Law, decodes: float, prefill: float) -> float:
    """Time of a step with these numbers of decodes and prefill tokens by the linear law, ms; fills `vector`."""
    server = state.server
    # `add_adapter` copies the registry of host memory for each adapter of the batch (docs/vllm-findings.md).
    state_vector(
        state.vector, decodes, prefill, server.active, server.active_ranks, server.slots, server.slot_rank,
        server.context_tokens, server.waiting, law.settings, server.request_ranks,
        server.running * largest_rank(server, state.classes),
        server.on_host_count if server.track_host == 1 else server.served, server.attended if prefill > 0.0 else 0.0,
    )  # fmt: skip
    ms: float = linear_ms(law.coefficients, state.vector)
    return ms


@njit(**INLINED)
def step_ms(state: ServerState, law: Law) -> float:
    """Time of the step by its law plus time of its loads, ms; fills `vector` for the linear law and for `means`."""
    server = state.server
    if law.settings[IS_PAPER] > 0:
        ms = paper_ms(law.coefficients, server.step_decodes, server.waiting, server.active, server.served)
        # Means are those of the linear law, for whose coefficients calibration solves, whatever law is run.
        if state.means.size > 0:
            law_ms(state, law, server.step_decodes, server.step_prefill)
    else:
        ms = law_ms(state, law, server.step_decodes, server.step_prefill)
    total: float = ms + server.load_ms
    if state.means.size > 0:
        add_means(state.means, state.vector, server.step_decodes, total)
    return total


@njit(**INLINED)
def planned_ms(state: ServerState, law: Law) -> float:
    """Duration of the step that was scheduled last, ms.

    With asynchronous scheduling, the walk over the waiting requests is done while the previous step is executed: it
    costs time only if it takes longer than the step itself. Loads of adapters are part of the step (`execute_model`).
    """
    load_ms = state.server.load_ms
    ms: float = step_ms(state, law)
    if state.server.depth == 1 or law.settings[IS_PAPER] > 0:
        return ms
    host_ms = law.coefficients[AT.per_waiting_ms] * state.vector[AT.per_waiting_ms]
    return float(max(ms - load_ms - host_ms, host_ms) + load_ms)


@njit(**INLINED)
def charge(server: Record, timeline: Record, ms: float) -> None:
    """Set `duration_s` and `end_s` of a step that takes `ms`, and add the step to totals and timeline."""
    dt = max(ms * 1e-3, MIN_STEP_S)
    server.duration_s = dt
    server.end_s = server.now_s + dt
    row = timeline[int(server.now_s / server.bin_s)]
    row.busy += dt
    row.running += dt * server.running
    row.waiting += dt * server.waiting
    row.kv_blocks += dt * server.used
    row.adapters += dt * server.active
    row.prefill += server.step_prefill
    row.decode += server.step_decodes
    row.preempted += server.step_preempted
    server.busy_s += dt
    server.load_s += server.load_ms * 1e-3
    server.stall_s += server.load_ms * 1e-3 * server.running
    server.peak_blocks = max(server.peak_blocks, server.used)
    server.peak_running = max(server.peak_running, server.running)
