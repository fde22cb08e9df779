"""How a server divides its GPU memory: one policy for vLLM's slots, one for S-LoRA's pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from packer.arrays import FloatArray, IntArray
from packer.engine_spec import EngineSpec
from packer.profile import ModelSpec, Profile
from packer.settings import MAX_LORAS, Settings
from packer.twin.memory.held import share_held
from packer.workload import Workload


class SlotMemory:
    """vLLM's policy: `max_loras` slots of `max_lora_rank` are reserved at startup; the KV cache gets the rest.
    vllm/lora/worker_manager.py, vllm/v1/worker/gpu_worker.py."""

    kv_label = "KV cache"
    fixed_slots = True

    def kv_tokens(self, profile: Profile, max_loras: FloatArray, max_lora_rank: FloatArray) -> FloatArray:
        """KV tokens, any common shape, may be < 0; at the measured points they equal the measurements. Between measured
        points of one slot rank, the residual is interpolated linearly. Beyond them, the residual of the nearest
        measured number of slots is used. For other ranks, `analytic_kv_tokens` is not corrected."""
        tokens = analytic_kv_tokens(profile, max_loras, max_lora_rank)
        for measured_rank, (points, residual) in _residuals(profile).items():
            here = max_lora_rank == measured_rank
            tokens[here] += np.interp(max_loras[here], points, residual)
        return tokens

    def adapter_blocks(self, profile: Profile, workload: Workload) -> IntArray:
        """KV blocks of each adapter, int64 (n,): all 0, because adapters are in the slots."""
        return np.zeros(len(workload), dtype=np.int64)

    def reserved_bytes(self, profile: Profile, settings: Settings) -> float:
        """Bytes that the server reserves for all slots when it starts."""
        memory = profile.memory
        per_slot = memory.slot_bytes + settings.max_lora_rank * memory.slot_bytes_per_rank
        return settings.max_loras * per_slot

    def taken_by(self, settings: Settings) -> str:
        """Describe what takes memory from the KV cache, for messages (plural)."""
        return f"{settings.max_loras} slots of rank {settings.max_lora_rank}"


def analytic_kv_tokens(profile: Profile, max_loras: npt.ArrayLike, max_lora_rank: npt.ArrayLike) -> FloatArray:
    """KV tokens, linear in the bytes of the slots, without correction by measured points; any shape, may be < 0."""
    memory = profile.memory
    slots = np.asarray(max_loras, dtype=np.float64)
    rank = np.asarray(max_lora_rank, dtype=np.float64)
    left = memory.kv_budget_bytes - slots * (memory.slot_bytes + rank * memory.slot_bytes_per_rank)
    return np.array(left / profile.model.kv_bytes_per_token)


@lru_cache(maxsize=64)
def _residuals(profile: Profile) -> dict[int, tuple[FloatArray, FloatArray]]:
    """For each measured slot rank: the values of `max_loras` (sorted), and measured minus analytic KV tokens."""
    table: dict[int, tuple[FloatArray, FloatArray]] = {}
    for rank in sorted({point[1] for point in profile.memory.measured}):
        points = sorted((loras, tokens) for loras, r, tokens in profile.memory.measured if r == rank)
        loras = np.array([point[0] for point in points], dtype=np.float64)
        tokens = np.array([point[1] for point in points], dtype=np.float64)
        table[rank] = (loras, tokens - analytic_kv_tokens(profile, loras, rank))
    return table


class PoolMemory:
    """S-LoRA's unified memory (arXiv 2311.03285, section 5): adapters on the GPU and the KV cache share one pool.
    Nothing is reserved: an adapter takes KV blocks by its own rank while it is on the GPU."""

    kv_label = "KV cache and adapters"
    fixed_slots = False

    def kv_tokens(self, profile: Profile, max_loras: FloatArray, max_lora_rank: FloatArray) -> FloatArray:
        """The whole budget, whatever the settings."""
        return np.full(max_loras.shape, profile.memory.kv_budget_bytes / profile.model.kv_bytes_per_token)

    def adapter_blocks(self, profile: Profile, workload: Workload) -> IntArray:
        """Each adapter's weights in whole blocks of the workload's tokens (`kv_cache_tokens`)."""
        model, share = profile.model, share_held(workload, profile.model.kv_shape)
        block_bytes = profile.engine.block_size * model.kv_bytes_per_token * share
        blocks: IntArray = np.ceil(workload.ranks * model.lora_bytes_per_rank / block_bytes).astype(np.int64)
        return blocks

    def reserved_bytes(self, profile: Profile, settings: Settings) -> float:
        """0, because the server reserves no slots."""
        return 0.0

    def taken_by(self, settings: Settings) -> str:
        """Name the base model's weights, the only memory outside the pool, for messages."""
        return "the weights of the base model"


MemoryPolicy = SlotMemory | PoolMemory
_POLICIES: Mapping[str, MemoryPolicy] = {"reserved": SlotMemory(), "unified": PoolMemory()}


