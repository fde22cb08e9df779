"""The paper's step law: arXiv 2602.24044, equation (1)."""

from __future__ import annotations

from numba import njit

from packer.arrays import FloatArray
from packer.twin.flags import FLAGS


@njit(inline="always", **FLAGS)
def paper_ms(c: FloatArray, b: float, waiting: float, a: float, served: float) -> float:
    """k1·B + k2·R_P + k3·R_P·A/A_all + (k4·B + k5)·(k6·A + k7), ms.

    B decodes, R_P waiting requests, A distinct adapters in the batch, A_all adapters served.
    """
    scheduling_ms: float = c[0] * b + c[1] * waiting + c[2] * waiting * a / served
    model_ms: float = (c[3] * b + c[4]) * (c[5] * a + c[6])
    return scheduling_ms + model_ms
