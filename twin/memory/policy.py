"""What a server's GPU memory holds: one policy for vLLM's slots, one for S-LoRA's pool."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from packer.profile import Profile
from packer.settings import Pool, Settings, Slots
from packer.twin.memory.pool import PoolMemory
from packer.twin.memory.slots import SlotMemory

MemoryPolicy = SlotMemory | PoolMemory
_POLICIES: Mapping[type[Settings], MemoryPolicy] = {Slots: SlotMemory(), Pool: PoolMemory()}


def memory_policy(profile: Profile) -> MemoryPolicy:
    """How a profile's servers divide their GPUs' memory between the KV cache and adapters."""
    return _POLICIES[profile.memory.settings_kind]


def kv_cache_tokens_many(
    profile: Profile, max_loras: npt.ArrayLike, max_lora_rank: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """KV tokens of many servers, float64, broadcast shape; negative where adapters alone don't fit."""
    loras, rank = np.broadcast_arrays(
        np.asarray(max_loras, dtype=np.float64), np.asarray(max_lora_rank, dtype=np.float64)
    )
    tokens = memory_policy(profile).kv_tokens(profile, loras, rank)
    drafts, own = profile.engine.speculation, profile.model.kv_bytes_per_token
    if drafts is not None:  # its drafter keeps as many tokens
        tokens = (tokens * own - drafts.draft_bytes) / (own + drafts.draft_kv_bytes_per_token)
    return np.floor(tokens)


def kv_cache_tokens(profile: Profile, settings: Settings) -> int:
    """KV cache capacity in tokens; negative where adapters alone don't fit."""
    return int(kv_cache_tokens_many(profile, settings.max_loras, settings.max_lora_rank))


def memory_error(profile: Profile, settings: Settings, reserved: int = 0) -> str | None:
    """Why the server does not start, for people, or None if it does.

    vLLM refuses to start when the KV cache can't hold one request of `max_model_len`
    (vllm/v1/core/kv_cache_utils.py, `check_enough_kv_cache_memory`). `reserved`: KV tokens whose memory
    training takes.
    """
    tokens, needed = kv_cache_tokens(profile, settings) - reserved, profile.memory.min_kv_tokens
    if tokens >= needed:
        return None
    taken = memory_policy(profile).taken_by(settings) + (" and training" if reserved else "")
    if tokens <= 0:
        return f"{taken} leave no memory for the KV cache of {profile.name}"
    return f"{taken} leave {tokens} KV tokens on {profile.name}, fewer than the {needed} it needs"
