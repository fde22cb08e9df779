"""The shape of arrivals in JSON and YAML: processes, bursts and replayed traces."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from packer.arrival import Arrivals, Bursts, Kind, RequestTrace, stepped
from packer.blocks import Blocks
from packer.errors import ValidationError
from packer.io.schema import FileTable, parse

_REQUIRED = ("time_s", "adapter", "input_tokens", "output_tokens")
_OFTEN_ZERO = ("start_s", "step_s")  # Fields of a replayed trace that are left out of the file if they are 0.
_TRACE = (*_REQUIRED, "end_s", "sessions", "priority", *_OFTEN_ZERO)  # Fields of a replayed trace, without its blocks.


class BlocksTable(FileTable):
    """Ids of the full blocks of a trace's requests."""

    starts: list[int]
    ids: list[int]
    tokens: int


class ArrivalsTable(FileTable):
    """An arrival process; `time_s` and all fields below it describe a replayed trace."""

    kind: Kind = "poisson"
    cv: float = 1.0
    period_s: float = 300.0
    span: float = 4.0
    factors: list[float] = Field(default_factory=list)
    common: dict[str, Any] | None = None
    own: dict[str, Any] | None = None
    time_s: list[float] | None = None
    adapter: list[int] | None = None
    input_tokens: list[int] | None = None
    output_tokens: list[int] | None = None
    end_s: float | None = None
    start_s: float = 0.0
    step_s: float = 0.0
    blocks: BlocksTable | None = None
    sessions: list[int] | None = None
    priority: list[int] | None = None

    def arrivals(self) -> Arrivals:
        """The process as `Arrivals`."""
        trace, given = None, {name: getattr(self, name) for name in _TRACE}
        if all(given[name] is not None for name in _REQUIRED):
            blocks = None if self.blocks is None else Blocks(**dict(self.blocks))
            trace = RequestTrace(**given, blocks=blocks, notes=tuple(stepped(self.step_s)))
        elif any(given[name] is not None for name in (*_REQUIRED, "end_s")):
            raise ValidationError(f"Expected a trace to have {', '.join(_REQUIRED[:-1])} and {_REQUIRED[-1]}.")
        tables = {"common": self.common, "own": self.own}.items()
        bursts = {key: parse(Bursts, each, f"arrivals.{key}") for key, each in tables if each is not None}
        return Arrivals(self.kind, self.cv, self.period_s, self.span, tuple(self.factors), trace, **bursts)


def arrivals_to_dict(arrivals: Arrivals) -> dict[str, Any]:
    """An arrival process in the shape of the file."""
    data: dict[str, Any] = {key: getattr(arrivals, key) for key in ("kind", "cv", "period_s", "span")}
    data["factors"] = list(arrivals.factors)
    for key, bursts in (("common", arrivals.common), ("own", arrivals.own)):
        if bursts is not None:
            data[key] = {"cv": bursts.cv, "scales": [list(pair) for pair in bursts.scales]}
    for key in (*_REQUIRED, "end_s", "blocks", "sessions", "priority") if arrivals.trace is not None else ():
        value = getattr(arrivals.trace, key)
        if isinstance(value, Blocks):
            value = {"starts": value.starts.tolist(), "ids": value.ids.tolist(), "tokens": value.tokens}
        if value is not None:
            data[key] = value.tolist() if isinstance(value, np.ndarray) else value
    found = {key: getattr(arrivals.trace, key, 0.0) for key in _OFTEN_ZERO}
    return data | {key: value for key, value in found.items() if value}
