"""What differs between versions of vLLM, as far as the twin models it: one table, `RULES`.

A version between two whose source was read (`READ`) follows the older one, one before or without numbers 0.8.5, and
one beyond the newest is refused. Equal in 0.8.5 and 0.33.0, so no rules: order of the waiting queue and of
preemption, the walk over the slots, slices of outputs, and the default grid of the LoRA shrink kernel (SPLIT_K 64 to
127 tokens, then 8; blocks of 32 tokens and 16 ranks; `max_loras` + 1 slots; vllm/lora/ops/triton_ops).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from packer.engine_spec import V1_RELEASE, EngineSpec
from packer.errors import ValidationError, shown
from packer.profile import ONE_TOKENIZER

Release = tuple[int, int]
READ: tuple[Release, ...] = (
    (0, 5), (0, 8), (0, 10), (0, 11), (0, 12), (0, 13), (0, 14), (0, 15), (0, 16), (0, 17), (0, 18), (0, 19), (0, 20),
    (0, 22), (0, 23), (0, 24), (0, 28), (0, 29), (0, 30), (0, 31), (0, 32), (0, 33),
)  # fmt: skip
"""Versions whose source was read, ascending."""
OLDEST: Release = (0, 0)
PRIORITIES: Release = (0, 16)
"""The first version whose order of priorities was compared with its own scheduler."""
DRAFTS: Release = (0, 32)
"""That of speculative decoding."""
QUEUE_LIMIT: Release = (0, 29)
"""The first version with `--max-num-queued-reqs` (vllm/v1/engine/async_llm.py, `check_admission`)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of vLLM's, which holds from version `since` on, and no more from `until` on (None: to this day).

    `where`: file, and line or function, in the version that is named.
    """

    name: str
    since: Release
    where: str
    says: str
    until: Release | None = None

    def holds(self, release: Release) -> bool:
        """Whether a version has this rule."""
        return self.since <= release and (self.until is None or release < self.until)


RULES: tuple[Rule, ...] = (
    Rule(
        "prefills_first", OLDEST, "0.5.0: vllm/core/scheduler.py, `_schedule_default`",
        "A step has prefills or decodes. It acts on loads alone: adapters that join are touched before those that run. "
        "TTFT and ITL are V1's, with prefill chunks and decodes in one step; `Profile.doubts` says so.",
        until=V1_RELEASE,
    ),
    Rule(
        "series_of_lists", (0, 32), "0.32.0: vllm/v1/metrics/stats.py, `LoRARequestStates`",
        "Both labels of `vllm:lora_requests_info` list the adapters of requests that have their first token and are "
        "not finished, in order of entry, instead of the sets of running and of waiting adapters.",
    ),
    Rule(
        "tokenizer_per_adapter", OLDEST, "0.10.2: vllm/transformers_utils/tokenizer_group.py",
        "The API server loads a tokenizer at the first request of each adapter; without this rule a profile's "
        "`first_use_ms` costs nothing.",
        until=ONE_TOKENIZER,
    ),
    Rule(
        "whole_sequence", (0, 19), "0.32.0: vllm/v1/core/kv_cache_manager.py, `full_sequence_must_fit`; "
        "vllm/config/scheduler.py:190",
        "A waiting request is admitted only if the KV cache holds all its tokens so far, not its first chunk alone "
        "(`scheduler_reserve_full_isl`, on by default).",
    ),
    Rule(
        "graphs_without_lora", (0, 11), "0.11.2: vllm/config/compilation.py:416, `cudagraph_specialize_lora`",
        "A step without adapters replays a CUDA graph without LoRA's kernels; before, up to the largest graph it costs "
        "what LoRA costs without adapters; beyond, the kernels return at once (`no_lora_flag_cpu`, "
        "vllm/lora/ops/triton_ops/lora_shrink.py of 0.8.5).",
    ),
    Rule(
        "slots_of_running", (0, 33), "0.33.0: vllm/v1/core/sched/scheduler.py:1038–1049",
        "Adapters of all running requests count against `max_loras`, not those scheduled in the step alone: with "
        "asynchronous scheduling also those of requests whose last token the step in flight computes.",
    ),
    Rule(
        "skipped_reversed",
        (0, 10),
        "0.10.2: vllm/v1/core/sched/request_queue.py:102, `prepend_requests`",
        "Waiting requests that a step passes over because their adapters find no slot come back in reverse order.",
        until=(0, 14),
    ),
    Rule(
        "skipped_first",
        (0, 18),
        "0.28.0: vllm/v1/core/sched/scheduler.py:2152, `_select_waiting_queue_for_scheduling`",
        "Waiting requests that were passed over because their adapters found no slot have a queue of their own, which "
        "comes before preempted requests.",
        until=(0, 31),
    ),
    Rule(
        "unhashed_first", (0, 23), "0.32.0: vllm/v1/core/block_pool.py:774, `free_blocks`",
        "Freed blocks without a hash are the next to be taken; before, all freed blocks went to the end of the queue.",
    ),
    Rule(
        "passes_itself", (0, 33), "0.33.0: vllm/v1/core/sched/scheduler.py:983, `schedule`",
        "With priorities, requests behind one that preempts itself get their tokens in this step; before, they miss "
        "it.",
    ),
    Rule(
        "caches_verified", (0, 33), "0.33.0: vllm/v1/core/sched/scheduler.py:2407, `update_from_output`",
        "With drafts, blocks can be found once their tokens came out; the last token of a request is not computed.",
    ),
    Rule(
        "hashes_ahead", (0, 33), "0.33.0: vllm/config/vllm.py:678, `num_hash_lookahead_tokens`",
        "With eagle and mtp, the hash of a block covers the token after it, too; before, the last block that a request "
        "finds is computed again.",
    ),
    Rule(
        "async_scheduling", (0, 14), "0.14.0: vllm/config/scheduler.py:133; 0.32.0: vllm/config/vllm.py:1585–1646",
        "`--async-scheduling` is on by default: a step is scheduled while the one before it is executed.",
    ),
    Rule(
        "prefix_caching", (0, 9), "0.32.0: vllm/engine/arg_utils.py:3021, `default_prefix_caching`",
        "`--enable-prefix-caching` is on by default. So it is in 0.8.5 with V1, whose profiles were measured with "
        "prompts that share nothing: they are simulated without.",
    ),
)  # fmt: skip
"""Settings that None in a profile stands for, and what else depends on the version."""


@dataclass(frozen=True, slots=True)
class EngineRules:
    """Rules of a version, by their names in `RULES`; the last two are the profile's settings where it has them."""

    prefills_first: bool
    series_of_lists: bool
    tokenizer_per_adapter: bool
    graphs_without_lora: bool
    whole_sequence: bool
    slots_of_running: bool
    skipped_reversed: bool
    skipped_first: bool
    unhashed_first: bool
    passes_itself: bool
    caches_verified: bool
    hashes_ahead: bool
    async_scheduling: bool
    prefix_caching: bool


