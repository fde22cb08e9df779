"""Planning with room for the error of the model: every rate is judged a little higher than it is."""

from __future__ import annotations

from collections.abc import Sequence

from packer.bin import Bin, Evaluations
from packer.predictors.base import Predictor
from packer.workload import Workload

_KEEP_FLEETS = 16


class MarginPredictor:
    """A predictor that sees every rate multiplied by `factor`; its figures are those at the higher load."""

    def __init__(self, predictor: Predictor, factor: float) -> None:
        self.predictor = predictor
        self.name = predictor.name
        self.factor = factor
        self._scaled: list[tuple[Workload, Workload]] = []

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin at the higher load; one row per bin, in order."""
        return self.predictor.evaluate(self.raised(workload), bins)

    def raised(self, workload: Workload) -> Workload:
        """The fleet at the higher load."""
        if self.factor == 1.0:
            return workload
        for nominal, scaled in self._scaled:
            if nominal is workload:
                return scaled
        scaled = workload.scaled(self.factor)
        self._scaled = [*self._scaled[-_KEEP_FLEETS + 1 :], (workload, scaled)]
        return scaled
