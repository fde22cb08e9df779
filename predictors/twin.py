"""The twin as a predictor: it simulates each bin."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from packer.arrays import FloatArray
from packer.bin import Bin
from packer.evaluation import Evaluation, Evaluations
from packer.predictors.content import ContentCache, Factors
from packer.profile import Profile
from packer.twin.threads import in_threads
from packer.twin.until_clear import evaluate_until_clear
from packer.workload import Workload


class TwinPredictor:
    """Simulates each bin until the result is clear (`packer.twin.until_clear`), once per content.

    `seed`: seed of arrivals and lengths; the same seed gives the same figures, whatever was evaluated before.
    `workers`: threads for batches; None takes one per core. The figures don't depend on `workers`.
    `whole`: simulate each bin as it is, with the requests and for the hour of `packer.simulate`, for one answer. Bins
    of searches differ from that by what chance and a short run make of their content.
    """

    name = "twin"
    imitates_twin = False

    def __init__(self, *, seed: int = 0, workers: int | None = None, whole: bool = False) -> None:
        self.seed, self.whole = seed, whole
        self.workers = workers or os.cpu_count() or 1
        self._cache = ContentCache(self._simulated)
        self._evaluated = 0

    @classmethod
    def for_profile(cls, _profile: Profile, *, seed: int = 0) -> TwinPredictor:
        """Return the twin, which needs no preparation, because each bin has its own profile."""
        return cls(seed=seed)

    @property
    def requested(self) -> int:
        """Number of bins evaluated so far."""
        return self._cache.requested + self._evaluated

    @property
    def simulated(self) -> int:
        """Number of these bins that were simulated."""
        return self._cache.evaluated + self._evaluated

    def for_one(self) -> TwinPredictor:
        """Return the twin that simulates each bin `whole`."""
        return self if self.whole else TwinPredictor(seed=self.seed, workers=self.workers, whole=True)

    def evaluate(self, workload: Workload, bins: Sequence[Bin], factors: Factors = 1.0) -> Evaluations:
        """Figures of each bin at its rates times its factor; one row per bin, in order."""
        if not self.whole:
            return self._cache.evaluate(workload, bins, factors)
        self._evaluated += len(bins)
        return self._simulated(workload, bins, np.broadcast_to(np.asarray(factors, dtype=np.float64), len(bins)))

    def _simulated(self, workload: Workload, bins: Sequence[Bin], factors: FloatArray) -> Evaluations:
        pairs = list(zip(bins, factors.tolist(), strict=True))
        workers = self.workers if len(bins) == 1 else 1
        rows = in_threads(lambda pair: self._one(workload, *pair, workers), pairs, self.workers)
        return Evaluations.of(list(rows))

    def _one(self, workload: Workload, item: Bin, factor: float, workers: int) -> Evaluation:
        own = item.workload(workload)
        own = own if factor == 1.0 else own.scaled(factor)
        found = evaluate_until_clear(
            own, item.profile, item.settings, seed=self.seed, workers=workers, screened=not self.whole
        )
        return found.evaluation
