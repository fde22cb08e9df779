"""The law of a profile as the engine takes it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packer.profile import Profile
from packer.twin.latency import coefficient_vector

FloatArray = npt.NDArray[np.float64]


class Law(NamedTuple):
    """What steps and loads cost.

    coefficients float64 (terms,), ms, in the order of the form's table; settings float64 (2,): 1 if the form
    is the paper's, largest number of tokens with a CUDA graph; loading float64 (4,): ms to load an adapter from
    host memory (base, per rank) and from disk (base, per rank).
    """

    coefficients: FloatArray
    settings: FloatArray
    loading: FloatArray


def law_of(profile: Profile) -> Law:
    """The law of a profile."""
    latency, loading = profile.latency, profile.loading
    return Law(
        coefficient_vector(latency),
        np.array([latency.form == "paper", latency.graph_max_tokens], dtype=np.float64),
        np.array(
            [
                loading.host_base_ms,
                loading.host_per_rank_ms,
                loading.disk_base_ms,
                loading.disk_per_rank_ms,
            ]
        ),
    )
