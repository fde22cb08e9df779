"""LLMStation: training in tasklets of one layer; as many run with each decode iteration as its limit allows.

"Resource Multiplexing in Tuning and Serving Large Language Models", USENIX ATC 2025, Algorithm 1: a forward pass is
fused with decoding, a backward pass runs in parallel with it, steps with a prefill suspend training, and a server
without requests trains alone, one tasklet after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from numba import njit

from packer import checks
from packer.arrays import Record
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.tuning.state import BACKWARD, FORWARD, LLMSTATION, pass_ms

ROUNDING = 1e-9  # Relative tolerance: a limit that is met exactly must not be missed by rounding.


@njit(**ENGINE_FLAGS)
def plan(
    layers: float, left: float, decode_ms: float, beside_ms: float, tasklet_ms: float, slo_ms: float
) -> tuple[float, float]:
    """Return the decode layers that run together with training, and the training tasklets (section 4.2).

    It maximises N_p subject to N_d l_d + (N − N_d) l_d0 <= SLO and N_p l_p <= N_d l_d, with N layers of which N_d run
    together with training; the paper's equation (1) is the solution without rounding.

    `layers`, `left`: decode tasklets of the iteration, and training tasklets left in the pass. `decode_ms`,
    `beside_ms`: time of a decode tasklet alone (l_d0) and with training (l_d), > 0. `tasklet_ms`: time of a training
    tasklet with decoding (l_p), > 0. `slo_ms`: limit of the iteration.
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


@dataclass(frozen=True)
class LLMStation:
    """Parameters of LLMStation.

    `slo_decode_ms`: limit of a decode iteration. It is below the limit of the TPOT, because prefills raise the TPOT.
    `kappa_decode`, `kappa_tuning`: share by which decoding, and a backward pass, slow down when run together (not
    given in the paper).
    `suspend_overhead`: cost of dividing a pass, as a share of its time (Figure 12: < 0.5 % on one GPU).
    `defer_ms`: how long the first request after an idle time waits for others (section 4.1).
    """

    slo_decode_ms: float = 45.0
    kappa_decode: float = 0.35
    kappa_tuning: float = 0.25
    suspend_overhead: float = 0.005
    defer_ms: float = 0.0

    name: ClassVar[str] = "llmstation"
    rule: ClassVar[int] = LLMSTATION
    searched: ClassVar[tuple[str, tuple[float, ...]]] = (
        "slo_decode_ms", (15.0, 20.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0, 60.0, 80.0),
    )  # fmt: skip
    own_base_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.real("slo_decode_ms", self.slo_decode_ms, low=0.0, high=1e6, open_low=True)
        for name in ("kappa_decode", "kappa_tuning", "suspend_overhead"):
            checks.real(name, getattr(self, name), low=0.0, high=100.0)
        checks.real("defer_ms", self.defer_ms, low=0.0, high=1e6)

    def parameters(self) -> dict[str, float]:
        """Return the fields that the kernel reads."""
        return {
            "slo_ms": self.slo_decode_ms,
            "decode_factor": 1.0 + self.kappa_decode,
            "tuning_factor": (1.0 + self.kappa_tuning) * (1.0 + self.suspend_overhead),
            "defer_s": self.defer_ms * 1e-3,
        }


@njit(**ENGINE_FLAGS)
def tasklets_beside(job: Record, decode_ms: float, fused_ms: float) -> tuple[float, float]:
    """Return the time of a decode step with the tasklets that run with it, ms, and their number.

    `decode_ms`: the step alone. `fused_ms`: the step with the tokens of the batch in its forward pass.
    """
    layers = job.layers
    alone_ms = decode_ms / layers
    if job.direction == FORWARD:
        beside_ms = tasklet_ms = fused_ms / layers
    else:
        beside_ms = alone_ms * job.decode_factor
        tasklet_ms = pass_ms(job, job.tokens, BACKWARD) / layers * job.tuning_factor
    beside, tasklets = plan(layers, job.left, alone_ms, beside_ms, tasklet_ms, job.slo_ms)
    if tasklets == 0.0:
        return decode_ms, 0.0
    return decode_ms + beside * (beside_ms - alone_ms), tasklets
