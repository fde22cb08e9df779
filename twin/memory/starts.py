"""Settings with which a server would start if it does not start as given: fewer slots, or a shorter context."""

from __future__ import annotations

from collections.abc import Sequence

from packer import checks
from packer.errors import IncompatibleError
from packer.profile import Profile
from packer.search import fewest
from packer.settings import MAX_LORAS, Settings
from packer.twin.memory.policy import held, kv_cache_tokens, least_kv_tokens, longest_context, memory_error
from packer.workload import Workload

MORE_GPUS = ", or more GPUs for each server (--tensor-parallel-size)"
CONTEXT_STEP = 1024  # Shorter contexts are proposed in multiples of this.


def largest_max_loras(profile: Profile, rank: int, workload: Workload | None = None) -> int:
    """Largest max_loras with which the server starts (at most `MAX_LORAS`); 0 if it never does."""

    def fails(n: int) -> bool:
        return memory_error(profile, profile.settings(n, rank), workload) is not None

    too_many = fewest(fails, 1, MAX_LORAS)
    return MAX_LORAS if too_many is None else too_many - 1


def what_starts(profile: Profile, settings: Settings, workload: Workload | None = None) -> str | None:
    """Describe the nearest settings with which the server starts; return None if it starts with `settings`. A shorter
    context helps only if the profile's `min_kv_tokens` follows from `max_model_len` (`least_kv_tokens`)."""
    if memory_error(profile, settings, workload) is None:
        return None
    ways = []
    slots = largest_max_loras(profile, settings.max_lora_rank, workload)
    if slots:
        ways.append(f"max_loras {slots} at rank {settings.max_lora_rank}")
    # Each rank has a KV cache of its own, which must hold a whole context.
    tokens = longest_context(profile, kv_cache_tokens(profile, held(profile, settings, workload)))
    tokens = tokens // CONTEXT_STEP * CONTEXT_STEP
    if tokens > 0 and profile.memory.min_kv_tokens == least_kv_tokens(profile.model, profile.engine):
        ways.append(f"--max-model-len {tokens}")
    if not ways and settings.max_loras > 1:
        one = what_starts(profile, profile.settings(1, settings.max_lora_rank), workload)
        ways = [f"max_loras 1 with {one}"] if one and one.startswith("--") else []
    return " or ".join(ways) or f"a GPU with more memory{MORE_GPUS}"


def check_starts(profile: Profile, rank: int) -> None:
    """Raise `IncompatibleError` if the server does not start with a single slot of this rank."""
    settings = profile.settings(1, rank)
    if memory_error(profile, settings) is None:
        return
    engine, tokens = profile.engine, max(0, kv_cache_tokens(profile, settings))
    ways = str(what_starts(profile, settings))
    room = " (or shorter, for more slots)" if "--max-model-len" in ways else ""
    least = "max_model_len" if profile.model.kv_shape is None else "a request of max_model_len holds"
    raise IncompatibleError(
        f"Beside {profile.model.name} and one adapter of rank {rank}, {engine.gpus} × {profile.gpu.name} has room for "
        f"{tokens:,} tokens of KV cache, and vLLM does not start with fewer than "
        f"{least}{' on each rank' if engine.data_parallel_size > 1 else ''}, "
        f"{profile.memory.min_kv_tokens:,}. What would start: {ways}{room}."
    )


def starting(workload: Workload, profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles whose servers start with one slot of the fleet's largest rank; raises as `check_starts` if none."""
    rank, found, refused = max(adapter.rank for adapter in workload.adapters), [], None
    for profile in profiles:
        try:
            if rank:
                check_starts(profile, checks.slot_rank_for(rank))
            found.append(profile)
        except IncompatibleError as error:
            refused = refused or error
    if refused is not None and not found:
        raise refused
    return found
