"""Which requests kept the limits of a service-level objective."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from packer.arrival import RequestTrace

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def kept_and_decided(
    requests: RequestTrace, first_s: FloatArray, finish_s: FloatArray, end_s: float, slo: Mapping[str, float]
) -> tuple[BoolArray, BoolArray]:
    """Which requests completed within every limit, ms, and which are decided: kept, or over one for certain; (n,) each.

    Times (n,), NaN where they did not come by `end_s`. An unfinished request is over a limit if it would be even with
    its remaining tokens at `end_s`; else it is undecided. The limit on TPOT does not bind requests of one token.
    """
    done = ~np.isnan(finish_s)
    first, finish = (np.where(np.isnan(t), end_s, t) for t in (first_s, finish_s))
    output = requests.output_tokens
    latency = (finish - requests.time_s) * 1e3
    figures = {
        "ttft_ms": (first - requests.time_s) * 1e3,
        "tpot_ms": (finish - first) * 1e3 / np.maximum(output - 1, 1),
        "normalised_ms": latency / output,
        "latency_ms": latency,
    }
    over = np.zeros(len(requests), dtype=np.bool_)
    for name, limit in slo.items():
        over |= figures[name] > limit
    return done & ~over, done | over
