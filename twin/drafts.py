"""Priorities and drafts of a server, as the engine takes them, and the totals of drafts."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from packer.arrays import IntArray, Record
from packer.engine_spec import EngineSpec
from packer.twin.engine.each import Each, new_each
from packer.twin.engine_rules import DRAFTS, EngineRules, check_since
from packer.workload import Workload


class DraftTotals(NamedTuple):
    """Totals of speculative decoding: drafts, kept drafts, steps of decodes (one for each request), time of steps with
    decodes, s, and the part of that time that drafts and their verification took."""

    tried: int
    kept: int
    steps: int
    decode_s: float
    more_s: float

    @classmethod
    def of(cls, whole: Record) -> DraftTotals | None:
        """Return the totals of servers, (servers,) of `engine.each.WHOLE`; None without drafts."""
        return cls(*(whole[field].sum().item() for field in cls._fields)) if whole["drafts"].any() else None


def each_of(workload: Workload, engine: EngineSpec, rules: EngineRules, adapter: IntArray) -> Each:
    """Return the state that a server which counts requests one by one keeps of requests of these adapters. Raises
    `ValidationError`: speculative decoding is not simulated with its version."""
    settings: dict[str, float] = {
        "max_model_len": engine.max_model_len,
        "passes_itself": rules.passes_itself and engine.scheduling_policy == "priority",
        "caches_verified": rules.caches_verified,
    }
    spec, chances = engine.speculation, np.zeros(len(workload))
    if spec is not None:
        check_since(DRAFTS, engine, "speculative decoding")
        settings |= {
            "drafts": spec.num_speculative_tokens, "draft_slots": spec.method == "draft_model",
            "drops_block": spec.reads_ahead and not rules.hashes_ahead,
            "pass_ms": spec.draft_pass_ms, "token_ms": spec.draft_token_ms,
        }  # fmt: skip
        shares = [spec.acceptance if each.acceptance is None else each.acceptance for each in workload.adapters]
        chances[:] = [chance_of(share, spec.num_speculative_tokens) for share in shares]
    return new_each(np.require(adapter, np.int64, ["C"]), engine.server_seqs, chances, settings)


@lru_cache(maxsize=1024)
def chance_of(share: float, drafts: int) -> float:
    """Return the chance that a draft is kept if those before it are, so that `share` of all drafts are kept."""
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, drafts + 1)) < share * drafts else (low, middle)
    return high
