"""The table of margins: how much a plan must leave free so that errors of a profile and chance do not starve it."""

from __future__ import annotations

import math

import numpy as np

from packer.errors import IncompatibleError, ValidationError, shown
from packer.profile import Profile

DEFAULT_CONFIDENCE = 0.95
"""How sure a plan is to hold where nothing else is said."""
UNCALIBRATED_MARGIN = 0.1
"""By how much rates are raised for profiles without held-out errors."""
HARDENING_STEP, HARDENING_STEPS = 0.03, 3
"""By how much the margin is raised at least where the twin refuses a plan, and how often."""
MIXED = (0.0, 0.15, 0.35)
"""Beyond the margin, for mixes of kinds: they are searched for throughput, and latency is looked at afterwards."""
CONFIRMING = 0.02
"""Two hours of one fleet differ by a percent or so: a server that holds by less is not confirmed by a solver."""
LATENCY_SLACK = 1.02
"""Latencies differ by a percent or so from seed to seed: a limit breaks where it is exceeded by more than 2 %."""
QUANTILES = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Confidences at which a calibration writes its capacity error into the profile."""


def error_key(confidence: float) -> str:
    """Key of `Profile.errors` that holds the margin of a confidence: 0.95 → "capacity_margin_p95"."""
    return f"capacity_margin_p{round(100 * confidence)}"


def rate_margin(profile: Profile, confidence: float) -> float:
    """Share by which every rate must be raised when a bin is evaluated, so that it holds with this confidence.

    The held-out runs that were starved say by how much the twin overestimates a saturated server's throughput
    (its capacity); the margin is that error's quantile, never below 0, linear between the stored quantiles.

    Raises `ValidationError`: the confidence is not in [0.5, 0.99]; `IncompatibleError`: the profile carries no
    held-out errors (an estimate, or a calibration without runs).
    """
    if not (isinstance(confidence, float | int) and math.isfinite(confidence) and 0.5 <= confidence <= 0.99):
        raise ValidationError(f"Expected a confidence in [0.5, 0.99], got {shown(confidence)}.")
    known = [(q, profile.errors[error_key(q)]) for q in QUANTILES if error_key(q) in profile.errors]
    if len(known) < 2:
        raise IncompatibleError(
            f"The profile {profile.label} has no held-out capacity errors, so no margin follows from a "
            "confidence: calibrate it with runs (packer profiles fit --runs), or give a margin yourself "
            "(--margin)."
        )
    quantiles, margins = zip(*known, strict=True)
    return max(0.0, float(np.interp(confidence, quantiles, margins)))
