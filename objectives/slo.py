"""Fewest GPUs within latency limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.bin import Bin, Evaluations
from packer.errors import IncompatibleError, ValidationError
from packer.workload import Workload


@dataclass(frozen=True)
class Slo:
    """Minimise the number of GPUs such that each keeps the limits that are given, all in ms."""

    mean_ttft_ms: float | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    mean_itl_ms: float | None = None
    p99_itl_ms: float | None = None

    name = "slo"
    fixed_gpus = False

    def __post_init__(self) -> None:
        if not self.limits:
            listed = ", ".join(item.name for item in fields(self))
            raise ValidationError(
                f"The objective 'slo' needs at least one limit (slo:KEY=MS,…) of: {listed}."
            )
        for key, value in self.limits.items():
            checks.real(key, value, low=0.0, open_low=True)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {key: value for key, value in values.items() if value is not None}

    def admissible(self, evaluations: Evaluations) -> npt.NDArray[np.bool_]:
        """Not starved, no memory error, and within every limit.

        Raises
        ------
        IncompatibleError
            The predictor gives no figure for one of the limits.
        """
        ok = evaluations.feasible
        for key, limit in self.limits.items():
            figures = getattr(evaluations, key)
            if ok.any() and np.isnan(figures[evaluations.feasible]).all():
                raise IncompatibleError(f"The predictor gives no {key}; take one that does (twin).")
            ok = ok & (np.nan_to_num(figures, nan=np.inf) <= limit)
        return ok

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(GPUs,)."""
        return (float(len(bins)),)
