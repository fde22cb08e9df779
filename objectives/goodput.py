"""Most requests within their latency limits on a given number of GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.base import Objective
from packer.workload import Workload


@dataclass(frozen=True)
class Goodput(Objective):
    """Maximise the throughput of the requests within the limits of their adapters (`Workload.slo`)."""

    name = "goodput"
    minimises = "goodput"
    fixed_gpus = True

    @property
    def limits(self) -> Mapping[str, float]:
        """No limits: the goal only decides which requests count."""
        return {}

    @property
    def figures(self) -> Collection[str]:
        """Goodput."""
        return ("goodput_tok_s",)

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(−goodput in tok/s, largest `slo_used` of a server)."""
        if not bins:
            return ()
        used = float(np.nan_to_num(evaluations.slo_used, nan=np.inf).max())
        return (-float(np.nan_to_num(evaluations.goodput_tok_s, nan=0.0).sum()), min(used, 1e9))
