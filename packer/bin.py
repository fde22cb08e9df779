"""One vLLM server on one GPU, and what a predictor says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.errors import ValidationError, shown
from packer.profile import Profile
from packer.settings import Settings
from packer.workload import Workload

STARVATION_THRESHOLD = 0.9
"""Starved: throughput below this share of the offered load (arXiv 2602.24044, section 3)."""


@dataclass(frozen=True, slots=True)
class Bin:
    """A set of adapters on one server.

    Parameters
    ----------
    adapters
        Indices into the workload, unique.
    settings
        How the server is started, of the kind that the profile takes: `profile.settings(max_loras,
        max_lora_rank)`.
    profile
        What the server is.
    shares
        Part of each adapter's rate that comes here, in ]0, 1]; 1 unless the adapter is replicated. Left out, all
        are 1.
    """

    adapters: tuple[int, ...]
    settings: Settings
    profile: Profile
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.adapters or len(set(self.adapters)) != len(self.adapters) or min(self.adapters) < 0:
            raise ValidationError("Expected a bin to hold at least one adapter, each once.")
        kind = self.profile.memory.settings_kind
        if type(self.settings) is not kind:
            raise ValidationError(
                f"Expected the settings of {self.profile.name} to be {kind.__name__}, "
                f"got {shown(self.settings)}."
            )
        if not self.shares:
            object.__setattr__(self, "shares", (1.0,) * len(self.adapters))
        elif self.is_split:
            if len(self.shares) != len(self.adapters):
                raise ValidationError("Expected one share for each adapter of the bin.")
            for share in self.shares:
                checks.real("a share", share, low=0.0, high=1.0, open_low=True)

    @property
    def max_loras(self) -> int:
        """Adapters on the GPU at once."""
        return self.settings.max_loras

    @property
    def max_lora_rank(self) -> int:
        """Largest rank that the server takes; the rank of every slot."""
        return self.settings.max_lora_rank

    @property
    def is_split(self) -> bool:
        """True if some adapter has only part of its rate here."""
        return self.shares != (1.0,) * len(self.adapters)

    def workload(self, fleet: Workload) -> Workload:
        """What this server gets of the fleet's traffic."""
        whole = not self.is_split and self.adapters == tuple(range(len(fleet)))
        return fleet if whole else fleet.subset(self.adapters, self.shares)

    def rates(self, fleet: Workload) -> npt.NDArray[np.float64]:
        """Rate of each adapter here, float64 (n,), req/s."""
        rates = fleet.rates[list(self.adapters)]
        return rates * np.array(self.shares) if self.is_split else rates

    def offered_tok_s(self, fleet: Workload) -> float:
        """Offered load of this server, tok/s."""
        index = list(self.adapters)
        tokens = fleet.mean_input_tokens[index] + fleet.mean_output_tokens[index]
        return float(self.rates(fleet) @ tokens)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a predictor says of one bin; latencies are NaN where the server does not start.

    `starvation_probability` is 0 or 1 from a judge that doesn't estimate it. `feasible` is neither starved
    nor a memory error.
    """

    offered_tok_s: float
    total_token_throughput: float
    starved: bool
    memory_error: bool
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float
    mean_itl_ms: float
    p99_itl_ms: float
    kv_cache_tokens: float
    starvation_probability: float

    @property
    def feasible(self) -> bool:
        """Neither starved nor a memory error."""
        return not (self.starved or self.memory_error)

    @property
    def served_share(self) -> float:
        """Throughput / offered load."""
        return self.total_token_throughput / self.offered_tok_s if self.offered_tok_s else 1.0


@dataclass(frozen=True, eq=False)
class Evaluations:
    """`Evaluation` of n bins as columns: every field is an array (n,), bool or float64."""

    offered_tok_s: npt.NDArray[np.float64]
    total_token_throughput: npt.NDArray[np.float64]
    starved: npt.NDArray[np.bool_]
    memory_error: npt.NDArray[np.bool_]
    mean_ttft_ms: npt.NDArray[np.float64]
    median_ttft_ms: npt.NDArray[np.float64]
    p99_ttft_ms: npt.NDArray[np.float64]
    mean_tpot_ms: npt.NDArray[np.float64]
    mean_itl_ms: npt.NDArray[np.float64]
    p99_itl_ms: npt.NDArray[np.float64]
    kv_cache_tokens: npt.NDArray[np.float64]
    starvation_probability: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[Evaluation]) -> Evaluations:
        """Columns from rows."""
        columns = {}
        for column in fields(cls):
            kind = bool if column.name in ("starved", "memory_error") else np.float64
            columns[column.name] = np.array([getattr(row, column.name) for row in rows], dtype=kind)
        return cls(**columns)

    @property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """Neither starved nor a memory error, bool (n,)."""
        return ~(self.starved | self.memory_error)

    def __len__(self) -> int:
        return len(self.starved)

    def __getitem__(self, i: int) -> Evaluation:
        row: dict[str, Any] = {c.name: getattr(self, c.name)[i].item() for c in fields(self)}
        return Evaluation(**row)

    def __iter__(self) -> Iterator[Evaluation]:
        return (self[i] for i in range(len(self)))
