"""LLMStation's planner: how many training tasklets run beside a decode iteration (USENIX ATC 2025, section 4.2).

It maximises N_p subject to N_d l_d + (N − N_d) l_d0 <= SLO and N_p l_p <= N_d l_d, with N layers of which N_d run
beside training; its equation (1) is the solution without rounding.
"""

from __future__ import annotations

import math

from numba import njit

from packer.twin.flags import ENGINE_FLAGS

ROUNDING = 1e-9
"""Relative; a limit that is met exactly must not be missed by rounding."""


@njit(**ENGINE_FLAGS)
def plan(
    layers: float, left: float, decode_ms: float, beside_ms: float, tasklet_ms: float, slo_ms: float
) -> tuple[float, float]:
    """Decode layers that run beside training, and training tasklets that run beside them.

    `layers`, `left`: decode tasklets of the iteration; training tasklets left in the pass.
    `decode_ms`, `beside_ms`, `tasklet_ms`: time of a decode tasklet alone (l_d0) and beside training (l_d), and of a
    training tasklet beside decoding (l_p), > 0.
    `slo_ms`: limit of the iteration.
    """
    room_ms = slo_ms * (1.0 + ROUNDING) - layers * decode_ms
    if room_ms < 0.0:
        return 0.0, 0.0
    most = layers
    if beside_ms > decode_ms:
        most = min(layers, math.floor(room_ms / (beside_ms - decode_ms)))
    tasklets = min(left, math.floor(most * beside_ms / tasklet_ms * (1.0 + ROUNDING)))
    needed = math.ceil(tasklets * tasklet_ms / beside_ms * (1.0 - ROUNDING))
    return min(most, needed), tasklets
