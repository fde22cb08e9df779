"""Evaluate a few bins by trees in one compiled call; a search makes thousands of such calls. The figures equal those of
the slow reference, `LearnedPredictor.evaluate_features` with features and `Ensemble.rows`."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from packer.arrays import BoolArray, Float32Array, FloatArray, IntArray
from packer.predictors.ensemble import Ensemble, UintArray, walk_one
from packer.predictors.features_kernel import LOAD, SUMS, FleetArrays, fill
from packer.twin.compile_ahead import Tiered
from packer.twin.flags import ENGINE_FLAGS

N_FIGURES = 10
(OFFERED, THROUGHPUT, MEAN_TTFT, MEDIAN_TTFT, P99_TTFT, MEAN_TPOT, MEAN_ITL, P99_ITL, KV, CHANCE) = range(N_FIGURES)
(STARVED, FAILED, OUTSIDE, STABLE) = range(4)
SMALLEST = 1e-3


@njit(**ENGINE_FLAGS)
def evaluate(
    start: IntArray, end: IntArray, index: IntArray, share: FloatArray, factor: FloatArray, slots: FloatArray,
    slot_rank: FloatArray, kv_tokens: FloatArray, table: FloatArray, law: FloatArray, paper: bool,
    engine: FloatArray, load: FloatArray, feature: UintArray, threshold: Float32Array, left: UintArray,
    roots: UintArray, depths: UintArray, starts: UintArray, bias: FloatArray, bases: IntArray, slope: float,
    offset: float, largest: float, low: FloatArray, high: FloatArray, min_kv: float, figures: FloatArray,
    flags: BoolArray, room: FloatArray, x: Float32Array,
) -> None:  # fmt: skip
    """Write figures float64 (N_FIGURES, n) and flags bool (4, n) of n bins; a bin that fails has latencies NaN.

    Parameters from table on are the fields of `FleetArrays`, from feature on the fields of `Ensemble`: a call with both
    as tuples takes 2 µs more.
    bases int64 (outputs,): the feature that each output corrects (the first and the last, starvation and stability,
    correct none); slope, offset: calibration of the log odds; largest: limit of a correction; low, high float64 (F,):
    ranges of the training data; min_kv: minimum KV tokens of a server; room: as for `fill`; x float32 (F + 1,):
    working memory.
    """
    fleet = FleetArrays(table, law, paper, engine, load)
    trees = Ensemble(feature, threshold, left, roots, depths, starts, bias)
    width, outputs, row = low.size, room[11], room[12]  # `packer.predictors.targets.OUTPUTS`
    x[width] = -np.inf
    for b in range(slots.size):
        fill(b, start, end, index, share, factor, slots, slot_rank, kv_tokens, fleet, room, row)
        outside = False
        for f in range(width):
            x[f] = row[f]
            outside = outside or row[f] < low[f] or row[f] > high[f]
        offered = room[SUMS, LOAD]
        failed = kv_tokens[b] < min_kv
        figures[OFFERED, b], figures[KV, b] = offered, kv_tokens[b]
        flags[FAILED, b], flags[OUTSIDE, b] = failed, outside
        if failed:
            flags[STARVED, b], flags[STABLE, b] = True, False
            figures[THROUGHPUT, b], figures[CHANCE, b] = 0.0, 1.0
            for k in range(MEAN_TTFT, P99_ITL + 1):
                figures[k, b] = np.nan
            continue
        for k in range(trees.bias.size):
            first, last = trees.starts[k], trees.starts[k + 1]
            outputs[k] = trees.bias[k] + walk_one(x, trees, first, last)
        odds = slope * outputs[0] + offset
        chance = 1.0 / (1.0 + math.exp(-min(max(odds, -50.0), 50.0)))
        flags[STARVED, b], flags[STABLE, b] = chance >= 0.5, outputs[8] > 0.0
        figures[CHANCE, b] = chance
        for k in range(1, 8):
            correction = min(max(outputs[k], -largest), largest)
            outputs[k] = max(row[bases[k]], SMALLEST) * math.exp(correction)
        figures[THROUGHPUT, b] = min(outputs[1], 1.0) * offered
        mean_itl, mean_ttft = outputs[2], outputs[5]
        p99_ttft = max(outputs[7], mean_ttft)  # figures are learned separately and may contradict each other
        figures[MEAN_ITL, b], figures[MEAN_TTFT, b], figures[P99_TTFT, b] = mean_itl, mean_ttft, p99_ttft
        figures[P99_ITL, b] = max(outputs[3], mean_itl)
        figures[MEAN_TPOT, b] = outputs[4]
        figures[MEDIAN_TTFT, b] = min(outputs[6], p99_ttft)


def _leaves(x: Float32Array, trees: Ensemble, first: int, last: int) -> float:
    """Return what `walk_one` returns, with a step of all trees at a time."""
    node = trees.roots[first:last]
    for _ in range(trees.depths[first:last].max(initial=0)):
        node = trees.left[node] + (x[trees.feature[node]] > trees.threshold[node])
    return float(np.add.accumulate(trees.threshold[node], dtype=np.float64)[-1]) if len(node) else 0.0


evaluate_bins = Tiered(evaluate, {walk_one: _leaves})  # A call with few bins runs as Python until compiled.
SHORT = 64  # Maximum number of bins that take less time as Python than compiling does.
