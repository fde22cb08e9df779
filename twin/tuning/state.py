"""Training on a simulated server: names of the registers, and the arrays that hold them.

Everything is a real number in one array, so that a cluster can keep the training of many servers in rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from packer.arrays import FloatArray, IntArray
from packer.twin.flags import ENGINE_FLAGS


# ---- the job: rule of its policy, layers, time of a pass over the weights and of a token in a forward pass, ms;
# backward / forward; samples in a step; samples in all (infinite: without end).
(RULE, LAYERS, WEIGHTS_MS, TOKEN_MS, BACKWARD_RATIO, BATCH, SAMPLES) = range(7)
# ---- parameters of policies, see `packer.twin.tuning.policies`.
(SLO_MS, DECODE_FACTOR, TUNING_FACTOR, DEFER_S, SHARE, CHUNK) = range(7, 13)
# ---- where training stands: samples done, pass, units of work left in it, tokens of this batch, next sample.
(DONE, PASS, LEFT, TOKENS, NEXT) = range(13, 18)
# ---- totals: tokens of the samples done, steps beside which training ran; 1 after the idle end of the run.
(TOKENS_DONE, BESIDE, ENDED) = range(18, 21)
N_REGISTERS = 21
(FORWARD, BACKWARD) = (0.0, 1.0)
# ---- rules of policies
(LLMSTATION, TEMPORAL, SPATIAL, CHUNKED) = range(4)


class Tuning(NamedTuple):
    """One job on one server: registers float64 (N_REGISTERS,), lengths of samples int64 (k,), used in turn."""

    registers: FloatArray
    lengths: IntArray


def no_tuning(servers: int) -> Tuning:
    """Servers that train nothing."""
    return Tuning(np.zeros((servers, N_REGISTERS)), np.ones(1, dtype=np.int64))


@njit(inline="always", **ENGINE_FLAGS)
def has_work(r: FloatArray) -> bool:
    """Whether samples are left."""
    return bool(r[DONE] < r[SAMPLES])


@njit(inline="always", **ENGINE_FLAGS)
def pass_ms(r: FloatArray, tokens: float, which: float) -> float:
    """Time of a pass over so many tokens with the GPU to itself, ms."""
    forward: float = r[WEIGHTS_MS] + tokens * r[TOKEN_MS]
    return forward if which == FORWARD else forward * r[BACKWARD_RATIO]