def rules_of(engine: EngineSpec) -> EngineRules:
    """The rules of the engine's version; other engines than vLLM have neither of the last two.

    Raises `ValidationError`: the version is beyond the newest whose rules are known, or does not have a setting.
    """
    release = engine.release
    if release > READ[-1]:
        raise ValidationError(
            f"Expected a version of vLLM up to {_name(READ[-1])}, the newest whose rules are known, "
            f"got {shown(engine.version)}."
        )
    if engine.max_num_queued_reqs is not None:
        _check_since(QUEUE_LIMIT, engine, "max_num_queued_reqs")
    if engine.scheduling_policy == "priority":
        _check_since(PRIORITIES, engine, 'scheduling_policy "priority"')
    holds = {rule.name: rule.holds(release) for rule in RULES}
    if engine.speculation is not None and engine.speculation.looks_up:  # 0.32.0: vllm/config/vllm.py:1599
        if engine.async_scheduling:
            raise ValidationError("Expected engine.async_scheduling to be off with n-gram drafts, got on.")
        holds["async_scheduling"] = False
    for name in ("async_scheduling", "prefix_caching"):
        chosen = getattr(engine, name)
        holds[name] = engine.name == "vllm" and (holds[name] if chosen is None else chosen)
    return EngineRules(**{field.name: holds[field.name] for field in fields(EngineRules)})


def check_drafts(engine: EngineSpec) -> None:
    """Raises `ValidationError`: speculative decoding is not simulated with this version."""
    _check_since(DRAFTS, engine, "speculative decoding")


def _check_since(first: Release, engine: EngineSpec, what: str) -> None:
    if engine.name != "vllm" or engine.release < first:
        raise ValidationError(
            f"Expected a version of vLLM from {_name(first)} on with {what}, got {shown(engine.version)}."
        )


def followed(engine: EngineSpec) -> str:
    """In words, which version's rules hold where the engine's own was not read; "" where it was."""
    release = engine.release
    if engine.name != "vllm" or release in READ or release > READ[-1]:
        return ""
    older = max((each for each in READ if each <= release), default=V1_RELEASE)
    return f"vLLM {engine.version} follows the rules of {_name(older)}, the newest before it"


GIB = 2**30
SERVER_DEFAULTS: tuple[tuple[Release, float, str, int, int], ...] = (
    ((0, 28), 160 * GIB, "", 16_384, 1024),
    ((0, 10), 70 * GIB, "a100", 8192, 1024),
    ((0, 8), 70 * GIB, "", 8192, 1024),
    (OLDEST, 0.0, "", 2048, 256),
)
"""What an API server takes by default: since which version, on a GPU of at least so many bytes whose name does not
hold this text, which `max_num_batched_tokens` and `max_num_seqs` (vllm/engine/arg_utils.py: line 1596 in 0.8.5, 1669
in 0.10.2, 2582 in 0.28.0, 2923 in 0.32.0)."""


def server_defaults(release: Release, gpu_bytes: float, gpu_name: str) -> tuple[int, int]:
    """`max_num_batched_tokens` and `max_num_seqs` of an API server that is started without them.

    `gpu_bytes`: memory of one GPU, as the driver says. The newest rows of `SERVER_DEFAULTS` for large GPUs replace
    older ones for GPUs of the same size.
    """
    replaced: set[float] = set()
    for since, least, excluded, tokens, seqs in SERVER_DEFAULTS:
        if release < since or least in replaced:
            continue
        if gpu_bytes >= least and not (excluded and excluded in gpu_name.lower()):
            return tokens, seqs
        replaced.add(least)
    raise AssertionError  # the last row fits all


def _name(release: Release) -> str:
    return ".".join(map(str, release))
