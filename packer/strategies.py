"""What packer needs of a predictor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy.typing as npt
from numpy import float64

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.workload import Workload


@runtime_checkable
class Predictor(Protocol):
    """Predicts how servers do.

    `name` is what the command line calls it. A class registered under the entry-point group
    `packer.predictors` is called as `cls.for_profile(profile, seed=…)` if it has that, else `cls()`.
    """

    name: str

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin of the fleet `workload`; one row per bin, in order; the same every time."""


@runtime_checkable
class TwinBased(Protocol):
    """A predictor that simulates, or learned from simulations.

    Bins of equal content get equal figures, and rates can be scaled bin by bin without a new fleet.
    `imitates_twin`: it learned from the twin, which has to confirm the plans found with it.
    """

    name: str
    imitates_twin: bool

    def evaluate(
        self, workload: Workload, bins: Sequence[Bin], factors: npt.NDArray[float64] | float = 1.0
    ) -> Evaluations:
        """As `Predictor.evaluate`, with every rate of bin k multiplied by `factors[k]`."""
