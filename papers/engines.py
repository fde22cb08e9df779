"""Common parts of engines with their own adapter cache: how adapters leave the GPU and how they are loaded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from packer.arrays import Record
from packer.papers.cache.loading import CpuAssist, loading_of
from packer.papers.state import OWN
from packer.twin.cluster.caching import FIXED
from packer.twin.engine.state import NO_LIMIT, ServerState
from packer.twin.memory.policy import memory_policy

UNREAD = frozenset({"max_num_seqs", "max_num_queued_reqs", "prefix_caching", "async_scheduling"})
"""Settings of vLLM that no engine here reads; each has its own largest batch."""


def refusal(name: str, form: str) -> str | None:
    """Why an engine can't run with a step law of this form; None if it can."""
    need = f"Engine {name!r} needs a linear step law, and the profile has the paper's"
    return None if form == "linear" else need


def prepared(setup: Any, state: ServerState, max_seqs: int) -> ServerState:
    """Set the cache settings and the largest batch, `max_seqs`, in the state of an idle server."""
    server = state.server
    server.kv_blocks, server.cache_rule, server.max_seqs = setup.cells, setup.policy.rule, max_seqs
    return state


def own_of(setup: Any) -> Record:
    """Initial engine state of a server, a record of `OWN`."""
    own, policy = np.zeros(1, dtype=OWN)[0], setup.policy
    slots = memory_policy(setup.server.profile).fixed_slots and policy.rule != FIXED
    own.loading_mode, assist = loading_of(setup.loading)
    if isinstance(assist, CpuAssist):
        own.cores, own.core_tokens = max(1, assist.cores // setup.sharing), assist.core_tokens
        own.token_rank_ms = assist.token_rank_ms(setup.server.profile.model.lora_bytes_per_rank)
        own.sync_ms = assist.sync_ms
    own.slot_limit = setup.server.settings.max_loras if slots else NO_LIMIT
    own.high_water = NO_LIMIT if policy.high_water >= 1.0 else int(policy.high_water * setup.cells)
    own.abort_after_s = own.load_end_s = math.inf
    own.arrivals = own.admissions = 1.0
    return own
