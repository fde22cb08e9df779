"""Objectives by name, with their parameters."""

from __future__ import annotations

from packer import registry
from packer.objectives.base import Objective


def load_objective(spec: str) -> Objective:
    """The objective that a text names: "gpus", or with parameters "slo:mean_ttft_ms=500,p99_itl_ms=60".

    Raises `UnknownNameError`: no objective has that name; `ValidationError`: it has no such parameter, or the value
    breaks a rule.
    """
    objective: Objective = registry.make("objective", spec)
    return objective
