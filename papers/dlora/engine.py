"""dLoRA's engine and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from packer import checks
from packer.arrays import Record
from packer.papers.engines import CellEngine, memory
from packer.papers.state import state_of
from packer.twin.cluster.state import EngineKernels
from packer.twin.engine.state import ServerState


POLICIES = ("credit", "fcfs", "merge")


@dataclass(frozen=True)
class DLoraEngine(CellEngine):
    """dLoRA's engine (`packer.papers.dlora.advance`): batches with one adapter merged into the weights, or unmerged.

    `policy`: "credit" is dLoRA's; "fcfs" never merges; "merge" always merges the adapter of the first request.
    `max_num_seqs`: largest batch (default of the artifact 16, of vLLM 256). `max_num_batched_tokens`: most tokens of a
    step. `credits`: credit from which on requests of an adapter come first. `merged_ms`, `mixed_ms`: step times that
    the scheduler assumes to compare batches; `switch_ms`: time to merge or unmerge, which is added to a step. Times are
    the artifact's, measured with Llama 7B. `link_gb_s`: bandwidth between GPU and host for swapped KV cache, GiB/s.
    """

    name: ClassVar[str] = "dlora"
    largest: ClassVar[str] = "max_num_seqs"
    places: ClassVar[int] = 3  # For the batch, the first requests by arrival, and the picked requests.
    policy: str = "credit"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    credits: float = 10_000.0
    merged_ms: float = 15.0
    mixed_ms: float = 27.0
    switch_ms: float = 20.0
    link_gb_s: float = 32.0

    def __post_init__(self) -> None:
        checks.choice("policy", self.policy, POLICIES)
        checks.integer("max_num_seqs", self.max_num_seqs, low=1, high=100_000)
        checks.integer("max_num_batched_tokens", self.max_num_batched_tokens, low=1)
        for name in ("credits", "merged_ms", "mixed_ms", "link_gb_s"):
            checks.real(name, getattr(self, name), low=0.0, open_low=True)
        checks.real("switch_ms", self.switch_ms, low=0.0)

    def refusal(self, policy: str, loading: str, form: str) -> str | None:
        """Why the engine can't run: it has its own cache, loads adapters in a step and needs a linear step law."""
        if policy != "lru":
            return f"dLoRA's engine has a cache of its own, and can't have {policy!r}"
        if loading not in ("blocking", "none"):
            return f"dLoRA's engine loads adapters in a step, and can't load them {loading!r}"
        return super().refusal(policy, loading, form)

    def longest_request(self, setup: Any) -> int:
        """Limited by max_model_len, the KV cache and the tokens of a step, because a prompt is computed in one step."""
        return min(int(setup.server.longest_request()), self.max_num_batched_tokens)

    def prepare(self, setup: Any, state: ServerState) -> ServerState:
        """Set the settings in the server's state."""
        state.server.token_budget = self.max_num_batched_tokens
        return super().prepare(setup, state)

    def own(self, setup: Any) -> Record:
        """Initial state of a server."""
        own, profile = super().own(setup), setup.server.profile
        own.policy = POLICIES.index(self.policy)
        for name in ("credits", "merged_ms", "mixed_ms", "switch_ms"):
            own[name] = getattr(self, name)
        block_bytes = profile.model.kv_bytes_per_token * profile.engine.block_size
        own.swap_ms = 1e3 * block_bytes / (self.link_gb_s * 2**30)
        own.join_share, own.stay_share = 1.0, self.merged_ms / self.mixed_ms
        return own

    def kernels(self) -> EngineKernels:
        """The kernels, which are imported and compiled only if used."""
        from packer.papers.accept import event_s
        from packer.papers.cache.kernel import keep
        from packer.papers.dlora.advance import advance, withdraw

        return EngineKernels(memory, state_of, advance, event_s, keep, withdraw)
