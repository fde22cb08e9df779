"""Engines that a server may run, and their settings: vLLM's, LightLLM's as S-LoRA uses it, one for whole jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from packer import checks, registry


@dataclass(frozen=True, slots=True)
class Vllm:
    """vLLM V1; its settings are those of the profile (`packer.twin.engine.advance`)."""

    name: ClassVar[str] = "vllm"


@dataclass(frozen=True, slots=True)
class LightLlm:
    """LightLLM with S-LoRA's pool (`packer.twin.engine.lightllm`); it has no model of the front end.

    `max_wait_tokens`: decode steps between two looks at the queue. S-LoRA's code has 10; CaraServe describes 0 or 1.
    `batch_max_tokens`: prompt tokens of a prefill; None: a sixth of the pool's, at least `max_model_len` (LightLLM).
    `running_max_req_size`: largest batch.
    `batch_num_adapters`: adapter clustering: with so many adapters in the batch, waiting requests of these come
    first; None: never.
    `abort_after_s`: early abort: requests that would wait longer for their first token are given up; None: never.
    """

    name: ClassVar[str] = "lightllm"
    max_wait_tokens: int = 10
    batch_max_tokens: int | None = None
    running_max_req_size: int = 1000
    batch_num_adapters: int | None = None
    abort_after_s: float | None = None

    def __post_init__(self) -> None:
        checks.integer("max_wait_tokens", self.max_wait_tokens, low=0)
        checks.integer("running_max_req_size", self.running_max_req_size, low=1, high=100_000)
        if self.batch_max_tokens is not None:
            checks.integer("batch_max_tokens", self.batch_max_tokens, low=1)
        if self.batch_num_adapters is not None:
            checks.integer("batch_num_adapters", self.batch_num_adapters, low=1)
        if self.abort_after_s is not None:
            checks.real("abort_after_s", self.abort_after_s, low=0.0, open_low=True)


@dataclass(frozen=True, slots=True)
class Jobs:
    """Whole jobs, in order of arrival (`packer.twin.engine.jobs`): image generation, queueing theory.

    `parallel`: jobs at once.
    `cv`: coefficient of variation of a log-normal factor, of mean 1, on the service time of each job.
    """

    name: ClassVar[str] = "job"
    parallel: int = 1
    cv: float = 0.0

    def __post_init__(self) -> None:
        checks.integer("parallel", self.parallel, low=1, high=100_000)
        checks.real("cv", self.cv, low=0.0, high=100.0)


Engine = Vllm | LightLlm | Jobs
VLLM = Vllm()
ENGINES: dict[str, type[Vllm] | type[LightLlm] | type[Jobs]] = {
    engine.name: engine for engine in (Vllm, LightLlm, Jobs)
}
"""Engines by name."""


def engine_of(spec: str) -> Engine:
    """The engine that a text names, with parameters as in "lightllm:max_wait_tokens=1".

    Raises `UnknownNameError`: there is no such engine; `ValidationError`: it has no such parameter, or the value
    breaks a rule.
    """
    engine: Engine = registry.make("engine", spec, ENGINES)
    return engine
