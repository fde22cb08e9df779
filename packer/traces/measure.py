"""Measure a workload from a trace whose requests have adapters: rates, lengths, their cv and correlation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packer.adapter import Adapter
from packer.arrays import FloatArray, IntArray
from packer.arrival import Arrivals
from packer.errors import ValidationError
from packer.io.frames import pl
from packer.lengths import Lengths
from packer.traces.bursts import measure_arrivals
from packer.traces.prefixes import Shared, measured_prefixes
from packer.traces.trace import Trace
from packer.workload import Workload

OWN_CV_FROM = 100  # Requests from which an adapter's own cv of lengths is measured; below, it is the fleet's.


def measure_workload(
    trace: Trace, *, replay: bool = False, window_s: float | None = None, name: str | None = None
) -> Workload:
    """Measure the workload of a trace.

    The rate of an adapter is its number of requests / span, and its mean lengths are those of its requests, so the
    offered load equals the trace's. Arrivals are bursty if the trace's are. Lengths are gamma-distributed. Their
    correlation is that of the normal scores of length / the adapter's mean length. Sessions and shared prefixes come
    from the trace's sessions, blocks and cached tokens, if it has any; bursts are then measured on first turns.

    `trace`: a trace with adapters and ranks. `replay`: replay the recorded requests instead of random arrivals.
    `window_s`: measure bursts within windows of this length (`measure_arrivals`), for a fleet that has the rates of one
    window; None: over the whole trace. `name`: name of the workload; None: the trace's source.
    """
    if trace.adapter is None or trace.ranks is None:
        raise ValidationError("Expected a trace with adapters and ranks: assign them first.")
    span = trace.lasting_s
    n = len(trace.names)
    counts = np.bincount(trace.adapter, minlength=n)
    inputs = _lengths(trace.adapter, trace.input_tokens, counts)
    outputs = _lengths(trace.adapter, trace.output_tokens, counts)
    found = None if replay else measured_prefixes(trace, inputs)
    shared, met = found or ([Shared(lengths, 0, None) for lengths in inputs], trace)
    adapters = [
        Adapter(
            trace.names[k], trace.ranks[k], float(counts[k]) / span, shared[k].input_tokens, outputs[k],
            shared_prefix_tokens=shared[k].prefix_tokens, sessions=shared[k].sessions,
        )
        for k in range(n)
    ]  # fmt: skip
    return Workload(
        adapters,
        length_correlation=_correlation(trace, trace.adapter, counts),
        arrivals=Arrivals("trace", trace=trace.requests()) if replay else measure_arrivals(met, window_s),
        name=name or trace.source,
    )


def rounded(workload: Workload) -> Workload:
    """The workload with rates and mean lengths rounded to six significant digits, for files."""

    def cut(own: Lengths | None) -> Lengths | None:
        return own and own.scaled(float(f"{own.mean:.6g}"))

    adapters = []
    for each in workload.adapters:
        inputs, outputs = cut(each.input_tokens), cut(each.output_tokens)
        rate = float(f"{each.rate:.6g}")
        adapters.append(replace(each, rate=rate, input_tokens=inputs, output_tokens=outputs))
    return replace(workload, adapters=tuple(adapters))


def _lengths(adapter: IntArray, tokens: IntArray, counts: IntArray) -> list[Lengths]:
    means = np.bincount(adapter, tokens, minlength=len(counts)) / counts
    squares = np.bincount(adapter, (tokens / means[adapter] - 1.0) ** 2, minlength=len(counts))
    freedom = len(tokens) - len(counts)
    # If every adapter has only one request, use the cv over all requests instead of the cv within adapters.
    pooled = float(np.sqrt(squares.sum() / freedom)) if freedom else float(tokens.std() / tokens.mean())
    own = np.sqrt(squares / np.maximum(counts - 1, 1))
    cvs = np.minimum(np.where(counts >= OWN_CV_FROM, own, pooled), 100.0)
    return [
        Lengths.gamma(mean, round(cv, 4)) if round(cv, 4) > 0 else Lengths.constant(mean)
        for mean, cv in zip(means.tolist(), cvs.tolist(), strict=True)
    ]


def _correlation(trace: Trace, adapter: IntArray, counts: IntArray) -> float:
    scores = []
    for tokens in (trace.input_tokens, trace.output_tokens):
        means = np.bincount(adapter, tokens, minlength=len(counts)) / counts
        scores.append(_normal_scores(tokens / means[adapter]))
    x, y = scores
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return 0.0
    return round(float(np.clip(np.corrcoef(x, y)[0, 1], -1.0, 1.0)), 4)


def _normal_scores(values: FloatArray) -> FloatArray:
    """Normal scores: normal quantiles of the ranks; equal values share their mean rank."""
    from scipy.special import ndtri

    scores: FloatArray = ndtri((pl.Series(values).rank("average").to_numpy() - 0.5) / len(values))
    return scores
