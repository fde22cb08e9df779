"""What an objective is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluations
from packer.workload import Workload


class Judge(Protocol):
    """Whoever judges bins, as an objective sees it (a predictor)."""

    name: str

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin of the fleet `workload`; one row per bin, in order."""
        ...


@runtime_checkable
class Objective(Protocol):
    """What a plan is good for.

    `name` is what the command line calls it. `fixed_gpus` True: the number of GPUs is given (`max_gpus`) and
    the solver spreads over all of them; False: the solver chooses how many to use, at most `max_gpus`.

    Parameters of an objective are the fields of its dataclass, so that `slo:mean_ttft_ms=500` works on the
    command line. Two more methods are used where an objective has them:

    `judge(predictor) -> predictor`
        Through whom every bin is judged instead, for instance at several loads.
    `supports(profiles) -> str | None`
        Why it can't be used with these GPU types, for people, or None if it can.
    """

    name: str
    fixed_gpus: bool

    def admissible(self, evaluations: Evaluations) -> npt.NDArray[np.bool_]:
        """Which bins a plan may contain, bool (n,): at least neither starved nor a memory error."""
        ...

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """What is minimised, lexicographically, of a complete plan."""
        ...
