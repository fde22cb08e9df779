"""Spatial sharing, as with NVIDIA MPS: training in a process of its own with a fixed share of the GPU.

"Resource Multiplexing in Tuning and Serving Large Language Models", USENIX ATC 2025, section 2.3.2: the share is set
when the processes start (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), and each holds its own copy of the base model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from numba import njit

from packer.arrays import Record
from packer import checks
from packer.twin.flags import ENGINE_FLAGS
from packer.twin.tuning.state import SPATIAL


@dataclass(frozen=True)
class Spatial:
    """Parameters of spatial sharing.

    `share`: share of the streaming multiprocessors that training has, in ]0, 1[.
    `interference_decode`: share by which decoding slows down per unit of `share`. `interference_tuning`: share by which
    training slows down with decoding. They compete for memory bandwidth (not given in the paper). Prefills, bound by
    computing, slow down by 1 / (1 − share).
    """

    share: float = 0.3
    interference_decode: float = 1.0
    interference_tuning: float = 1.0

    name: ClassVar[str] = "spatial"
    rule: ClassVar[int] = SPATIAL
    searched: ClassVar[tuple[str, tuple[float, ...]]] = ("share", (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
    own_base_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.real("share", self.share, low=0.01, high=0.99)
        for name in ("interference_decode", "interference_tuning"):
            checks.real(name, getattr(self, name), low=0.0, high=100.0)

    def parameters(self) -> dict[str, float]:
        """Return the fields that the kernel reads."""
        return {
            "share": self.share,
            "decode_factor": 1.0 + self.interference_decode * self.share,
            "tuning_factor": 1.0 + self.interference_tuning,
        }


@njit(**ENGINE_FLAGS)
def shared_ms(job: Record, decode_ms: float, step_ms: float) -> tuple[float, float]:
    """Return the time of a step that runs together with training, ms, and the training done in it, ms of the whole GPU.

    `decode_ms`: the step alone without its prefill tokens; `step_ms`: the step alone with them.
    """
    ms = decode_ms * job.decode_factor + (step_ms - decode_ms) / (1.0 - job.share)
    return ms, ms * job.share / job.tuning_factor
