"""The step laws and the histogram of gaps, compiled by Numba; `packer.twin.latency` explains the laws."""

from __future__ import annotations

from numba import njit

from packer.profile import LINEAR_TERMS
from packer.twin.engine.state import FloatArray
from packer.twin.flags import FLAGS

PER_WAITING = LINEAR_TERMS.index("per_waiting_ms")


@njit(**FLAGS)
def linear_ms(
    c: FloatArray, b: int, p: int, a: int, ranks: int, slots: int, slot_rank: int, context: int,
    scanned: int, graph_max: float,
) -> float:  # fmt: skip
    """The linear step law, ms; see packer.twin.latency."""
    t = b + p
    ms: float = c[0] + c[1] * b + c[2] * p + c[5] * a + c[6] * ranks + c[10] * a * t + c[11] * a * p
    ms += c[13] * context
    if p > 0:
        ms += c[3]
    if a > 0:
        ms += c[4] + c[7] * slots + c[8] * slot_rank + (c[9] + c[12] * slots + c[17] * slot_rank) * t
    if t > graph_max:
        ms += c[14] + c[15] * (t - graph_max)
    ms += c[16] * scanned
    return ms


@njit(**FLAGS)
def paper_ms(c: FloatArray, b: int, pending: int, a: int, n_adapters: int) -> float:
    """The paper's step law, ms: arXiv 2602.24044, equation (1)."""
    scheduling_ms: float = c[0] * b + c[1] * pending + c[2] * pending * a / n_adapters
    model_ms: float = (c[3] * b + c[4]) * (c[5] * a + c[6])
    return scheduling_ms + model_ms


@njit(**FLAGS)
def add_means(
    means: FloatArray, b: int, p: int, a: int, ranks: int, slots: int, slot_rank: int, context: int,
    scanned: int, waiting: int, graph_max: float, step_ms: float,
) -> None:  # fmt: skip
    """Add a step to the sums of what the linear terms multiply, each weighted by the decodes of the step.

    means (number of terms + 2,): the sums in the order of `LINEAR_TERMS`, then those of the step time and of
    the weights. Their quotients are the mean state that a token sees: calibration solves for coefficients on
    them.
    """
    t = b + p
    w = float(b)
    means[0] += w
    means[1] += w * b
    means[2] += w * p
    if p > 0:
        means[3] += w
    means[5] += w * a
    means[6] += w * ranks
    if a > 0:
        means[4] += w
        means[7] += w * slots
        means[8] += w * slot_rank
        means[9] += w * t
        means[12] += w * slots * t
        means[17] += w * slot_rank * t
    means[10] += w * a * t
    means[11] += w * a * p
    means[13] += w * context
    if t > graph_max:
        means[14] += w
        means[15] += w * (t - graph_max)
    means[16] += w * scanned
    means[18] += w * waiting
    means[19] += w * step_ms
    means[20] += w
