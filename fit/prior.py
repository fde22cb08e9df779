"""What a calibrated profile of another model says of the terms that micro-benchmarks cannot distinguish.

Micro-benchmarks vary the batch and the adapters in it, hardly ever the slots, their rank and the prefills beside
adapters: least squares then put what slots cost into whichever term fits by chance, and a server with other slots is
predicted wrong by half. The kernels are the same for every model, so that their costs, scaled by the bytes of an
adapter (`packer.fit.estimate`), are near: the fit holds each term near the scaled one as far as the measurements
leave it open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from packer.fit.estimate import scaled_law
from packer.io.profiles import load_profile, profile_names
from packer.profile import Profile
from packer.twin.datasheets import GPUS

WEIGHT = 6.0
"""All terms off by their own size weigh as much as all equations off by so many times what a fit without prior leaves:
exact measurements are followed exactly, in what they say."""
EXACT = 1e-4
"""Relative error below which measurements are exact."""
SMALLEST = 0.02
"""Scale of a term that the other profile does not have: this share of a step."""


@dataclass(frozen=True)
class Prior:
    """Coefficients of terms, ms, and the profile that they come from."""

    coefficients: dict[str, float]
    source: str


def prior_of(base: Profile) -> Prior | None:
    """From the shipped profile of another model with the nearest weights; None for a GPU without a data sheet."""
    sheet = next((sheet for sheet in GPUS.values() if sheet.title == base.gpu.name), None)
    if sheet is None:
        return None
    shipped = [load_profile(name) for name in profile_names()]
    others = [
        each for each in shipped
        if each.model.name != base.model.name and each.engine.name == base.engine.name
        and each.latency.form == "linear" and each.name.partition("/")[0] in GPUS
    ]  # fmt: skip
    if not others or base.model.weights_bytes <= 0:
        return None
    nearest = min(others, key=lambda each: abs(math.log(each.model.weights_bytes / base.model.weights_bytes)))
    return Prior(scaled_law(base.model, sheet, nearest), nearest.name)
