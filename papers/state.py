"""State per server of engines with their own adapter cache, in addition to the state that routers read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from packer.arrays import IntArray, Record, record
from packer.twin.cluster.state import Servers
from packer.twin.flags import ENGINE_FLAGS

OWN = record(
    # Settings.
    ("loading_mode", "i8"),  # how adapters are loaded (`cache.loading`)
    ("slot_limit", "i8"),  # most distinct adapters on the GPU
    ("high_water", "i8"),  # cells above which idle adapters leave
    ("max_wait", "i8"),  # decode steps between two checks of the queue
    ("cluster", "i8"),  # adapters in the batch from which on requests for these adapters are admitted first
    ("abort_after_s", "f8"),  # waiting time after which a request is dropped
    ("cores", "i8"),  # CPU cores for prefills during loads
    ("core_tokens", "i8"),  # most tokens of a request on one core
    ("token_rank_ms", "f8"),  # time of a core for a token and a unit of rank
    ("sync_ms", "f8"),  # exchange between CPU and GPU in a prefill that the CPU assists
    # The batch.
    ("batch", "i8"),  # number of its requests, which `order` holds
    ("active_blocks", "i8"),  # cells of its adapters
    ("since", "i8"),  # decode steps since the last prefill
    ("decode_steps", "i8"),  # total decode steps
    ("prefilling", "i8"),  # whether a prefill is in flight
    # Loads and the queue.
    ("loading_blocks", "i8"),  # cells of adapters that are being loaded for waiting requests
    ("load_end_s", "f8"),  # when the current load ends, infinite without a load
    ("tag", "i8"),  # number of the last prefetch
    ("blocked", "i8"),  # whether no step can start before the next event
    ("left", "i8"),  # requests still waiting after the last check of the queue
    ("arrivals", "f8"),  # requests between two checks of the queue, smoothed
    ("admissions", "f8"),  # requests admitted at a check, smoothed
    # Merged batches (`packer.papers.dlora`).
    ("policy", "i8"),  # how batches are formed: index into `packer.papers.dlora.engine.POLICIES`
    ("credits", "f8"),  # credit from which on requests of an adapter come first
    ("merged_ms", "f8"),  # the scheduler's estimate of the time of a merged batch
    ("mixed_ms", "f8"),  # and of an unmerged batch
    ("switch_ms", "f8"),  # time to merge or to unmerge
    ("swap_ms", "f8"),  # time to move a block between GPU and host
    ("merged", "i8"),  # row of the merged adapter, 0: none
    ("join_share", "f8"),  # share of the requests from which on an adapter is merged
    ("stay_share", "f8"),  # share of the requests from which on a merged adapter stays merged
    ("rounds", "i8"),  # steps since the last change between merged and unmerged
    ("merged_count", "i8"),  # requests that merged batches of these steps have, or would have had
    ("mixed_count", "i8"),  # requests that batches by arrival would have had in these steps
    ("busiest", "i8"),  # row of the adapter with the most requests
    ("turns", "i8"),  # how often the busiest adapter changed
    ("swapped_out", "i8"),  # whether this step moved a request to the host
    ("extra_ms", "f8"),  # time of the step to merge or unmerge and to move KV cache
)
CACHED = record(
    ("loading", "i8"),  # whether an adapter is on its way to the GPU
    ("kept", "i8"),  # whether a policy keeps it on the GPU
    ("uses", "i8"),  # requests that entered the batch
    ("wanted", "i8"),  # waiting requests
    ("tagged", "i8"),  # last prefetch that wanted it; dLoRA: step + 1 of its last mixed batch
    ("counted", "i8"),  # step + 1 of the last step that counted it
    ("credit", "f8"),  # credit for batches that left out its requests
    ("credited", "i8"),  # whether its requests come first because of its credit
    ("picked", "i8"),  # in the planned step, 1: examined; 2: its requests come first
)


class Own(NamedTuple):
    """State of S servers: servers (S,) of `OWN`; fresh (S,), a copy from before the first request; adapters
    (S, rows + 1) of `CACHED`; order int64 (S, batch): running requests, last to finish first."""

    servers: Record
    fresh: Record
    adapters: Record
    order: IntArray

    def with_rows(self, rows: int) -> Own:
        """Return this state with room for `rows` adapters per server."""
        adapters = np.zeros((len(self.adapters), rows + 1), dtype=CACHED)
        adapters[:, : self.adapters.shape[1]] = self.adapters
        return self._replace(adapters=adapters)

    def reset(self, s: int) -> None:
        """Reset server `s` to its initial state."""
        self.servers[s] = self.fresh[s]
        self.adapters[s] = self.order[s] = 0


class CellState(NamedTuple):
    """State of one server: the fields of `engine.state.ServerState`, and its part of `Own`."""

    server: Record
    requests: Record
    links: Record
    adapters: Record
    classes: Record
    histogram: IntArray
    timeline: Record
    vector: Any
    own: Record
    cached: Record
    order: IntArray


@njit(inline="always", **ENGINE_FLAGS)
def state_of(c: Servers, own: Own, s: int) -> CellState:
    """Views of the state of server `s`."""
    return CellState(
        c.servers[s], c.requests, c.links, c.adapters[s], c.classes[s], c.histogram[s], c.timeline[s], c.vector[s],
        own.servers[s], own.adapters[s], own.order[s],
    )  # fmt: skip
