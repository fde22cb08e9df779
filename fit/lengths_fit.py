"""The correlation of input and output lengths, from the KV tokens that running requests hold.

A running request that came with I tokens holds I + k of them when its k-th token comes out. Weighted by the time that
it runs, that is (E[I·O] + E[O²]/2) / E[O], plus half a block; of the lengths' distribution only E[I·O], and with it the
correlation, is not known from means and spreads.
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
    """The correlation that explains the measured KV usage; None where fewer than `FEWEST_RUNS` runs have it."""
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
