"""An objective: fewest GPUs, none of them busier than a share of what it could serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluations
from packer.workload import Workload


@dataclass(frozen=True)
class Quiet:
    """Minimise the GPUs, then the highest ITL; no ITL above `itl_ms`."""

    itl_ms: float = 40.0

    name = "quiet"
    fixed_gpus = False

    def admissible(self, evaluations: Evaluations) -> npt.NDArray[np.bool_]:
        """Neither starved nor a memory error, and within the limit."""
        return evaluations.feasible & (np.nan_to_num(evaluations.mean_itl_ms, nan=np.inf) <= self.itl_ms)

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(GPUs, highest mean ITL)."""
        return (float(len(bins)), float(np.nan_to_num(evaluations.mean_itl_ms, nan=np.inf).max()))
