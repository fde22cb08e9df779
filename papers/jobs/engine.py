"""The engine of whole jobs and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from packer import checks
from packer.papers.engines import CellEngine, memory
from packer.papers.state import state_of
from packer.twin.cluster.state import EngineKernels

MOST_TOKENS = 2**40


@dataclass(frozen=True)
class Jobs(CellEngine):
    """Whole jobs, in order of arrival (`packer.papers.jobs.advance`): image generation, queueing theory.

    `parallel`: number of jobs that run at the same time.
    `cv`: coefficient of variation of a log-normal factor, of mean 1, on the service time of each job.
    """

    name: ClassVar[str] = "job"
    largest: ClassVar[str] = "parallel"
    unread: ClassVar[frozenset[str]] = CellEngine.unread | {"block_size", "max_model_len"}
    parallel: int = 1
    cv: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("parallel", self.parallel, low=1, high=100_000)
        checks.real("cv", self.cv, low=0.0, high=100.0)

    def refusal(self, policy: str, loading: str, form: str) -> str | None:
        """Why the engine can't run: a job always loads its adapter first, and the step law must be linear."""
        if loading not in ("blocking", "none"):
            return f"A job loads its adapter first, and can't load it {loading!r}"
        return super().refusal(policy, loading, form)

    def longest_request(self, setup: Any) -> int:
        """No limit: a job has no KV cache."""
        return MOST_TOKENS

    def kernels(self) -> EngineKernels:
        """The kernels, which are imported and compiled only if used."""
        from packer.papers.cache.kernel import keep
        from packer.papers.jobs.advance import advance, wake_s

        return EngineKernels(memory, state_of, advance, wake_s, keep)
