"""Loading modes: how adapters are loaded from host memory to the GPU, and what waits for a load."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks, registry

(BLOCKING, PREFETCH, ASYNC, CPU_ASSIST) = range(4)
MODES = {"blocking": BLOCKING, "prefetch": PREFETCH, "async": ASYNC, "cpu-assist": CPU_ASSIST, "none": BLOCKING}
"""Modes by name.

"blocking": the step that admits a request loads its adapter first. "prefetch": likewise, but the adapters of the first
waiting requests are loaded during decodes before the queue is checked. "async": a load starts when a request arrives;
the request is skipped until the load ends, others go on. "cpu-assist": `CpuAssist`. "none": loads cost nothing.
"""


@dataclass(frozen=True, slots=True)
class Plain:
    """A mode without parameters."""


@dataclass(frozen=True, slots=True)
class CpuAssist:
    """CaraServe's mode: the CPU computes the adapter's part of the prefill while the adapter is loaded.

    Source: arXiv 2401.11240, section 4. A prompt of L tokens uses ceil(L / `core_tokens`) cores, which share its
    tokens; each core computes at `core_gflop_s`. The servers of a machine share its `cores` equally. If the prompts
    of a prefill whose adapters are absent need more cores than there are, they take turns. A layer ends when both
    GPU and CPU have finished it. Adapters are loaded one after the other; once the adapter of a request is loaded,
    the GPU alone computes for it. The prefill takes at least the time of the loads, plus `sync_ms` for the exchange
    between CPU and GPU, which is below 1 ms (Figure 17).

    The speed of a core is not published. The paper has 192 cores for 8 A10, and 16 tokens. 26 GFLOP/s is half of the
    peak of one of the two threads of an AVX2 core at 3.3 GHz.
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
        """Time of a core for a token and a unit of rank, ms: two operations for each parameter of two bytes."""
        return bytes_per_rank / (self.core_gflop_s * 1e6)


def loading_of(spec: str) -> tuple[int, Plain | CpuAssist]:
    """Mode and parameters of "cpu-assist:cores=128"; raises `UnknownNameError`, `ValidationError`."""
    kinds = {name: CpuAssist if mode == CPU_ASSIST else Plain for name, mode in MODES.items()}
    made: CpuAssist | Plain = registry.make("loading mode", spec, kinds)
    return MODES[spec.partition(":")[0]], made
