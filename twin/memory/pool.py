"""S-LoRA's unified memory: adapters on the GPU and the KV cache share one pool (arXiv 2311.03285, section 5)."""

from __future__ import annotations

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.profile import Profile
from packer.settings import Settings


class PoolMemory:
    """Nothing is reserved: an adapter takes KV blocks by its own rank while it is on the GPU."""

    kv_label = "KV cache and adapters"
    fixed_slots = False

    def kv_tokens(self, profile: Profile, max_loras: FloatArray, max_lora_rank: FloatArray) -> FloatArray:
        """The whole budget, whatever the settings."""
        return np.full(max_loras.shape, profile.memory.kv_budget_bytes / profile.model.kv_bytes_per_token)

    def adapter_blocks(self, profile: Profile, ranks: IntArray) -> IntArray:
        """The adapter's weights in whole blocks."""
        block_bytes = profile.engine.block_size * profile.model.kv_bytes_per_token
        blocks: IntArray = np.ceil(ranks * profile.model.lora_bytes_per_rank / block_bytes).astype(np.int64)
        return blocks

    def reserved_bytes(self, profile: Profile, settings: Settings) -> float:
        """None."""
        return 0.0

    def taken_by(self, settings: Settings) -> str:
        """The base model, whose weights are all that the pool does not hold."""
        return "the weights of the base model"
