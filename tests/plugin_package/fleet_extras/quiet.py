"""An objective: fewest GPUs, none of them busier than its latency allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.base import Objective
from packer.workload import Workload


@dataclass(frozen=True)
class Quiet(Objective):
    """Minimise the GPUs, then the highest ITL; no mean ITL above `itl_ms`."""

    itl_ms: float = 40.0

    name = "quiet"
    minimises = "gpus"

    @property
    def limits(self) -> Mapping[str, float]:
        """The largest mean ITL."""
        return {"mean_itl_ms": self.itl_ms}

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(GPUs, highest mean ITL)."""
        return (float(len(bins)), float(np.nan_to_num(evaluations.mean_itl_ms, nan=np.inf).max()))
