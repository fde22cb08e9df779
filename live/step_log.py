"""Read the log of engine steps that `packer.live.inside.packer_step_worker` writes."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import numpy as np

from packer.arrays import BoolArray, FloatArray
from packer.errors import FileFormatError, reader
from packer.io.files import read_text

MAX_PERIOD_MS = 2_000.0  # Maximum time of a step; longer gaps are pauses of the machine.


@dataclass(frozen=True, eq=False)
class Steps:
    """Engine steps, every field float64 (n,); see the writer for the columns."""

    start_s: FloatArray
    model_ms: FloatArray
    follows: FloatArray
    decodes: FloatArray
    prefills: FloatArray
    prefill_tokens: FloatArray
    kv_tokens: FloatArray
    adapters: FloatArray
    sum_ranks: FloatArray
    host_loads: FloatArray
    host_ranks: FloatArray
    host_ms: FloatArray
    disk_loads: FloatArray
    disk_ranks: FloatArray
    disk_ms: FloatArray

    def __len__(self) -> int:
        return len(self.start_s)

    def where(self, keep: BoolArray) -> Steps:
        """Some of the steps."""
        return Steps(*(getattr(self, f.name)[keep] for f in fields(self)))

    def periods_ms(self) -> FloatArray:
        """Return the time from each step's start to the next step's, (n,); NaN if the engine may have been idle. This
        is the whole step: scheduling, model, sampling and output."""
        periods = np.full(len(self), np.nan)
        if len(self) > 1:
            gaps = np.diff(self.start_s) * 1e3
            periods[:-1] = np.where((self.follows[1:] > 0) & (gaps < MAX_PERIOD_MS), gaps, np.nan)
        return periods


@reader
def read_steps(path: str | os.PathLike[str]) -> Steps:
    """Read a log without a last line that was cut short; raises `FileFormatError`."""
    lines = read_text(path).splitlines()
    names = [f.name for f in fields(Steps)]
    if lines[0].split(",") != names:
        raise FileFormatError(f"expected the columns {','.join(names)}, got {lines[0][:200]}.")
    rows = [line.split(",") for line in lines[1:]]
    if rows and len(rows[-1]) != len(names):
        rows.pop()
    try:
        table = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
    except ValueError as error:
        raise FileFormatError(f"expected rows of {len(names)} numbers: {error}.") from None
    return Steps(*table.T)