def memory_policy(profile: Profile) -> MemoryPolicy:
    """The policy by which a profile's servers divide GPU memory between the KV cache and adapters."""
    return _POLICIES[profile.memory.policy]


def kv_cache_tokens_many(profile: Profile, max_loras: npt.ArrayLike, max_lora_rank: npt.ArrayLike) -> FloatArray:
    """KV tokens of many servers, float64, broadcast shape; negative if the adapters alone don't fit."""
    loras, rank = np.broadcast_arrays(np.asarray(max_loras, np.float64), np.asarray(max_lora_rank, np.float64))
    tokens = memory_policy(profile).kv_tokens(profile, loras, rank)
    drafts, own = profile.engine.speculation, profile.model.kv_bytes_per_token
    if drafts is not None:  # the drafter's KV cache holds the same number of tokens
        tokens = (tokens * own - drafts.draft_bytes) / (own + drafts.draft_kv_bytes_per_token)
    return np.floor(tokens)


def held(profile: Profile, settings: Settings, workload: Workload | None) -> Settings:
    """The settings with all slots that take memory: SGLang has one more for requests to the base model, if the workload
    has such (sglang/srt/lora/mem_pool.py)."""
    if workload is None or profile.engine.name != "sglang" or not 0 < workload.n_loras < len(workload):
        return settings
    return replace(settings, max_loras=min(settings.max_loras + 1, MAX_LORAS))


def kv_cache_tokens(profile: Profile, settings: Settings, workload: Workload | None = None, reserved: int = 0) -> int:
    """KV cache capacity in tokens; negative if the adapters alone don't fit.

    `workload`: the requests of which these are tokens, if the model's layers do not keep all tokens (`KvShape`); None:
    tokens that all layers keep. `reserved`: such tokens whose memory is used for training.
    """
    slots = held(profile, settings, workload)
    tokens = int(kv_cache_tokens_many(profile, slots.max_loras, slots.max_lora_rank)) - reserved
    return tokens if workload is None else int(tokens / share_held(workload, profile.model.kv_shape))


def least_kv_tokens(model: ModelSpec, engine: EngineSpec) -> int:
    """KV cache, in tokens that all layers keep, that holds one request of `max_model_len` on each data-parallel rank,
    in whole blocks (vllm/v1/kv_cache_interface.py, `FullAttentionSpec.max_memory_usage_bytes`).

    Layers with a window also keep the tokens of the steps in flight (vllm/config/vllm.py of 0.32.0,
    `max_in_flight_tokens`). With prefix caching a request may hold two states (v1/kv_cache_interface.py, `MambaSpec`).
    """
    held: float = engine.block_size * math.ceil(engine.max_model_len / engine.block_size)
    if model.kv_shape is not None:
        held = model.kv_shape.held(held, _in_flight(engine)) + _second_states(model, engine)
    return engine.data_parallel_size * math.ceil(held)


def longest_context(profile: Profile, tokens: int) -> int:
    """The largest `max_model_len` with which a server with a KV cache of `tokens` tokens starts."""
    each = tokens // profile.engine.data_parallel_size
    shape, engine = profile.model.kv_shape, profile.engine
    if shape is None:
        return each
    return shape.longest(each - _second_states(profile.model, engine), _in_flight(engine))


def _second_states(model: ModelSpec, engine: EngineSpec) -> float:
    """Tokens of the KV cache that the states take which prefix caching keeps beside the current ones."""
    chosen = engine.prefix_caching
    caches = engine.release >= (0, 9) if chosen is None else chosen
    return model.kv_shape.request_tokens if model.kv_shape and caches else 0.0


def _in_flight(engine: EngineSpec) -> int:
    """Tokens of the steps in flight: two with asynchronous scheduling, the default from 0.14 on."""
    chosen = engine.async_scheduling
    overlaps = engine.release >= (0, 14) if chosen is None else chosen
    return engine.max_num_batched_tokens * (2 if overlaps else 1)


def memory_error(
    profile: Profile, settings: Settings, workload: Workload | None = None, reserved: int = 0
) -> str | None:
    """Return a message that says why the server does not start, or None if it starts. vLLM refuses to start when the KV
    cache can't hold one request of `max_model_len` (vllm/v1/core/kv_cache_utils.py, `check_enough_kv_cache_memory`).
    `workload`, `reserved`: see `held` and `kv_cache_tokens`."""
    settings = held(profile, settings, workload)
    tokens, needed = kv_cache_tokens(profile, settings, reserved=reserved), profile.memory.min_kv_tokens
    if tokens >= needed:
        return None
    taken = memory_policy(profile).taken_by(settings) + (" and training" if reserved else "")
    if tokens <= 0:
        return f"{taken} leave no memory for the KV cache of {profile.name}"
    return f"{taken} leave {tokens} KV tokens on {profile.name}, fewer than the {needed} it needs"
