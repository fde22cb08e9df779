"""The KV cache that a fleet's requests hold, where it is not in proportion to their tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from packer.arrays import FloatArray
from packer.kv_shape import KvShape
from packer.lengths import Lengths, paired
from packer.workload import Workload

_IN_PROPORTION = KvShape()


def share_held(workload: Workload, shape: KvShape | None) -> float:
    """Return the KV cache that running requests hold, in the mean over time, relative to what their tokens take."""
    if shape is None:
        return 1.0
    held, tokens = held_by_adapter(workload, shape).sum(axis=0)
    return float(held / tokens) if tokens > 0.0 else 1.0


def held_by_adapter(workload: Workload, shape: KvShape) -> FloatArray:
    """Return what the requests of each adapter hold, summed over their decodes, and their tokens, float64 (n, 2).

    The unit of time is that of the rates, or the whole trace. A request runs for as long as its decodes. The prompts of
    a session's later turns hold the conversation before; here, all prompts are longer by the factor of the mean prompt.
    """
    trace, count = workload.arrivals.trace, len(workload)
    if trace is not None:
        sums = [each.held_by_decodes(trace.input_tokens, trace.output_tokens) for each in (shape, _IN_PROPORTION)]
        return np.column_stack([np.bincount(trace.adapter, each, count) for each in sums])
    means = workload.mean_input_tokens.tolist() if workload.has_sessions else [None] * count
    found: dict[tuple[int, int, float | None], FloatArray] = {}  # hashing measured lengths would take long
    rows = np.empty((count, 2))
    for k, (adapter, mean) in enumerate(zip(workload.adapters, means, strict=True)):
        first = adapter.input_tokens or workload.input_tokens
        second = adapter.output_tokens or workload.output_tokens
        key = id(first), id(second), mean
        if key not in found:
            prompt = first if mean is None else first.scaled(mean)
            found[key] = _drawn(shape, prompt, second, workload.length_correlation)
        rows[k] = adapter.rate * found[key]
    return rows


@lru_cache(maxsize=4096)
def _drawn(shape: KvShape, first: Lengths, second: Lengths, correlation: float) -> FloatArray:
    """What the mean request with these lengths holds, summed over its decodes, and its tokens, float64 (2,)."""
    prompt, output, weight = paired(first, second, correlation)
    sides = (shape, _IN_PROPORTION)
    return np.array([float(weight @ each.held_by_decodes(prompt, output) @ weight) for each in sides])
