"""Training between and during the steps of the engine."""

from __future__ import annotations

from numba import njit

from packer.arrays import IntArray, Record
from packer.twin.engine.charge import law_ms, step_ms
from packer.twin.engine.state import ServerState
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.law.law import Law
from packer.twin.tuning.policies.chunked import chunk_beside, chunk_ms, chunks_of
from packer.twin.tuning.policies.llmstation import tasklets_beside
from packer.twin.tuning.policies.spatial import shared_ms
from packer.twin.tuning.state import (
    BACKWARD, CHUNKED, FORWARD, LLMSTATION, SPATIAL, TEMPORAL, Tuning, has_work, pass_ms,
)  # fmt: skip


@njit(**ENGINE_FLAGS)
def next_batch(job: Record, lengths: IntArray) -> None:
    """Begin the forward pass of the next batch of samples; the last batch has the samples that are left."""
    job.tokens = 0.0
    for _ in range(int(min(job.batch, job.samples - job.done))):
        job.tokens += lengths[job.next]
        job.next = (job.next + 1) % lengths.size
    job.direction = FORWARD
    job.left = _units(job)


@njit(**ENGINE_FLAGS)
def _units(job: Record) -> float:
    """Return the units of work in a pass: tasklets or chunks; for both passes together ms (spatial), or one."""
    if job.rule == LLMSTATION:
        return float(job.layers)
    if job.rule == CHUNKED:
        return float(chunks_of(job))
    if job.rule == SPATIAL:
        return float(pass_ms(job, job.tokens, FORWARD) + pass_ms(job, job.tokens, BACKWARD))
    return 1.0


@njit(**ENGINE_FLAGS)
def work(job: Record, lengths: IntArray, units: float) -> None:
    """Do `units` of work; completed passes and batches are followed by the next ones."""
    while has_work(job):
        if job.left > units:
            job.left -= units
            return
        units -= job.left
        two_passes = job.rule == LLMSTATION or job.rule == CHUNKED
        if two_passes and job.direction == FORWARD:
            job.direction = BACKWARD
            job.left = _units(job)
        else:
            job.done = min(job.done + job.batch, job.samples)
            job.tokens_done += job.tokens
            next_batch(job, lengths)
        if units <= 0.0:
            return


@njit(**ENGINE_FLAGS)
def _alone_ms(job: Record) -> float:
    """Return the time of the next unit of work that can't be interrupted, with the GPU to itself, ms."""
    if job.rule == LLMSTATION:
        return float(pass_ms(job, job.tokens, job.direction) / job.layers)
    if job.rule == CHUNKED:
        return float(chunk_ms(job))
    return float(pass_ms(job, job.tokens, FORWARD) + pass_ms(job, job.tokens, BACKWARD))


@njit(**ENGINE_FLAGS)
def work_idle(tuning: Tuning, server: Record, until_s: float) -> float:
    """Train on an idle server; return when its next step may begin: at the next arrival, or later if it is deferred.

    The server's time may pass `until_s` and the arrival, because work that has begun is finished.
    """
    job, lengths = tuning
    next_s: float = min(server.next_s, server.reach_s)
    if job.rule == SPATIAL:
        end_s = next_s
        if next_s >= until_s:
            # The next call counts the idle time from the last step; only at the run's end no call follows.
            if until_s < server.run_s or job.ended == 1.0:
                return next_s
            end_s, job.ended = until_s, 1.0
        if end_s > server.now_s:
            work(job, lengths, (end_s - server.now_s) * 1e3 * job.share)
        return next_s
    while has_work(job):
        deferred_s: float = min(server.next_s + job.defer_s, server.reach_s)
        if server.now_s >= min(deferred_s, until_s):
            return deferred_s
        server.now_s += _alone_ms(job) * 1e-3
        # Work that the end of the run cuts off is not done.
        if server.now_s <= server.run_s:
            work(job, lengths, 1.0)
    return next_s


@njit(**ENGINE_FLAGS)
def step_beside_ms(tuning: Tuning, state: ServerState, law: Law) -> float:
    """Return the time of the step with its loads and with the training that runs concurrently, ms."""
    job, lengths = tuning
    server = state.server
    alone_ms: float = step_ms(state, law)
    if not has_work(job) or job.rule == TEMPORAL:
        return alone_ms
    decodes, prefill = float(server.step_decodes), float(server.step_prefill)
    # LLMStation suspends training while prompts are computed (Algorithm 1); chunks likewise.
    if prefill > 0.0 and job.rule != SPATIAL:
        return alone_ms
    ms, units = alone_ms - server.load_ms, 0.0
    if job.rule == LLMSTATION:
        fused_ms = law_ms(state, law, decodes, job.tokens) if job.direction == FORWARD else ms
        ms, units = tasklets_beside(job, ms, fused_ms)
    elif job.rule == CHUNKED:
        ms, units = chunk_beside(job, ms)
    else:
        decode_ms = law_ms(state, law, decodes, 0.0) if prefill > 0.0 else ms
        ms, units = shared_ms(job, decode_ms, ms)
    total_ms: float = ms + server.load_ms
    if units > 0.0 and server.now_s + total_ms * 1e-3 <= server.run_s:
        work(job, lengths, units)
        job.beside += 1.0
    return total_ms
