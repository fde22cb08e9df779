"""Margins: how much a plan must leave free so that profile errors and chance do not starve its servers."""

from __future__ import annotations

import math

import numpy as np

from packer.errors import IncompatibleError, ValidationError, shown
from packer.profile import Profile

DEFAULT_CONFIDENCE = 0.95  # Default confidence that a plan holds.
UNCALIBRATED_MARGIN = 0.1  # Share by which rates are raised for profiles without held-out errors.
HARDENING_STEP, HARDENING_STEPS = 0.03, 3  # Least increase of the margin when the twin refuses a plan, and how often.
MIXED = (0.0, 0.15, 0.35)  # Additional margins for mixes of kinds: searched by throughput, then checked for latency.
CONFIRMING = 0.02  # Hours of a fleet differ by about a percent: a server that holds by less is not confirmed.
LATENCY_SLACK = 1.02  # Latencies differ by about a percent between seeds: a limit is broken beyond 2 %.
BAND_KEYS = ("estimated_capacity_low", "estimated_capacity_high")
"""Keys in `Profile.errors` of an estimate: the band of real capacity / estimated capacity of a server."""
QUANTILES = (0.5, 0.8, 0.9, 0.95, 0.99)  # Confidences at which a calibration writes capacity errors into the profile.


def error_key(confidence: float) -> str:
    """Return the key of `Profile.errors` with the margin of a confidence: 0.95 → "capacity_margin_p95"."""
    return f"capacity_margin_p{round(100 * confidence)}"


def rate_margin(profile: Profile, confidence: float) -> float:
    """Return the share by which every rate must be raised when a bin is evaluated, to hold with this confidence.

    Starved held-out runs show by how much the twin overestimates a saturated server's throughput (its capacity). The
    margin is that error's quantile, never below 0, linear between the stored quantiles.

    Raises `ValidationError`: the confidence is not in [0.5, 0.99]; `IncompatibleError`: the profile carries no held-out
    errors (an estimate, or a calibration without runs).
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
