"""Fewest GPUs: no server starves or fails to start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluations
from packer.workload import Workload


@dataclass(frozen=True)
class Gpus:
    """Minimise the number of GPUs."""

    name = "gpus"
    fixed_gpus = False

    def admissible(self, evaluations: Evaluations) -> npt.NDArray[np.bool_]:
        """Neither starved nor a memory error."""
        return evaluations.feasible

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(GPUs,)."""
        return (float(len(bins)),)
