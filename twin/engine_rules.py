"""Differences between versions of vLLM, as far as the twin models them: one table, `RULES`.

A version between two whose source was read (`READ`) follows the older one. A version before 0.8.5, or without numbers,
follows 0.8.5; one beyond the newest is refused. Equal in 0.8.5 and 0.33.0, so no rules: order of the waiting queue and
of preemption, the walk over the slots, slices of outputs, and the default grid of the LoRA shrink kernel (SPLIT_K 64 to
127 tokens, then 8; blocks of 32 tokens and 16 ranks; `max_loras` + 1 slots; vllm/lora/ops/triton_ops).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from packer.engine_spec import V1_RELEASE, EngineSpec
from packer.errors import ValidationError, shown
from packer.io.shipped import table
from packer.memo import Memo
from packer.profile import Profile
from packer.workload import Workload

Release = tuple[int, ...]
_TABLE = table("packer.twin", "engine_rules.toml")
READ: tuple[Release, ...] = tuple(map(tuple, _TABLE["read"]))  # Versions whose source was read, ascending.
OLDEST: Release = (0, 0)
PRIORITIES: Release = (0, 16)  # The first version whose order of priorities was compared with vLLM's own scheduler.
DRAFTS: Release = (0, 32)  # The first version whose speculative decoding was compared.
QUEUE_LIMIT: Release = (0, 29)  # First version with `--max-num-queued-reqs` (vllm/v1/engine/async_llm.py).
BFLOAT16_CACHE: Release = (0, 11)
"""The first version that takes `--kv-cache-dtype bfloat16` (vllm/config/cache.py, `CacheDType`; not in 0.10.0)."""
ASYNC: Release = (0, 10)  # The first version with `--async-scheduling` (vllm/engine/arg_utils.py).
MODULES: Release = (0, 19)  # The first version with `--lora-target-modules` (vllm/engine/arg_utils.py:1146 of 0.19.0).


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of vLLM that holds from version `since` on and ends with version `until` (None: it still holds). `where`:
    file, and line or function, in the version that is named."""

    name: str
    since: Release
    where: str
    says: str
    until: Release | None = None

    def holds(self, release: Release) -> bool:
        """Whether a version has this rule."""
        return self.since <= release and (self.until is None or release < self.until)


RULES = tuple(
    Rule(name, tuple(row["since"]), row["where"], row["says"], tuple(row.get("until", ())) or None)
    for name, row in _TABLE["rules"].items()
)
"""What settings that are None in a profile stand for, and what else depends on the version."""


@dataclass(frozen=True, slots=True)
class EngineRules:
    """Rules of a version, by their names in `RULES`; a profile's settings, if given, replace the last two."""

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
    """Return the rules of the engine's version; engines other than vLLM have neither of the last two. Raises
    `ValidationError`: the version is beyond the newest whose rules are known, or does not have a setting."""
    return _MADE(engine)


def _made(engine: EngineSpec) -> EngineRules:
    release = engine.release
    if release > READ[-1]:
        said = f"Expected a version of vLLM up to {_name(READ[-1])}, the newest whose rules are known,"
        raise ValidationError(f"{said} got {shown(engine.version)}.")
    bfloat16 = engine.name == "vllm" and engine.kv_cache_dtype == "bfloat16"
    for used, first, what in (
        (engine.max_num_queued_reqs is not None, QUEUE_LIMIT, "max_num_queued_reqs"),
        (bfloat16, BFLOAT16_CACHE, 'kv_cache_dtype "bfloat16"'),
        (engine.lora_target_modules, MODULES, "lora_target_modules"),
        (engine.scheduling_policy == "priority", PRIORITIES, 'scheduling_policy "priority"'),
        (engine.async_scheduling, OLDEST, "async_scheduling"),
        (engine.prefix_caching, OLDEST, "prefix_caching"),
    ):
        if used:
            check_since(first, engine, what)
    holds = {rule.name: rule.holds(release) for rule in RULES}
    for name in ("async_scheduling", "prefix_caching"):
        chosen = getattr(engine, name)
        holds[name] = engine.name == "vllm" and (holds[name] if chosen is None else chosen)
    return EngineRules(**{field.name: holds[field.name] for field in fields(EngineRules)})


_MADE = Memo(_made)


def caches_prefixes(workload: Workload, profile: Profile) -> bool:
    """Whether prompts of the fleet share prefixes and a server of this profile computes these only once."""
    return workload.shares_prefixes and rules_of(profile.engine).prefix_caching


def check_since(first: Release, engine: EngineSpec, what: str) -> None:
    """Raises `ValidationError`: the engine is another than vLLM, or of a version before the `first` with `what`."""
    if engine.name != "vllm" or engine.release < first:
        given = shown(f"{engine.name} {engine.version}")
        since = f"a version of vLLM from {_name(first)} on" if first > OLDEST else "a server of vLLM"
        raise ValidationError(f"Expected {since} with {what}, got {given}.")


def followed(engine: EngineSpec) -> str:
    """Return in words which version's rules hold if the engine's own version was not read; "" if it was."""
    release, numbered = engine.release, re.match(r"v?\d+\.\d", engine.version)
    if engine.name != "vllm" or (numbered and (release in READ or release > READ[-1])):
        return ""
    if not numbered:
        return f"vLLM {engine.version}, which is no version, follows the rules of {_name(V1_RELEASE)}"
    older = max((each for each in READ if each <= release), default=V1_RELEASE)
    return f"vLLM {engine.version} follows the rules of {_name(older)}, the newest before it"


def outage(engine: EngineSpec, slots: int, adapters: int) -> str:
    """Return in words when this version of vLLM ends although nothing is wrong, and what avoids it; "" if it does not.
    Near max_model_len drafts have no room: a request misses a step, and another adapter takes its slot."""
    rules = rules_of(engine)
    if not engine.speculation or not rules.async_scheduling or rules.slots_of_running or slots >= adapters:
        return ""
    said = f"vLLM {engine.version} ends in an assertion once a request with drafts reaches max_model_len and other"
    return f"{said} adapters wait for slots; vLLM 0.33, --no-async-scheduling or a slot for each adapter avoids it"


GIB = 2**30
SERVER_DEFAULTS: tuple[tuple[Release, float, str, int, int], ...] = (
    ((0, 28), 160 * GIB, "", 16_384, 1024),
    ((0, 10), 70 * GIB, "a100", 8192, 1024),
    ((0, 8), 70 * GIB, "", 8192, 1024),
    (OLDEST, 0.0, "", 2048, 256),
)
"""Defaults of an API server, by rows: first version, least bytes of the GPU, text that its name does not contain,
`max_num_batched_tokens`, `max_num_seqs` (vllm/engine/arg_utils.py: line 1596 in 0.8.5, 1669 in 0.10.2, 2582 in 0.28.0,
2923 in 0.32.0)."""


def server_defaults(release: Release, gpu_bytes: float, gpu_name: str) -> tuple[int, int]:
    """Return `max_num_batched_tokens` and `max_num_seqs` of an API server that is started without them.

    `gpu_bytes`: memory of one GPU, as the driver says. The newest row of `SERVER_DEFAULTS` for a size of GPU replaces
    older rows for the same size.
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
