"""LightLLM's engine and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from packer import checks
from packer.arrays import Record
from packer.papers.cache.loading import loading_of
from packer.papers.engines import CellEngine, memory
from packer.papers.state import state_of
from packer.twin.cluster.state import EngineKernels
from packer.twin.engine.state import NO_LIMIT, ServerState


@dataclass(frozen=True)
class LightLlm(CellEngine):
    """LightLLM with S-LoRA's pool (`packer.papers.lightllm.advance`), without a model of the front end.

    `max_wait_tokens`: decode steps between two checks of the queue. S-LoRA's code has 10; CaraServe describes 0 or 1.
    `batch_max_tokens`: most prompt tokens of a prefill. None: a sixth of the pool, at least `max_model_len` (LightLLM).
    `running_max_req_size`: largest batch.
    `batch_num_adapters`: adapter clustering: if the batch has at least this number of adapters, waiting requests for
    these adapters come first. None: never.
    `abort_after_s`: early abort: requests that would wait longer for their first token are dropped. None: never.
    """

    name: ClassVar[str] = "lightllm"
    unread: ClassVar[frozenset[str]] = CellEngine.unread | {"block_size"}
    largest: ClassVar[str] = "running_max_req_size"
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

    def refusal(self, policy: str, loading: str, form: str) -> str | None:
        """Why the engine can't run: it takes every policy and loading mode, but the step law must be linear."""
        loading_of(loading)
        return super().refusal(policy, loading, form)

    def longest_request(self, setup: Any) -> int:
        """Limited by max_model_len, the pool without the largest adapter, and the tokens of a prefill."""
        room = int(setup.cells) - int(setup.blocks.max()) - 1
        return min(int(setup.server.profile.engine.max_model_len), room, self.most_prompt_tokens(setup))

    def most_prompt_tokens(self, setup: Any) -> int:
        """Most prompt tokens of a prefill."""
        return self.batch_max_tokens or max(int(setup.cells) // 6, int(setup.server.profile.engine.max_model_len))

    def prepare(self, setup: Any, state: ServerState) -> ServerState:
        """Set the settings in the server's state."""
        state.server.token_budget = self.most_prompt_tokens(setup)
        return super().prepare(setup, state)

    def own(self, setup: Any) -> Record:
        """Initial state of a server."""
        own = super().own(setup)
        own.max_wait, own.cluster = self.max_wait_tokens, self.batch_num_adapters or NO_LIMIT
        if self.abort_after_s is not None:
            own.abort_after_s = self.abort_after_s
        return own

    def kernels(self) -> EngineKernels:
        """The kernels, which are imported and compiled only if used."""
        from packer.papers.cache.kernel import keep
        from packer.papers.lightllm.advance import advance, event_s

        return EngineKernels(memory, state_of, advance, event_s, keep)
