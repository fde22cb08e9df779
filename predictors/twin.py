"""The twin as a judge: it simulates each bin."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from packer.bin import Bin, Evaluation, Evaluations
from packer.predictors.content import canonical
from packer.predictors.judge import judge
from packer.profile import Profile
from packer.workload import Workload

MAX_CACHED = 200_000


class TwinPredictor:
    """Simulates each bin until its verdict is clear (`packer.predictors.judge`), once per content.

    Parameters
    ----------
    seed
        Of arrivals and lengths; the same seed gives the same answers, whatever was asked before.
    workers
        Threads for batches; None takes one per core. The answers don't depend on it.
    """

    name = "twin"

    def __init__(self, *, seed: int = 0, workers: int | None = None) -> None:
        self.seed = seed
        self.workers = workers or os.cpu_count() or 1
        self.questions = 0
        """Bins that it was asked about."""
        self.simulated = 0
        """Bins that were not in the cache."""
        self._answers: OrderedDict[tuple[object, ...], Evaluation] = OrderedDict()

    @classmethod
    def for_profile(cls, _profile: Profile, *, seed: int = 0) -> TwinPredictor:
        """The twin; it needs no preparation, bins bring their own profile."""
        return cls(seed=seed)

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin; one row per bin, in order."""
        keyed = [canonical(workload, item) for item in bins]
        missing = {key: item for key, item in keyed if key not in self._answers}
        self.questions += len(bins)
        self.simulated += len(missing)
        if len(missing) > 1 and self.workers > 1:
            with ThreadPoolExecutor(self.workers) as pool:
                found = list(pool.map(lambda item: self._simulate(workload, item), missing.values()))
        else:
            found = [self._simulate(workload, item, self.workers) for item in missing.values()]
        self._answers.update(zip(missing, found, strict=True))
        rows = [self._answers[key] for key, _ in keyed]
        while len(self._answers) > MAX_CACHED:
            self._answers.popitem(last=False)
        return Evaluations.of(rows)

    def _simulate(self, workload: Workload, item: Bin, workers: int = 1) -> Evaluation:
        return judge(
            item.workload(workload),
            item.profile,
            item.settings,
            seed=self.seed,
            workers=workers,
        ).evaluation
