"""Fewest GPUs that survive more load, or several loads."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.bin import Bin, Evaluations
from packer.errors import FileFormatError, ValidationError
from packer.io.files import read_text
from packer.objectives.base import Judge
from packer.workload import Workload

_SMALLEST_RATE = 1e-6
_KEEP_FLEETS = 8


@dataclass(frozen=True)
class Headroom:
    """Minimise the number of GPUs such that none starves in any of the loads.

    Parameters
    ----------
    factor
        Every rate times this, > 0.
    rates
        A CSV file `adapter,<load>,<load>,…` with the rates (req/s) of each adapter at each load, for instance
        the hours of a day; the factor multiplies those too.
    """

    factor: float = 1.25
    rates: str = ""

    name = "headroom"
    fixed_gpus = False

    def __post_init__(self) -> None:
        checks.real("factor", self.factor, low=0.0, high=1e3, open_low=True)

    def judge(self, predictor: Judge) -> Judge:
        """The predictor at every load; a bin fails if it fails at one."""
        return LoadsJudge(predictor, self)

    def admissible(self, evaluations: Evaluations) -> npt.NDArray[np.bool_]:
        """Neither starved nor a memory error, at any load."""
        return evaluations.feasible

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(GPUs,)."""
        return (float(len(bins)),)

    def loads(self, workload: Workload) -> list[Workload]:
        """The fleet at each load."""
        if not self.rates:
            return [workload.scaled(self.factor)]
        return [with_rates(workload, column * self.factor) for column in read_rates(self.rates, workload)]

    def explain(self, judge: Judge, workload: Workload, bins: Sequence[Bin]) -> dict[int, str]:
        """At which load bins fail first and how, for people: bin → words; those that hold are left out."""
        names = read_names(self.rates) if self.rates else ["the rates"]
        found: dict[int, str] = {}
        for name, load in zip(names, self.loads(workload), strict=True):
            for k, row in enumerate(judge.evaluate(load, bins)):
                if not row.feasible:
                    found.setdefault(k, f"{self._times(name)}, {row.served_share:.0%} of the load is served")
        return found

    def _times(self, name: str) -> str:
        shown = repr(name) if self.rates else name
        return f"at {shown}" if self.factor == 1.0 else f"at {self.factor:g} times {shown}"


class LoadsJudge:
    """A judge whose verdict is the worst over the loads; its figures are those of the fleet as given."""

    def __init__(self, predictor: Judge, objective: Headroom) -> None:
        self.predictor, self.objective = predictor, objective
        self.name = predictor.name
        self._loads: list[tuple[Workload, list[Workload]]] = []

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin; one row per bin, in order."""
        figures = self.predictor.evaluate(workload, bins)
        for load in self._loads_of(workload):
            found = self.predictor.evaluate(load, bins)
            figures = replace(
                figures,
                starved=figures.starved | found.starved,
                memory_error=figures.memory_error | found.memory_error,
                starvation_probability=np.maximum(
                    figures.starvation_probability, found.starvation_probability
                ),
            )
        return figures

    def _loads_of(self, workload: Workload) -> list[Workload]:
        for known, loads in self._loads:
            if known is workload:
                return loads
        loads = self.objective.loads(workload)
        self._loads = [*self._loads[-_KEEP_FLEETS + 1 :], (workload, loads)]
        return loads


def with_rates(workload: Workload, rates: npt.NDArray[np.float64]) -> Workload:
    """The fleet with other rates, float64 (n,), req/s; idle ones keep a rate near 0."""
    adapters = [
        replace(adapter, rate=max(rate, _SMALLEST_RATE))
        for adapter, rate in zip(workload.adapters, rates.tolist(), strict=True)
    ]
    return replace(workload, adapters=tuple(adapters))


def read_names(path: str) -> list[str]:
    """Names of the loads in a file that `read_rates` takes, in the order of its columns."""
    return next(csv.reader(io.StringIO(read_text(path))))[1:]


def read_rates(path: str, workload: Workload) -> list[npt.NDArray[np.float64]]:
    """Rates of the fleet at each load, from a CSV file with one row per adapter and one column per load."""
    rows = list(csv.reader(io.StringIO(read_text(path))))
    if not rows or len(rows[0]) < 2 or rows[0][0] != "adapter":
        raise FileFormatError("expected columns adapter,<load>,<load>,…", path=path, row=1)
    found: dict[str, list[float]] = {}
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(rows[0]):
            raise FileFormatError(f"expected {len(rows[0])} cells, got {len(row)}.", path=path, row=number)
        for column, cell in zip(rows[0][1:], row[1:], strict=True):
            try:
                rate = checks.real("a rate", float(cell), low=0.0, high=1e6)
            except (ValueError, ValidationError):
                message = f"expected a rate >= 0 in req/s, got {cell[:80]!r}."
                raise FileFormatError(message, path=path, row=number, column=column) from None
            found.setdefault(row[0], []).append(rate)
    missing = [name for name in workload.names if name not in found]
    if missing:
        raise FileFormatError(f"there are no rates for adapter {missing[0]!r}.", path=path)
    table = np.array([found[name] for name in workload.names])
    if table.shape[1:] != (len(rows[0]) - 1,):
        raise FileFormatError("an adapter has more than one row.", path=path)
    return list(table.T)
