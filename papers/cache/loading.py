"""How adapters come from host memory to the GPU: what waits for a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from packer import checks, registry

(BLOCKING, PREFETCH, ASYNC, CPU_ASSIST) = range(4)
"""The server waits; it waits, and brings those of the next batch before; only the request waits; the CPU computes
meanwhile.
"""


@dataclass(frozen=True, slots=True)
class Blocking:
    """The step that admits a request loads its adapter first."""

    mode: ClassVar[int] = BLOCKING


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Blocking; before the queue is looked at, the adapters of its first requests are loaded during the decodes."""

    mode: ClassVar[int] = PREFETCH


@dataclass(frozen=True, slots=True)
class Async:
    """A load starts when its request arrives; the request is passed over until it is there, others go on."""

    mode: ClassVar[int] = ASYNC


@dataclass(frozen=True, slots=True)
class CpuAssist:
    """CaraServe's: the CPU computes the adapter's part of the prefill while the adapter is loaded.

    Prompt tokens whose adapter is on its way take `factor` times as long, and the prefill lasts at least as long
    as the loads. The paper (arXiv 2401.11240) gives no such number; 1.25 is an assumption.
    """

    mode: ClassVar[int] = CPU_ASSIST
    factor: float = 1.25

    def __post_init__(self) -> None:
        checks.real("factor", self.factor, low=1.0)


@dataclass(frozen=True, slots=True)
class NoLoading:
    """Loads cost nothing."""

    mode: ClassVar[int] = BLOCKING


Loading = Blocking | Prefetch | Async | CpuAssist | NoLoading
MODES: dict[str, type[Loading]] = {
    "blocking": Blocking, "prefetch": Prefetch, "async": Async, "cpu-assist": CpuAssist, "none": NoLoading,
}  # fmt: skip
"""Modes by name."""


def loading_of(spec: str) -> Loading:
    """The mode that a text names, with parameters as in "cpu-assist:factor=1.25".

    Raises `UnknownNameError`: there is no such mode; `ValidationError`: it has no such parameter, or the value breaks
    a rule.
    """
    mode: Loading = registry.make("loading mode", spec, MODES)
    return mode
