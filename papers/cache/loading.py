"""How adapters come from host memory to the GPU: what waits for a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from packer import checks, registry

(BLOCKING, PREFETCH, ASYNC, CPU_ASSIST) = range(4)
MODES = {
    "blocking": BLOCKING,
    "prefetch": PREFETCH,
    "async": ASYNC,
    "cpu-assist": CPU_ASSIST,
    "none": BLOCKING,
}
"""Modes by name.

"blocking": the step that admits a request loads its adapter first. "prefetch": likewise, but before the queue is looked
at, the adapters of its first requests are loaded during the decodes. "async": a load starts when its request arrives;
the request is passed over until it is there, others go on. "cpu-assist": `CpuAssist`. "none": loads cost nothing.
"""


@dataclass(frozen=True, slots=True)
class Plain:
    """A mode without parameters."""

    factor: ClassVar[float] = 1.0


@dataclass(frozen=True, slots=True)
class CpuAssist:
    """CaraServe's: the CPU computes the adapter's part of the prefill while the adapter is loaded.

    Prompt tokens whose adapter is on its way take `factor` times as long, and the prefill lasts at least as long
    as the loads. The paper (arXiv 2401.11240) gives no such number; 1.25 is an assumption.
    """

    factor: float = 1.25

    def __post_init__(self) -> None:
        checks.real("factor", self.factor, low=1.0)


def loading_of(spec: str) -> tuple[int, float]:
    """The mode that a text names, as "cpu-assist:factor=1.25", and the factor on prompt tokens; 1 of other modes.

    Raises `UnknownNameError`: there is no such mode; `ValidationError`: it has no such parameter, or the value breaks
    a rule.
    """
    kinds = {name: CpuAssist if mode == CPU_ASSIST else Plain for name, mode in MODES.items()}
    made: CpuAssist | Plain = registry.make("loading mode", spec, kinds)
    return MODES[spec.partition(":")[0]], made.factor
