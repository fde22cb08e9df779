"""Fit the correlation of input and output lengths to the KV tokens that running requests hold.

A request with I input tokens holds I + k tokens when its k-th output token is emitted. The mean over running requests,
each weighted by its running time, is (E[I·O] + E[O²]/2) / E[O] plus half a block. Means and spreads of the lengths give
all of this except E[I·O], which determines the correlation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.fit.runs import fleet_of
from packer.fit.tables import MeasuredRun
from packer.lengths import normal_grid
from packer.profile import Profile
from packer.twin.memory.policy import kv_cache_tokens
from packer.workload import Workload

FEWEST_RUNS = 8
BISECTIONS = 20
NORMAL_POINTS = 201


def held_tokens(workload: Workload, correlation: float, block_size: int) -> float:
    """KV tokens per running request, for lengths whose normal scores have this correlation."""
    z, weight = normal_grid(NORMAL_POINTS)
    prompt = workload.input_tokens.at_normal(z)
    output = workload.output_tokens.at_normal(correlation * z[:, None] + np.sqrt(1.0 - correlation**2) * z)
    mean_out = float(weight @ output @ weight)
    product = float((weight * prompt) @ output @ weight)
    square = float(weight @ output.astype(np.float64) ** 2 @ weight)
    return (product + 0.5 * square) / mean_out + 0.5 * block_size


def fit_correlation(runs: Sequence[MeasuredRun], profile: Profile) -> float | None:
    """Return the correlation that explains the measured KV usage; None if fewer than `FEWEST_RUNS` runs have one."""
    ratios = []
    for run in runs:
        running, usage = (run.metrics.get(name, 0.0) for name in ("mean_num_running", "mean_kv_usage"))
        if run.ok and running >= 1.0 and usage > 0.0:
            capacity = kv_cache_tokens(profile, profile.settings(run.max_loras, run.max_lora_rank))
            ratios.append((usage * capacity / running, run))
    if len(ratios) < FEWEST_RUNS:
        return None
    ratios.sort(key=lambda pair: pair[0])
    measured, run = ratios[len(ratios) // 2]
    workload = fleet_of(run)
    low, high = -0.95, 0.95
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        above = held_tokens(workload, middle, profile.engine.block_size) > measured
        low, high = (low, middle) if above else (middle, high)
    return round(0.5 * (low + high), 3)
