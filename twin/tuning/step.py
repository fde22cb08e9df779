"""Training between and during the steps of the engine."""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray, IntArray, Record
from packer.twin.engine.charge import law_ms, step_ms
from packer.twin.engine.state import ServerState
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law
from packer.twin.tuning.policies.chunked import chunk_beside, chunk_ms, chunks_of
from packer.twin.tuning.policies.llmstation import tasklets_beside
from packer.twin.tuning.policies.spatial import shared_ms
from packer.twin.tuning.state import (
    BACKWARD, BATCH, BESIDE, CHUNKED, DEFER_S, DONE, ENDED, FORWARD, LAYERS, LEFT, LLMSTATION, NEXT, PASS, RULE,
    SHARE, SPATIAL, TEMPORAL, TOKENS, TOKENS_DONE, Tuning, has_work, pass_ms,
)  # fmt: skip


@njit(**ENGINE_FLAGS)
def next_batch(r: FloatArray, lengths: IntArray) -> None:
    """Begin the forward pass of the next samples."""
    r[TOKENS] = 0.0
    for _ in range(int(r[BATCH])):
        r[TOKENS] += lengths[int(r[NEXT])]
        r[NEXT] = (r[NEXT] + 1.0) % lengths.size
    r[PASS] = FORWARD
    r[LEFT] = _units(r)


@njit(**ENGINE_FLAGS)
def _units(r: FloatArray) -> float:
    """Units of work of a pass: tasklets or chunks; of both passes together a step, or ms."""
    if r[RULE] == LLMSTATION:
        return float(r[LAYERS])
    if r[RULE] == CHUNKED:
        return float(chunks_of(r))
    if r[RULE] == SPATIAL:
        return float(pass_ms(r, r[TOKENS], FORWARD) + pass_ms(r, r[TOKENS], BACKWARD))
    return 1.0


@njit(**ENGINE_FLAGS)
def work(r: FloatArray, lengths: IntArray, units: float) -> None:
    """So many units of work are done; passes and batches that are complete give way to the next ones."""
    while has_work(r):
        if r[LEFT] > units:
            r[LEFT] -= units
            return
        units -= r[LEFT]
        two_passes = r[RULE] == LLMSTATION or r[RULE] == CHUNKED
        if two_passes and r[PASS] == FORWARD:
            r[PASS] = BACKWARD
            r[LEFT] = _units(r)
        else:
            r[DONE] += r[BATCH]
            r[TOKENS_DONE] += r[TOKENS]
            next_batch(r, lengths)
        if units <= 0.0:
            return


@njit(**ENGINE_FLAGS)
def _alone_ms(r: FloatArray) -> float:
    """Time of the next unit of work that can't be interrupted, with the GPU to itself, ms."""
    if r[RULE] == LLMSTATION:
        return float(pass_ms(r, r[TOKENS], r[PASS]) / r[LAYERS])
    if r[RULE] == CHUNKED:
        return float(chunk_ms(r))
    return float(pass_ms(r, r[TOKENS], FORWARD) + pass_ms(r, r[TOKENS], BACKWARD))


@njit(**ENGINE_FLAGS)
def work_idle(tuning: Tuning, server: Record, until_s: float) -> float:
    """Train on an idle server; returns when its next step may begin: at the next arrival, deferred ones later.

    Its time may pass `until_s` and the arrival: work that has begun is finished.
    """
    r, lengths = tuning
    next_s: float = min(server.next_s, server.reach_s)
    if r[RULE] == SPATIAL:
        end_s = next_s
        if next_s >= until_s:
            if until_s < server.run_s or r[ENDED] == 1.0:
                return next_s
            end_s, r[ENDED] = until_s, 1.0
        if end_s > server.now_s:
            work(r, lengths, (end_s - server.now_s) * 1e3 * r[SHARE])
        return next_s
    while has_work(r):
        deferred_s: float = min(server.next_s + r[DEFER_S], server.reach_s)
        if server.now_s >= min(deferred_s, until_s):
            return deferred_s
        server.now_s += _alone_ms(r) * 1e-3
        if server.now_s <= server.run_s:
            work(r, lengths, 1.0)
    return next_s


@njit(**ENGINE_FLAGS)
def step_beside_ms(tuning: Tuning, state: ServerState, law: Law) -> float:
    """Time of the step with the training that runs beside it, and of its loads, ms."""
    r, lengths = tuning
    server = state.server
    alone_ms: float = step_ms(state, law)
    if not has_work(r) or r[RULE] == TEMPORAL:
        return alone_ms
    decodes, prefill = float(server.step_decodes), float(server.step_prefill)
    if prefill > 0.0 and r[RULE] != SPATIAL:
        return alone_ms
    ms, units = alone_ms - server.load_ms, 0.0
    if r[RULE] == LLMSTATION:
        fused_ms = law_ms(state, law, decodes, r[TOKENS]) if r[PASS] == FORWARD else ms
        ms, units = tasklets_beside(r, ms, fused_ms)
    elif r[RULE] == CHUNKED:
        ms, units = chunk_beside(r, ms)
    else:
        decode_ms = law_ms(state, law, decodes, 0.0) if prefill > 0.0 else ms
        ms, units = shared_ms(r, decode_ms, ms)
    total_ms: float = ms + server.load_ms
    if units > 0.0 and server.now_s + total_ms * 1e-3 <= server.run_s:
        work(r, lengths, units)
        r[BESIDE] += 1.0
    return total_ms
