"""Targets of predictors: corrections of the step law's estimates instead of the raw figures.

A served share relative to its estimate, and latencies relative to the expected step time, vary far less
between servers and token lengths than tokens per second do. The learned corrections therefore hold for lengths
outside the training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray
from packer.predictors.features import COLUMN

STARVED, STABLE = "starved", "stable"
LARGEST_CORRECTION = 12.0
_SMALLEST = 1e-3


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that is learned as log(figure / base), where `base` is a feature."""

    name: str
    base: str

    def encode(self, figure: FloatArray, features: FloatArray) -> FloatArray:
        """Return the correction that the model learns, float64 (n,)."""
        base = np.maximum(features[:, COLUMN[self.base]], _SMALLEST)
        return np.log(np.maximum(figure, _SMALLEST * 0.1) / base)

    def decode(self, correction: FloatArray, features: FloatArray) -> FloatArray:
        """Return the figure for a correction, float64 (n,)."""
        base = np.maximum(features[:, COLUMN[self.base]], _SMALLEST)
        return base * np.exp(np.clip(correction, -LARGEST_CORRECTION, LARGEST_CORRECTION))


_TIMES = ("mean_itl_ms", "p99_itl_ms", "mean_tpot_ms", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms")
TARGETS = (Target("served_share", "served_estimate"), *(Target(name, "step") for name in _TIMES))
OUTPUTS = (STARVED, *(target.name for target in TARGETS), STABLE)
"""Outputs of a model, in order: the log odds of starvation (before calibration), the corrections, and a number that is
above 0 if the queue does not grow."""


def probability(log_odds: FloatArray, slope: float, offset: float) -> FloatArray:
    """Calibrated probability of starvation (Platt), float64 (n,)."""
    return 1.0 / (1.0 + np.exp(-np.clip(slope * log_odds + offset, -50.0, 50.0)))


def decoded(outputs: Mapping[str, FloatArray], features: FloatArray) -> dict[str, FloatArray]:
    """Return the figures of all regression targets in a model's outputs; the served share is at most 1."""
    figures = {t.name: t.decode(outputs[t.name], features) for t in TARGETS if t.name in outputs}
    if "served_share" in figures:
        figures["served_share"] = np.minimum(figures["served_share"], 1.0)
    return figures
