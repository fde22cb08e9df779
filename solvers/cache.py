"""Answers of a predictor, remembered by what a bin holds rather than by which adapters those are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluation, Evaluations
from packer.predictors.base import Predictor
from packer.workload import Workload

IntArray = npt.NDArray[np.int64]
_KEEP_FLEETS = 16


def content_classes(workload: Workload) -> IntArray:
    """Class of each adapter, int64 (n,): equal where rank, rate and lengths are, numbered by falling rank
    and rate. Adapters of a replayed trace are each their own class.
    """
    if workload.arrivals.trace is not None:
        return np.arange(len(workload), dtype=np.int64)
    ids: dict[object, int] = {}
    raw = np.array(
        [
            ids.setdefault((a.rank, a.rate, a.input_tokens, a.output_tokens), len(ids))
            for a in workload.adapters
        ],
        dtype=np.int64,
    )
    first = np.unique(raw, return_index=True)[1]
    order = np.lexsort(
        (
            workload.mean_output_tokens[first],
            workload.mean_input_tokens[first],
            -workload.rates[first],
            -workload.ranks[first],
        )
    )
    number = np.empty(len(first), dtype=np.int64)
    number[order] = np.arange(len(first))
    return number[raw]


@dataclass(frozen=True)
class _Fleet:
    """What is remembered of one workload: its classes, and one answer for each content of a bin."""

    workload: Workload
    classes: IntArray
    members: IntArray  # adapters sorted by class
    start: IntArray  # where each class starts in `members`
    answers: dict[object, Evaluation] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload) -> _Fleet:
        classes = content_classes(workload)
        counts = np.bincount(classes)
        start = np.concatenate([[0], np.cumsum(counts)[:-1]])
        return cls(workload, classes, np.argsort(classes, kind="stable"), start)

    def canonical(self, item: Bin) -> tuple[object, Bin]:
        """Key of a bin's content, and the bin of the same content that is asked for all of its kind."""
        here = self.classes[list(item.adapters)]
        shares = item.shares
        if item.is_split:
            order = np.lexsort((np.array(shares), here))
            here = here[order]
            shares = tuple(shares[k] for k in order)
        else:
            here = np.sort(here)
        key = (here.tobytes(), shares, item.settings, item.profile)
        run = np.arange(len(here)) - np.searchsorted(here, here)  # 0, 1, … within a class
        adapters = tuple(self.members[self.start[here] + run].tolist())
        return key, Bin(adapters, item.settings, item.profile, shares)


class CachedPredictor:
    """A predictor that is asked once about each content of a bin, so that equal bins get equal answers.

    `questions` counts the bins that it was asked about, `asked` those that reached the inner predictor.
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.name = predictor.name
        self.questions = 0
        self.asked = 0
        self._fleets: list[_Fleet] = []

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin; one row per bin, in order."""
        fleet = self._fleet(workload)
        keyed = [fleet.canonical(item) for item in bins]
        missing = {key: item for key, item in keyed if key not in fleet.answers}
        if missing:
            found = self.predictor.evaluate(workload, list(missing.values()))
            fleet.answers.update(zip(missing, found, strict=True))
        self.questions += len(bins)
        self.asked += len(missing)
        return Evaluations.of([fleet.answers[key] for key, _ in keyed])

    def _fleet(self, workload: Workload) -> _Fleet:
        for fleet in self._fleets:
            if fleet.workload is workload:
                return fleet
        self._fleets = [*self._fleets[-_KEEP_FLEETS + 1 :], _Fleet.of(workload)]
        return self._fleets[-1]
