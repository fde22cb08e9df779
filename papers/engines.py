"""What engines with an adapter cache of their own have in common: how adapters leave the GPU and are loaded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from packer.papers.cache.loading import loading_of
from packer.twin.cluster.caching import FIXED
from packer.twin.engine import state as rows
from packer.twin.memory.policy import memory_policy


def refusal(name: str, form: str) -> str | None:
    """Why an engine can't run with a step law of this form; None if it can."""
    need = f"Engine {name!r} needs a linear step law, and the profile has the paper's"
    return None if form == "linear" else need


def prepared(setup: Any, state: rows.ServerState, max_seqs: int) -> rows.ServerState:
    """The state of an idle server with the settings of its cache, and room for a batch of `max_seqs` requests."""
    ints, floats, policy = state.ints, state.floats, setup.policy
    slots = memory_policy(setup.server.profile).fixed_slots and policy.rule != FIXED
    ints[rows.KV_BLOCKS] = setup.cells
    ints[rows.CACHE_RULE] = policy.rule
    ints[rows.LOADING_MODE], floats[rows.CPU_FACTOR] = loading_of(setup.loading)
    ints[rows.SLOT_LIMIT] = setup.server.settings.max_loras if slots else rows.NO_LIMIT
    high = policy.high_water
    ints[rows.HIGH_WATER] = rows.NO_LIMIT if high >= 1.0 else int(high * setup.cells)
    ints[rows.MAX_SEQS] = max_seqs
    floats[rows.ABORT_AFTER_S] = math.inf
    floats[rows.ARRIVALS] = floats[rows.ADMISSIONS] = 1.0
    return state._replace(sets=np.zeros((rows.N_SETS, max_seqs), dtype=np.int64))
