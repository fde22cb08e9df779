"""What a predictor says of servers. Each figure is declared once, with its unit and the name that people see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

STARVATION_THRESHOLD = 0.9
"""Starved: completes less than this share of the tokens sent (arXiv 2602.24044, section 3)."""

Number = TypeVar("Number")
Flag = TypeVar("Flag")


@dataclass(frozen=True, slots=True)
class Label:
    """How a figure is shown: name, unit, decimals."""

    text: str
    unit: str = ""
    digits: int = 0

    @property
    def title(self) -> str:
        """The name at the head of a chart."""
        return self.text[0].upper() + self.text[1:]


def _shown(text: str, unit: str = "", digits: int = 0) -> dict[str, Label]:
    return {"label": Label(text, unit, digits)}


@dataclass(frozen=True, slots=True)
class _Figures(Generic[Number, Flag]):
    """The figures of one server, or of many as columns."""

    offered_tok_s: Number = field(metadata=_shown("offered load", "tok/s"))
    total_token_throughput: Number = field(metadata=_shown("throughput", "tok/s"))
    starved: Flag = field(metadata=_shown("starved"))
    memory_error: Flag = field(metadata=_shown("memory error"))
    mean_ttft_ms: Number = field(metadata=_shown("mean TTFT", "ms"))
    median_ttft_ms: Number = field(metadata=_shown("median TTFT", "ms"))
    p99_ttft_ms: Number = field(metadata=_shown("p99 TTFT", "ms"))
    mean_tpot_ms: Number = field(metadata=_shown("mean TPOT", "ms", 1))
    mean_itl_ms: Number = field(metadata=_shown("mean ITL", "ms", 1))
    p99_itl_ms: Number = field(metadata=_shown("p99 ITL", "ms", 1))
    kv_cache_tokens: Number = field(metadata=_shown("KV cache", "tokens"))
    starvation_probability: Number = field(metadata=_shown("probability of starvation", digits=2))
    tuning_tok_s: Number = field(default=0.0, metadata=_shown("training", "tok/s"))  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Evaluation(_Figures[float, bool]):
    """What a predictor says of one server.

    Latencies are NaN where the server does not start; `starvation_probability` is 0 or 1 from a predictor that
    doesn't estimate it. `tuning_tok_s`: tokens on which the server trains beside its requests.
    """

    @property
    def feasible(self) -> bool:
        """Neither starved nor a memory error."""
        return not (self.starved or self.memory_error)

    @property
    def served_share(self) -> float:
        """Throughput / offered load."""
        return self.total_token_throughput / self.offered_tok_s if self.offered_tok_s else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Evaluations(_Figures[npt.NDArray[np.float64], npt.NDArray[np.bool_]]):
    """`Evaluation` of n servers as columns: every field is an array (n,), bool or float64."""

    def __post_init__(self) -> None:
        if np.ndim(self.tuning_tok_s) == 0:
            object.__setattr__(self, "tuning_tok_s", np.full(len(self.starved), self.tuning_tok_s))

    @classmethod
    def of(cls, rows: Sequence[Evaluation]) -> Evaluations:
        """Columns from rows."""
        columns: dict[str, Any] = {
            name: np.array([getattr(row, name) for row in rows], dtype=bool if name in FLAGS else np.float64)
            for name in FIGURES
        }
        return cls(**columns)

    @property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """Neither starved nor a memory error, bool (n,)."""
        return ~(self.starved | self.memory_error)

    def __len__(self) -> int:
        return len(self.starved)

    def __getitem__(self, i: int) -> Evaluation:
        row: dict[str, Any] = {name: getattr(self, name)[i].item() for name in FIGURES}
        return Evaluation(**row)

    def __iter__(self) -> Iterator[Evaluation]:
        return (self[i] for i in range(len(self)))


FIGURES: Mapping[str, Label] = {item.name: item.metadata["label"] for item in fields(Evaluation)}
"""Every figure of a server by its name, in the order of tables and files."""

FLAGS = ("starved", "memory_error")
"""Figures that are true or false."""
