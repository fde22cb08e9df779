"""What a predictor is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from packer.bin import Bin, Evaluations
from packer.workload import Workload


@runtime_checkable
class Predictor(Protocol):
    """A judge of bins.

    `name` is what the command line calls it. A class registered under the entry-point group
    `packer.predictors` is called as `cls.for_profile(profile, seed=…)` if it has that, else `cls()`.
    """

    name: str

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin of the fleet `workload`; one row per bin, in order; the same answer every time."""
        ...
