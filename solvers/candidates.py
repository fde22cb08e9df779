"""Which values of `max_loras` all solvers try, and how many adapters a GPU may hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.gpu import serves
from packer.predictors.bin_table import SLOT_RANK_FOR
from packer.profile import Profile
from packer.twin.arrivals import cut_words, draw_marks, unread_words
from packer.twin.engine_rules import rules_of
from packer.twin.memory.policy import kv_cache_tokens
from packer.twin.memory.starts import largest_max_loras
from packer.words import listed, plural
from packer.workload import Workload

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384)
"""Values of `max_loras` that searches try: two between powers of 2, up to the largest of arXiv 2602.24044."""

EVERY = 16  # Proofs try every value up to this, and the values of `LADDER` beyond.
MUCH = 1.25  # Fewer slots are tried if they give at least this many times the KV cache.
MANY_SHORT = 0.1  # Share of prompts that are no longer than their shared prefix from which on that is said.
AWAY = 2  # Distance, in candidates, of the other numbers of slots that are tried: about twice as many, or half as many.


def slot_ranks(ranks: IntArray, profile: Profile | None = None) -> IntArray:
    """Rank of the slot that an adapter of each rank takes, int64 (n,); None: on a server that takes every slot rank."""
    least = 1 if profile is None else profile.least_slot_rank
    return np.maximum(SLOT_RANK_FOR[ranks].astype(np.int64), least)


@lru_cache(maxsize=4096)
def most_slots_of(profile: Profile, max_lora_rank: int) -> int:
    """The most slots of a rank with which a server starts: more leave too little KV cache. 1 if it never starts."""
    return max(1, largest_max_loras(profile, max_lora_rank))


@lru_cache(maxsize=65536)
def max_loras_candidates(
    n_adapters: int, profile: Profile, max_lora_rank: int, *, proof: bool = False
) -> tuple[int, ...]:
    """Values of `max_loras` to try for a server of `n_adapters` adapters, ascending.

    The largest value is one slot for each adapter (more slots only take memory from the KV cache), or as many slots as
    leave enough KV cache to start the server. Smaller values come from `LADDER`. `proof`: also every smaller value up
    to `EVERY`. Of SGLang's servers also one less than the largest: requests to the base model take one slot more.
    """
    most = min(n_adapters, most_slots_of(profile, max_lora_rank))
    values = {*LADDER, *(range(1, EVERY + 1) if proof else ()), most - (profile.engine.name == "sglang")} - {0}
    return (*sorted(each for each in values if each < most), most)


def candidates_of(item: Bin, *, proof: bool = False) -> tuple[int, ...]:
    """`max_loras_candidates` of the adapters, the profile and the slot rank of a server."""
    return max_loras_candidates(len(item.adapters), item.profile, item.max_lora_rank, proof=proof)


def nearest(item: Bin, slots: int, *, proof: bool = False) -> list[int]:
    """`candidates_of` a server, the nearest to `slots` first."""
    return sorted(candidates_of(item, proof=proof), key=lambda n: abs(n - slots))


def neighbours(item: Bin, steps: int) -> tuple[int, ...]:
    """The candidates up to `steps` above (or, if negative, below) the slots that a server has, farthest first."""
    candidates = candidates_of(item)
    at = bisect_left(candidates, item.max_loras)
    if steps < 0:
        return candidates[max(0, at + steps) : at]
    above = at + (at < len(candidates) and candidates[at] == item.max_loras)
    return candidates[above : above + steps][::-1]


def gains_cache(item: Bin) -> bool:
    """Whether fewer slots would leave a server much more KV cache."""
    settings = [item.settings, *(item.with_slots(n).settings for n in neighbours(item, -AWAY)[:1])]
    now, *more = (kv_cache_tokens(item.profile, each) for each in settings)
    return any(tokens >= MUCH * max(now, 1) for tokens in more)


def tried_words(most: int) -> str:
    """The values of `max_loras` that a proof tried, in words, if it evaluated servers of up to `most` slots."""
    values = [*range(1, EVERY + 1), *(each for each in LADDER if EVERY < each < most)]
    shown = f"1 to {EVERY}, " + ", ".join(str(each) for each in values[EVERY:])
    return f"with max_loras from {{{shown.rstrip(', ')}, the most that are of use}}; "


def beyond_measured(workload: Workload, bins: Sequence[Bin], first: int = 0) -> tuple[str, ...]:
    """The sentences of `ignored_words`, and one on each kind of server that has more adapters than were measured.
    `first`: number of the first server."""
    many: dict[Profile, list[tuple[int, int]]] = {}
    for k, item in enumerate(bins, first):
        if len(item.adapters) > item.profile.measured_adapters:
            many.setdefault(item.profile, []).append((k, len(item.adapters)))
    beyond = (
        f"{plural(len(held), 'server')} {listed(k for k, _ in held)}: up to {max(n for _, n in held):,} adapters on "
        f"one, beyond the {profile.measured_adapters:,} up to which the profile was measured "
        f"(measured_adapters in {profile.name})"
        for profile, held in many.items()
    )
    return (*ignored_words(workload, [item.profile for item in bins]), *beyond)


def ignored_words(workload: Workload, profiles: Iterable[Profile]) -> tuple[str, ...]:
    """A sentence on each `max_model_len` of servers with these profiles that cuts requests for their base model, on
    each column that no server reads, and on prompts shorter than shared prefixes."""
    kinds, found = tuple(dict.fromkeys(profiles)), list[str]()
    for model in workload.models or (None,):
        own = [each for each in kinds if model is None or serves(each.model, model)]
        found += cut_words(workload.of_model(model)[1], own)
    return (*found, *unread_words(workload, kinds), *_short_words(workload, kinds))


def _short_words(workload: Workload, profiles: Iterable[Profile]) -> tuple[str, ...]:
    """A sentence if more than `MANY_SHORT` of the prompts have no token beyond the shared prefix of their adapter, and
    servers with one of these profiles cache prefixes."""
    prefix, caching = workload.shared_prefix_tokens, any(rules_of(each.engine).prefix_caching for each in profiles)
    if not caching or workload.arrivals.trace is not None or not prefix.any():
        return ()
    marks = draw_marks(workload, None, 10_000, 0)
    share = float(np.mean(marks.input_tokens <= prefix[marks.adapter]))
    return () if share <= MANY_SHORT else (
        f"{share:.0%} of the prompts are no longer than the shared prefix of their adapter, and count as part of it: "
        "input_tokens includes the prefix, and input_cv is the spread of whole prompts",
    )  # fmt: skip
