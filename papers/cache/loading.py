"""How adapters come from host memory to the GPU: what waits for a load."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class CpuAssist:
    """CaraServe's: the CPU computes the adapter's part of the prefill while the adapter is loaded.

    As section 4 of arXiv 2401.11240 describes it. A prompt of L tokens takes ceil(L / `core_tokens`) cores, which
    divide its tokens among them; each multiplies and adds at `core_gflop_s`. A machine has `cores`, in equal parts
    for its servers. Where the misses of a prefill need more than there are, they take turns. A layer is done when
    GPU and CPU are; a request is the GPU's alone as soon as its adapter is there, behind those before it. The
    prefill lasts at least as long as the loads, and `sync_ms` more for the exchange between CPU and GPU, which is
    below 1 ms (Figure 17).

    The speed of a core is not published. 192 cores for 8 A10 and 16 tokens are the paper's; 26 GFLOP/s is half of
    the peak of one of the two threads of an AVX2 core at 3.3 GHz.
    """

    cores: int = 192
    core_tokens: int = 16
    core_gflop_s: float = 26.0
    sync_ms: float = 1.0

    def __post_init__(self) -> None:
        checks.integer("cores", self.cores, low=1)
        checks.integer("core_tokens", self.core_tokens, low=1)
        checks.real("core_gflop_s", self.core_gflop_s, low=0.0, open_low=True)
        checks.real("sync_ms", self.sync_ms, low=0.0)

    def token_rank_ms(self, bytes_per_rank: float) -> float:
        """Time of a core for a token and a unit of rank, by two operations for each parameter of two bytes, ms."""
        return bytes_per_rank / (self.core_gflop_s * 1e6)


def loading_of(spec: str) -> tuple[int, Plain | CpuAssist]:
    """The mode that a text names, as "cpu-assist:cores=128", and its parameters.

    Raises `UnknownNameError`: there is no such mode; `ValidationError`: it has no such parameter, or the value breaks
    a rule.
    """
    kinds = {name: CpuAssist if mode == CPU_ASSIST else Plain for name, mode in MODES.items()}
    made: CpuAssist | Plain = registry.make("loading mode", spec, kinds)
    return MODES[spec.partition(":")[0]], made
