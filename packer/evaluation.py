"""Figures that a predictor gives for servers. Each is declared once, with its unit and its name in tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, astuple, dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

STARVATION_THRESHOLD = 0.9  # Servers that complete less of their tokens are starved (arXiv 2602.24044, section 3).

Number = TypeVar("Number")
Flag = TypeVar("Flag")


@dataclass(frozen=True, slots=True)
class Label:
    """How a figure is shown: name, unit, decimals. `column`: its name in column headers, if not `text`."""

    text: str
    unit: str = ""
    digits: int = 0
    column: str | None = None

    @property
    def title(self) -> str:
        """The name as the title of a chart."""
        return self.text[0].upper() + self.text[1:]

    @property
    def head(self) -> str:
        """Name and unit for the header of a column."""
        return f"{self.text if self.column is None else self.column} {self.unit}".strip()


def mean_of(values: npt.ArrayLike, weights: npt.ArrayLike) -> float:
    """Weighted mean of the values that are not NaN; NaN if there are none. `values`, `weights`: float64 (n,)."""
    value, weight = np.asarray(values, np.float64), np.asarray(weights, np.float64)
    known = ~np.isnan(value) & (weight > 0.0)
    return float(np.average(value[known], weights=weight[known])) if known.any() else math.nan


_NONE: Any = 0.0
_ASSUMED: Any = True
_UNKNOWN: Any = math.nan


def _shown(text: str, unit: str = "", digits: int = 0, column: str | None = None) -> dict[str, Label]:
    return {"label": Label(text, unit, digits, column)}


@dataclass(frozen=True, slots=True)
class _Figures(Generic[Number, Flag]):
    """The figures of one server as scalars, or of many servers as columns."""

    offered_tok_s: Number = field(metadata=_shown("offered load", "tok/s", column="offered"))
    total_token_throughput: Number = field(metadata=_shown("throughput", "tok/s", column=""))
    starved: Flag = field(metadata=_shown("starved"))
    memory_error: Flag = field(metadata=_shown("memory error"))
    mean_ttft_ms: Number = field(metadata=_shown("mean TTFT", "ms", column="TTFT"))
    median_ttft_ms: Number = field(metadata=_shown("median TTFT", "ms"))
    p99_ttft_ms: Number = field(metadata=_shown("p99 TTFT", "ms"))
    mean_tpot_ms: Number = field(metadata=_shown("mean TPOT", "ms", 1))
    mean_itl_ms: Number = field(metadata=_shown("mean ITL", "ms", 1, "ITL"))
    p99_itl_ms: Number = field(metadata=_shown("p99 ITL", "ms", 1))
    kv_cache_tokens: Number = field(metadata=_shown("KV cache", "tokens"))
    starvation_probability: Number = field(metadata=_shown("probability of starvation", digits=2))
    tuning_tok_s: Number = field(default=_NONE, metadata=_shown("training", "tok/s"))
    worst_adapter_ttft_ms: Number = field(
        default=_UNKNOWN, metadata=_shown("worst adapter's p95 TTFT", "ms", column="worst p95")
    )
    slo_used: Number = field(default=_UNKNOWN, metadata=_shown("share of the latency limits used", digits=2))
    slo_attainment: Number = field(
        default=_UNKNOWN, metadata=_shown("requests within limits", digits=3, column="in limits")
    )
    goodput_tok_s: Number = field(default=_UNKNOWN, metadata=_shown("goodput", "tok/s"))
    stable: Flag = field(default=_ASSUMED, metadata=_shown("stable"))


@dataclass(frozen=True, slots=True)
class Evaluation(_Figures[float, bool]):
    """The figures that a predictor gives for one server.

    Latencies are NaN if the server does not start. `starvation_probability` is 0 or 1 if the predictor does not
    estimate it. `tuning_tok_s`: throughput of fine-tuning on the server. The figures of `SIMULATED` are NaN if the
    predictor does not simulate requests: the highest p95 TTFT of an adapter, NaN if the server gives an adapter no
    answer; the share of its latency limits (`Workload.slo`) that the adapter nearest to them uses, infinite if the
    server starves or its queue grows; the share of requests within the limits; the throughput of these requests.
    `stable`: the queue does not grow (`Run.stable`); true if the predictor does not evaluate queues.
    Two evaluations are equal if all figures are, where NaN equals NaN.
    """

    def __eq__(self, other: object) -> bool:
        return self._known() == other._known() if isinstance(other, Evaluation) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._known())

    def _known(self) -> tuple[float | None, ...]:
        return tuple(None if value != value else value for value in astuple(self))

    @property
    def feasible(self) -> bool:
        """Whether the server neither starves nor has a memory error."""
        return not (self.starved or self.memory_error)

    @property
    def served_share(self) -> float:
        """Throughput / offered load."""
        return self.total_token_throughput / self.offered_tok_s if self.offered_tok_s else 1.0

    def to_show(self) -> Evaluation:
        """The figures with a highest p95 TTFT of NaN if no request completed, where it is 0 for searches."""
        return replace(self, worst_adapter_ttft_ms=math.nan) if math.isnan(self.mean_ttft_ms) else self


@dataclass(frozen=True, slots=True, eq=False)
class Evaluations(_Figures[npt.NDArray[np.float64], npt.NDArray[np.bool_]]):
    """`Evaluation` of n servers as columns: every field is an array (n,), bool or float64."""

    def __post_init__(self) -> None:
        n = len(self.starved)
        for name in _OPTIONAL:
            value = getattr(self, name)
            if not isinstance(value, np.ndarray):
                object.__setattr__(self, name, np.broadcast_to(value, n))

    @classmethod
    def of(cls, rows: Sequence[Evaluation]) -> Evaluations:
        """Columns from rows. Raises `ValueError`: a figure is text."""
        table = np.array([_FIGURES_OF(row) for row in rows], dtype=np.float64).reshape(-1, len(FIGURES))
        columns: dict[str, Any] = dict(zip(FIGURES, table.T.copy(), strict=True))
        return cls(**columns | {name: columns[name].astype(np.bool_) for name in FLAGS})

    @property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """Whether each server neither starves nor has a memory error, bool (n,)."""
        return ~(self.starved | self.memory_error)

    @property
    def idle(self) -> npt.NDArray[np.bool_]:
        """Whether no request completed and none waited, bool (n,): such a server keeps every limit."""
        return np.equal(self.worst_adapter_ttft_ms, 0.0)

    def __len__(self) -> int:
        return len(self.starved)

    def __getitem__(self, i: int) -> Evaluation:
        return _row(column[i].item() for column in _FIGURES_OF(self))

    def __iter__(self) -> Iterator[Evaluation]:
        return map(_row, zip(*(column.tolist() for column in _FIGURES_OF(self)), strict=True))


def _row(figures: Iterable[Any]) -> Evaluation:
    """A row of all figures; one object stands for every NaN, so that rows with equal figures are equal."""
    row: list[Any] = [math.nan if value != value else value for value in figures]
    return Evaluation(*row)


class AdapterFigures(NamedTuple):
    """Figures of each adapter of a server or plan, float64 (n,) each; NaN if none of its requests completed.

    Mean and p95 TTFT in ms (an adapter with few requests has the p95 of its server; 0 for one that sent nothing, or
    only requests that the end of the hour cut off), mean ITL in ms, the share of requests within the adapter's limits
    (`Workload.slo`), and the share of the limits used: above 1 they are broken.
    """

    mean_ttft_ms: npt.NDArray[np.float64]
    p95_ttft_ms: npt.NDArray[np.float64]
    mean_itl_ms: npt.NDArray[np.float64]
    slo_attainment: npt.NDArray[np.float64]
    slo_used: npt.NDArray[np.float64]

    @property
    def silent(self) -> npt.NDArray[np.bool_]:
        """Which adapters get no answer to any of their requests, bool (n,)."""
        return np.isnan(self.mean_ttft_ms) & np.isnan(self.p95_ttft_ms)

    def to_show(self) -> AdapterFigures:
        """The figures with a p95 of NaN for all adapters without completed requests, not only those without answer; and
        of the limits used, unless they are infinite."""
        none = np.isnan(self.mean_ttft_ms)
        used = np.where(none & np.isfinite(self.slo_used), np.nan, self.slo_used)
        return self._replace(p95_ttft_ms=np.where(none, np.nan, self.p95_ttft_ms), slo_used=used)


FIGURES: Mapping[str, Label] = {item.name: item.metadata["label"] for item in fields(Evaluation)}
"""Every figure of a server by its name, in the order of tables and files."""

_FIGURES_OF = attrgetter(*FIGURES)
_OPTIONAL = tuple(item.name for item in fields(Evaluation) if item.default is not MISSING)


@lru_cache(maxsize=256)
def unsimulated(n: int) -> tuple[npt.NDArray[np.float64], ...]:
    """Read-only columns of n servers for `tuning_tok_s` and `SIMULATED`, cached: searches need thousands of them."""
    return (np.broadcast_to(_NONE, n), *[np.broadcast_to(_UNKNOWN, n)] * len(SIMULATED))


PLAN_FIGURES: Mapping[str, Label] = {
    "p95_ttft_ms": Label("p95 TTFT", "ms", column="TTFT p95"),
    "worst_adapter_ttft_ms": Label("worst adapter's p95 TTFT", "ms", column="worst adapter"),
    **{name: FIGURES[name] for name in ("mean_itl_ms", "slo_attainment", "goodput_tok_s")},
    "price_per_hour": Label("price per hour", digits=2, column="price/h"),
}
"""Every figure of a plan over all its requests, by its name in `packer.planning.frontier.FrontierPoint`."""

SIMULATED = ("worst_adapter_ttft_ms", "slo_used", "slo_attainment", "goodput_tok_s")
"""Figures that only a simulation of requests gives."""

WHOLE_GOAL: Mapping[str, float] = {"slo_used": 1.0}  # Limits of servers held to all limits of the fleet's goal.

FLAGS = ("starved", "memory_error", "stable")  # Figures that are true or false.
