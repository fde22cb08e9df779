"""A cache of evaluations by a bin's content: adapters of equal rank, rate and lengths are interchangeable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import numpy as np

from packer.adapter import Adapter
from packer.arrays import FloatArray, IntArray
from packer.bin import Bin
from packer.evaluation import Evaluation, Evaluations
from packer.memo import Memo
from packer.workload import Workload

Factors = FloatArray | float
MAX_STORED = 200_000
_CONTENT = attrgetter(*(item.name for item in fields(Adapter) if item.name != "name"))


def content_classes(workload: Workload) -> IntArray:
    """Return the class of each adapter, int64 (n,): adapters that differ only in their names have the same class.
    Classes are numbered by falling rank, then rate. Each adapter of a replayed trace is a class of its own."""
    if workload.arrivals.trace is not None:
        return np.arange(len(workload), dtype=np.int64)
    ids: dict[object, int] = {}
    raw = np.array([ids.setdefault(_CONTENT(each), len(ids)) for each in workload.adapters], dtype=np.int64)
    first = np.unique(raw, return_index=True)[1]
    outputs, inputs = workload.mean_output_tokens[first], workload.mean_input_tokens[first]
    order = np.lexsort((outputs, inputs, -workload.rates[first], -workload.ranks[first]))
    number = np.empty(len(first), dtype=np.int64)
    number[order] = np.arange(len(first))
    return number[raw]


@dataclass(frozen=True)
class _Fleet:
    """Classes of a workload, its adapters sorted by class, the start of each class, and the stored evaluations."""

    classes: IntArray
    members: IntArray
    start: IntArray
    stored: OrderedDict[tuple[object, ...], Evaluation]

    @classmethod
    def of(cls, workload: Workload) -> _Fleet:
        classes = content_classes(workload)
        start = np.concatenate([[0], np.cumsum(np.bincount(classes))[:-1]])
        return cls(classes, np.argsort(classes, kind="stable"), start, OrderedDict())

    def content(self, item: Bin) -> tuple[IntArray, tuple[float, ...]]:
        """Return the classes of a bin's adapters, sorted, and their shares."""
        here = self.classes[list(item.adapters)]
        if not item.is_split:
            return np.sort(here), ()
        order = np.lexsort((np.array(item.shares), here))
        return here[order], tuple(item.shares[k] for k in order)

    def canonical(self, item: Bin, here: IntArray, shares: tuple[float, ...]) -> Bin:
        """Return the bin that is evaluated for all bins of this content."""
        run = np.arange(len(here)) - np.searchsorted(here, here)  # 0, 1, … within a class
        return replace(item, adapters=tuple(self.members[self.start[here] + run].tolist()), shares=shares)


class ContentCache:
    """Cache a function that evaluates bins: it is called once per content of a bin and factor of its rates.

    Bins of equal content get equal figures, whatever their adapters are called. `requested` counts the bins of
    all calls, `evaluated` the bins that were passed to the function.

    `evaluate`: (workload, bins, factors float64 (n,)) → evaluations.
    """

    def __init__(self, evaluate: Callable[[Workload, Sequence[Bin], FloatArray], Evaluations]) -> None:
        self._evaluate = evaluate
        self.requested = 0
        self.evaluated = 0
        self._fleet = Memo(_Fleet.of)

    def evaluate(self, workload: Workload, bins: Sequence[Bin], factors: Factors = 1.0) -> Evaluations:
        """Figures of each bin at its rates times its factor; one row per bin, in order."""
        fleet = self._fleet(workload)
        scale = np.broadcast_to(np.asarray(factors, dtype=np.float64), len(bins)).tolist()
        keys, missing = [], {}
        for item, factor in zip(bins, scale, strict=True):
            here, shares = fleet.content(item)
            keys.append((factor, here.tobytes(), shares, item.settings, item.profile))
            if keys[-1] not in fleet.stored and keys[-1] not in missing:
                missing[keys[-1]] = fleet.canonical(item, here, shares), factor
        if missing:
            new = [item for item, _ in missing.values()]
            found = self._evaluate(workload, new, np.array([factor for _, factor in missing.values()]))
            fleet.stored.update(zip(missing, found, strict=True))
        self.requested += len(bins)
        self.evaluated += len(missing)
        rows = [fleet.stored[key] for key in keys]
        while len(fleet.stored) > MAX_STORED:
            fleet.stored.popitem(last=False)
        return Evaluations.of(rows)
