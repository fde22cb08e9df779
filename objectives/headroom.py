"""Fewest GPUs that hold at a higher load, or at several loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer import checks
from packer.adapter import IDLE_RATE
from packer.arrays import FloatArray
from packer.errors import FileFormatError, reader, shown
from packer.io.files import read_text
from packer.io.tables import by_adapter, csv_rows
from packer.objectives.base import Objective, Scenario
from packer.words import counted, listed
from packer.workload import Workload


@dataclass(frozen=True)
class Headroom(Objective):
    """Minimise the number of GPUs such that no server starves at any of the loads.

    `factor`: every rate is multiplied by this, > 0.
    `rates`: a CSV file `adapter,<load>,<load>,…` with the rates (req/s) of each adapter at each load, for instance
    the hours of a day; `factor` multiplies these rates too.
    """

    factor: float = 1.25
    rates: str = ""

    name = "headroom"

    def __post_init__(self) -> None:
        checks.real("factor", self.factor, low=0.0, high=1e3, open_low=True)

    @property
    def symmetric(self) -> bool:
        """Whether equal adapters can be exchanged: not with a file of rates, which may distinguish them."""
        return not self.rates

    def fleet(self, workload: Workload) -> Workload:
        """The fleet to plan; raises `FileFormatError` if the rates are not those of its adapters."""
        if self.rates:
            read_rates(self.rates, workload)
        return super().fleet(workload)

    def scenarios(self, workload: Workload) -> Sequence[Scenario]:
        """The fleet as given, then the fleet at each load."""
        nominal = Scenario(workload)
        if not self.rates:
            return (nominal, Scenario(workload, self.factor, self._times("the rates")))
        rates = read_rates(self.rates, workload, part=True)
        loads = ((repr(name), with_rates(workload, each)) for name, each in rates.items())
        return (nominal, *(Scenario(fleet, self.factor, self._times(name)) for name, fleet in loads))

    def _times(self, load: str) -> str:
        return f"at {load}" if self.factor == 1.0 else f"at {self.factor:g} times {load}"


def with_rates(workload: Workload, rates: FloatArray) -> Workload:
    """The fleet with these rates, float64 (n,), req/s, each raised to at least `IDLE_RATE`."""
    pairs = zip(workload.adapters, rates.tolist(), strict=True)
    adapters = tuple(replace(adapter, rate=max(rate, IDLE_RATE)) for adapter, rate in pairs)
    return replace(workload, adapters=adapters)


@reader
def read_rates(path: str, workload: Workload, *, part: bool = False) -> dict[str, FloatArray]:
    """Rates of the fleet by load, from a CSV file with one row per adapter and one column per load.

    `part`: the workload is a part of the fleet, whose other adapters have rows too.
    Raises `FileFormatError`: a cell is not a rate, an adapter of the fleet has no row or several, or a row is of an
    adapter that the fleet does not have.
    """
    names, rows = csv_rows(read_text(path))
    if len(names) < 2 or names[0] != "adapter" or {"rank", "rate"} <= {*names}:
        raise FileFormatError("expected columns adapter,<load>,<load>,…", row=1)
    loads = names[1:]
    found = {name: [row.real(load, low=0.0, high=1e6) for load in loads] for name, row in by_adapter(rows)}
    missing = [name for name in workload.names if name not in found]
    if missing:
        raise FileFormatError(f"there are no rates for adapter {shown(missing[0])}.")
    unknown = [] if part else [shown(name) for name in found if name not in set(workload.names)]
    if unknown:
        rule = f"there are rates for {counted(len(unknown), 'adapter')} that the fleet does not have"
        raise FileFormatError(f"{rule}: {listed(unknown, 5)}.")
    return dict(zip(loads, np.array([found[name] for name in workload.names]).T, strict=True))
