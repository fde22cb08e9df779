"""Fewest GPUs that survive more load, or several loads."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.errors import FileFormatError, ValidationError
from packer.io.files import read_text
from packer.objectives.base import Objective, Scenario
from packer.workload import Workload

_SMALLEST_RATE = 1e-6


@dataclass(frozen=True)
class Headroom(Objective):
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

    def __post_init__(self) -> None:
        checks.real("factor", self.factor, low=0.0, high=1e3, open_low=True)

    @property
    def symmetric(self) -> bool:
        """Whether no file of rates may tell equal adapters apart."""
        return not self.rates

    def scenarios(self, workload: Workload) -> Sequence[Scenario]:
        """The fleet as it is, and at each load."""
        nominal = Scenario(workload)
        if not self.rates:
            return (nominal, Scenario(workload, self.factor, self._times("the rates")))
        loads = zip(read_names(self.rates), read_rates(self.rates, workload), strict=True)
        return (
            nominal,
            *(
                Scenario(with_rates(workload, rates), self.factor, self._times(repr(name)))
                for name, rates in loads
            ),
        )

    def _times(self, load: str) -> str:
        return f"at {load}" if self.factor == 1.0 else f"at {self.factor:g} times {load}"


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
