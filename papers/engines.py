"""Common parts of engines with their own adapter cache: how adapters leave the GPU and how they are loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from packer.arrays import Record
from packer.papers.cache.loading import CpuAssist, loading_of
from packer.papers.state import CACHED, OWN, Own
from packer.twin.cluster.caching import FIXED
from packer.twin.engine.state import NO_LIMIT, ServerState
from packer.twin.memory.policy import memory_policy


class CellEngine:
    """Base of these engines, whose state per server is a record of `OWN`. None trains or serves the base model. Each
    has its own largest batch, and none reads the settings `unread` of vLLM."""

    name: ClassVar[str]
    unread: ClassVar[frozenset[str]] = frozenset(
        {"max_num_seqs", "max_num_queued_reqs", "prefix_caching", "async_scheduling"}
    )
    trains: ClassVar[bool] = False
    serves_base: ClassVar[bool] = False
    largest: ClassVar[str]  # Name of the setting that is the largest batch.
    places: ClassVar[int] = 1  # Places in `Own.order` for each request of the largest batch.
    cv: float = 0.0

    @property
    def batch(self) -> int:
        """Largest batch."""
        return int(getattr(self, self.largest))

    def refusal(self, policy: str, loading: str, form: str) -> str | None:
        """Why the engine can't run: the step law must be linear."""
        need = f"Engine {self.name!r} needs a linear step law, and the profile has the paper's"
        return None if form == "linear" else need

    def prepare(self, setup: Any, state: ServerState) -> ServerState:
        """Set the cache settings and the largest batch in the state of an idle server."""
        server = state.server
        server.kv_blocks, server.cache_rule, server.max_seqs = setup.cells, setup.policy.rule, self.batch
        return state

    def own(self, setup: Any) -> Record:
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


def memory(setups: Sequence[Any], rows: int) -> Own:
    """Initial state of servers with room for `rows` adapters each. Servers of other engines do not use theirs."""
    engines = [setup.engine for setup in setups if isinstance(setup.engine, CellEngine)]
    servers, batch = np.zeros(len(setups), dtype=OWN), max(engine.batch * engine.places for engine in engines)
    for s, setup in enumerate(setups):
        if isinstance(setup.engine, CellEngine):
            servers[s] = setup.engine.own(setup)
    adapters = np.zeros((len(setups), rows + 1), dtype=CACHED)
    return Own(servers, servers.copy(), adapters, np.zeros((len(setups), batch), dtype=np.int64))
