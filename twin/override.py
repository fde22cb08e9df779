"""A profile with other engine settings than those with which it was measured or estimated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from packer.errors import ValidationError, shown
from packer.kv_shape import HYBRID
from packer.profile import MemorySpec, Profile
from packer.twin.engine_rules import ASYNC, check_since
from packer.twin.memory.policy import least_kv_tokens

BYTES_PER_LOGIT = 18  # The sampler's bytes per logit in profiling: bf16, float32, sorted float32, int64 indices.

SAMPLER_RELEASE = (0, 11)  # From here the sampler takes more: a constant from seven servers (`packer.fit.memory`).

SAMPLER_BYTES_PER_LOGIT = 38.2
LARGEST_VOCABULARY = 262_144  # Gemma's: profiles lack their model's, and memory must not be underestimated.
VERSION = re.compile(r"v?\d+\.\d+(\.\w+)*")  # Pattern of a version of vLLM.


SETTINGS = (
    "max_num_seqs", "max_model_len", "gpu_memory_utilization", "vllm_version", "block_size", "prefix_caching",
    "async_scheduling", "max_num_queued_reqs", "scheduling_policy", "speculation",
    "warm_start",
)  # fmt: skip
"""Settings that `with_engine` changes, in the order in which the profile's name lists them."""


def with_engine(profile: Profile, **settings: Any) -> Profile:
    """Return the profile with these `SETTINGS`; None keeps a setting.

    The KV cache changes by the GPU's memory times the change of `gpu_memory_utilization`, and loses what vLLM's
    profiling run takes on each GPU for each further sequence in the sampler (`BYTES_PER_LOGIT` × `LARGEST_VOCABULARY`).
    `max_model_len` also sets the least KV cache with which vLLM starts. `vllm_version`, such as 0.23.0, brings the
    rules of that version (`packer.twin.engine_rules`). The step law and `kv_shape` stay.

    Raises `ValidationError`: a setting breaks a rule, such as `max_num_seqs` above `max_num_batched_tokens`; the
    version has no numbers, or one before 0.9.1 for layers with a window; the profile is of another engine than vLLM.
    """
    if unknown := settings.keys() - set(SETTINGS):
        raise TypeError(f"with_engine() got unexpected settings: {', '.join(sorted(unknown))}")
    changes = {name.removeprefix("vllm_"): settings.get(name) for name in SETTINGS}
    given: dict[str, Any] = {
        name: value for name, value in changes.items() if value is not None and value != getattr(profile.engine, name)
    }
    if not given:
        return profile
    engine = replace(profile.engine, **given)
    engine.check_block_size()
    if engine.async_scheduling:
        check_since(ASYNC, engine, "async_scheduling")
    if "version" in given and (engine.name != "vllm" or not VERSION.fullmatch(engine.version)):
        said = "Expected a version as 0.11.0 of a server of vLLM,"
        raise ValidationError(f"{said} got {shown(engine.version)} of {engine.name}.")
    shape = profile.model.kv_shape
    if shape and shape.window and engine.release < HYBRID <= profile.engine.release:
        rule = f"Expected a version from 0.9.1 on, where layers with a window drop tokens, got {engine.version}:"
        raise ValidationError(f"{rule} packer profiles estimate with --vllm-version has the memory of older ones.")
    share = engine.gpu_memory_utilization - profile.engine.gpu_memory_utilization
    each = BYTES_PER_LOGIT if profile.engine.release < SAMPLER_RELEASE else SAMPLER_BYTES_PER_LOGIT
    further = max(0, engine.server_seqs - profile.engine.server_seqs) * engine.tensor_parallel_size
    extra_bytes = share * profile.gpu.memory_bytes - further * each * LARGEST_VOCABULARY
    words = {name: ("off", "on")[value] if isinstance(value, bool) else value for name, value in given.items()}
    changed = ", ".join(f"{name} {value}" for name, value in words.items())
    before = {"version": f" instead of {profile.engine.version}"}
    because = ", ".join(f"{name} {value}{before.get(name, '')}" for name, value in words.items())
    return replace(
        profile,
        name=f"{profile.name} ({changed})",
        engine=engine,
        memory=_memory(profile, extra_bytes, least_kv_tokens(profile.model, engine)),
        provenance={**profile.provenance, "settings": f"those of {profile.name}, but for {because}"},
    )


def variants(profile: Profile, **settings: Sequence[Any]) -> list[Profile]:
    """The profile with every combination of values of settings; a string is one value, empty keeps a setting."""
    values = ((each,) if isinstance(each, str) else each or (None,) for each in settings.values())
    combinations = product(*values)
    found = (with_engine(profile, **dict(zip(settings, each, strict=True))) for each in combinations)
    return list(dict.fromkeys(found))


def _memory(profile: Profile, extra_bytes: float, least: int) -> MemorySpec:
    """Return the memory with `extra_bytes` more for the KV cache."""
    memory, kv = profile.memory, profile.model.kv_bytes_per_token
    measured = tuple((loras, rank, max(0, int(tokens + extra_bytes / kv))) for loras, rank, tokens in memory.measured)
    if memory.min_kv_tokens != least_kv_tokens(profile.model, profile.engine):
        least = memory.min_kv_tokens
    return replace(memory, kv_budget_bytes=memory.kv_budget_bytes + extra_bytes, min_kv_tokens=least, measured=measured)
