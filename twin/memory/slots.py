"""vLLM's memory: slots of one rank, reserved when the server starts; the KV cache gets what is left."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from packer.arrays import FloatArray, IntArray
from packer.profile import Profile
from packer.settings import Settings


class SlotMemory:
    """`max_loras` slots of `max_lora_rank` (vllm/lora/worker_manager.py, vllm/v1/worker/gpu_worker.py)."""

    kv_label = "KV cache"
    fixed_slots = True

    def kv_tokens(self, profile: Profile, max_loras: FloatArray, max_lora_rank: FloatArray) -> FloatArray:
        """KV tokens, any common shape, may be < 0: exact at the measured points.

        Between measured points of one slot rank the residual is interpolated linearly. Beyond them the residual of the
        nearest measured number of slots is taken. For other ranks the line holds.
        """
        tokens = analytic_kv_tokens(profile, max_loras, max_lora_rank)
        for measured_rank, (points, residual) in _residuals(profile).items():
            here = max_lora_rank == measured_rank
            tokens[here] += np.interp(max_loras[here], points, residual)
        return tokens

    def adapter_blocks(self, profile: Profile, ranks: IntArray) -> IntArray:
        """KV blocks of an adapter of each rank, int64 (n,): none, adapters live in the slots."""
        return np.zeros(len(ranks), dtype=np.int64)

    def reserved_bytes(self, profile: Profile, settings: Settings) -> float:
        """Bytes that the server reserves for all slots when it starts."""
        memory = profile.memory
        per_slot = memory.slot_bytes + settings.max_lora_rank * memory.slot_bytes_per_rank
        return settings.max_loras * per_slot

    def taken_by(self, settings: Settings) -> str:
        """What takes memory from the KV cache, in words (plural)."""
        return f"{settings.max_loras} slots of rank {settings.max_lora_rank}"


def analytic_kv_tokens(
    profile: Profile, max_loras: npt.ArrayLike, max_lora_rank: npt.ArrayLike
) -> FloatArray:
    """KV tokens by the profile's line, without the correction by measured points; any shape, may be < 0."""
    memory = profile.memory
    slots = np.asarray(max_loras, dtype=np.float64)
    rank = np.asarray(max_lora_rank, dtype=np.float64)
    left = memory.kv_budget_bytes - slots * (memory.slot_bytes + rank * memory.slot_bytes_per_rank)
    return np.array(left / profile.model.kv_bytes_per_token)


@lru_cache(maxsize=64)
def _residuals(profile: Profile) -> dict[int, tuple[FloatArray, FloatArray]]:
    """Measured minus analytic tokens by slot rank, over max_loras (sorted)."""
    table: dict[int, tuple[FloatArray, FloatArray]] = {}
    for rank in sorted({point[1] for point in profile.memory.measured}):
        points = sorted((loras, tokens) for loras, r, tokens in profile.memory.measured if r == rank)
        loras = np.array([point[0] for point in points], dtype=np.float64)
        tokens = np.array([point[1] for point in points], dtype=np.float64)
        table[rank] = (loras, tokens - analytic_kv_tokens(profile, loras, rank))
    return table
