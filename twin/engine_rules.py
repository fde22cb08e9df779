"""What differs between versions of vLLM, as far as the twin models it: read in 0.5.0, 0.8.5, 0.10.2, 0.11.0, 0.32.0.

A version between two of these follows the older one, one before or without numbers 0.8.5. Equal in 0.8.5 and 0.32.0,
so no rules: the walk over the slots, slices of outputs, and the default grid of the LoRA shrink kernel (SPLIT_K 64 to
127 tokens, then 8; blocks of 32 tokens and 16 ranks; `max_loras` + 1 slots; vllm/lora/ops/triton_ops).
"""

from __future__ import annotations

from dataclasses import dataclass

from packer.profile import ONE_TOKENIZER, V1_RELEASE, EngineSpec

LISTS = (0, 32)
"""Version whose `LoRARequestStates` drops an adapter without requests and adds it last when it comes back."""
TWO_GRAPHS = (0, 11)
"""Version with CUDA graphs of both kinds, with LoRA and without."""


@dataclass(frozen=True, slots=True)
class EngineRules:
    """Rules of a version.

    `prefills_first`: a step has prefills or decodes (`_schedule_default` of 0.5.0's vllm/core/scheduler.py, with LoRA
    the default before 0.8). It acts on loads alone: adapters that join are touched before those that run. TTFT and ITL
    are those of V1's schedule, prefill chunks beside decodes; `Profile.doubts` says so. `series_of_lists`: both
    labels of `vllm:lora_requests_info` list the adapters of requests that have their first token and are not finished,
    in order of entry (vllm/v1/metrics/stats.py of 0.32.0), instead of the sets of running and of waiting adapters.
    `tokenizer_per_adapter`: the API server loads a tokenizer at the first request of each adapter; without this rule a
    profile's `first_use_ms` costs nothing. `graphs_without_lora`: a step without adapters replays a CUDA graph without
    LoRA's kernels (`cudagraph_specialize_lora`, vllm/config/compilation.py:416 of 0.11.2, not in 0.10.2); before, up to
    the largest graph it costs what LoRA costs without adapters; beyond, the kernels return at once (`no_lora_flag_cpu`,
    vllm/lora/ops/triton_ops/lora_shrink.py of 0.8.5).
    """

    prefills_first: bool
    series_of_lists: bool
    tokenizer_per_adapter: bool
    graphs_without_lora: bool


def rules_of(engine: EngineSpec) -> EngineRules:
    """The rules of the engine's version."""
    release = engine.release
    return EngineRules(release < V1_RELEASE, release >= LISTS, release < ONE_TOKENIZER, release >= TWO_GRAPHS)
