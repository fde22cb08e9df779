"""KV cache capacity of a server as a function of its adapter slots."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from packer.profile import Profile


def analytic_kv_tokens(
    profile: Profile, max_loras: npt.ArrayLike, max_lora_rank: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """KV tokens by the profile's line, without the correction by measured points; any shape, may be < 0.

    vLLM preallocates `max_loras` slots of `max_lora_rank` and gives the KV cache what is left
    (vllm/lora/worker_manager.py, vllm/v1/worker/gpu_worker.py). Under the unified policy nothing is reserved.
    """
    memory = profile.memory
    if memory.policy == "unified":
        shape = np.broadcast_shapes(np.shape(max_loras), np.shape(max_lora_rank))
        return np.full(shape, memory.kv_budget_bytes / profile.model.kv_bytes_per_token)
    slots = np.asarray(max_loras, dtype=np.float64)
    rank = np.asarray(max_lora_rank, dtype=np.float64)
    left = memory.kv_budget_bytes - slots * (memory.slot_bytes + rank * memory.slot_bytes_per_rank)
    tokens: npt.NDArray[np.float64] = np.asarray(left / profile.model.kv_bytes_per_token)
    return tokens


@lru_cache(maxsize=64)
def _residuals(profile: Profile) -> dict[int, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Measured minus analytic tokens by slot rank, over max_loras (sorted)."""
    table: dict[int, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]] = {}
    for rank in sorted({point[1] for point in profile.memory.measured}):
        points = sorted((loras, tokens) for loras, r, tokens in profile.memory.measured if r == rank)
        loras = np.array([point[0] for point in points], dtype=np.float64)
        tokens = np.array([point[1] for point in points], dtype=np.float64)
        table[rank] = (loras, tokens - analytic_kv_tokens(profile, loras, rank))
    return table


def kv_cache_tokens_many(
    profile: Profile, max_loras: npt.ArrayLike, max_lora_rank: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """KV tokens of many servers, float64, broadcast shape; negative where the slots alone don't fit.

    Exact at the measured points; between those of one slot rank the residual is interpolated linearly, beyond
    them and for other ranks the line holds (with the residual of the nearest measured number of slots).
    """
    loras, rank = np.broadcast_arrays(
        np.asarray(max_loras, dtype=np.float64), np.asarray(max_lora_rank, dtype=np.float64)
    )
    tokens = np.array(analytic_kv_tokens(profile, loras, rank), dtype=np.float64)
    if profile.memory.policy == "reserved":
        for measured_rank, (points, residual) in _residuals(profile).items():
            here = rank == measured_rank
            tokens[here] += np.interp(loras[here], points, residual)
    return np.floor(tokens)


def kv_cache_tokens(profile: Profile, max_loras: int, max_lora_rank: int) -> int:
    """KV cache capacity in tokens; negative where the slots alone don't fit."""
    return int(kv_cache_tokens_many(profile, max_loras, max_lora_rank))


def memory_error(profile: Profile, max_loras: int, max_lora_rank: int) -> str | None:
    """Why the server does not start, for people, or None if it does.

    vLLM refuses to start when the KV cache can't hold one request of `max_model_len`
    (vllm/v1/core/kv_cache_utils.py, `check_enough_kv_cache_memory`).
    """
    tokens = kv_cache_tokens(profile, max_loras, max_lora_rank)
    if tokens >= profile.memory.min_kv_tokens:
        return None
    slots = f"{max_loras} slots of rank {max_lora_rank}"
    if tokens <= 0:
        return f"{slots} leave no memory for the KV cache of {profile.name}"
    needed = profile.memory.min_kv_tokens
    return f"{slots} leave {tokens} KV tokens on {profile.name}, fewer than the {needed} it needs"
