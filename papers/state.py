"""What engines with an adapter cache of their own keep of a server, besides what routers read of every server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
    ("max_wait", "i8"),  # decode steps between two looks at the queue
    ("cluster", "i8"),  # adapters in the batch from which on those of the batch come first
    ("abort_after_s", "f8"),  # wait after which a request is given up
    ("cores", "i8"),  # of the CPU, for prefills beside loads
    ("core_tokens", "i8"),  # most tokens of a request on one of them
    ("token_rank_ms", "f8"),  # time of a core for a token and a unit of rank
    ("sync_ms", "f8"),  # between CPU and GPU, in such a prefill
    # The batch.
    ("batch", "i8"),  # its length in `order`
    ("active_blocks", "i8"),  # cells of its adapters
    ("since", "i8"),  # decode steps since the last prefill
    ("decode_steps", "i8"),  # and in all
    ("prefilling", "i8"),  # whether a prefill is in flight
    # Loads and the queue.
    ("loading_blocks", "i8"),  # cells of adapters that are being loaded for waiting requests
    ("load_end_s", "f8"),  # when the adapter that is being loaded is there, infinite without one
    ("tag", "i8"),  # number of the last prefetch
    ("blocked", "i8"),  # whether nothing can be done before the next event
    ("left", "i8"),  # requests left behind by the last look at the queue
    ("arrivals", "f8"),  # smoothed
    ("admissions", "f8"),  # smoothed
    # Merged batches (`packer.papers.dlora`).
    ("policy", "i8"),  # which batches there are: `packer.papers.dlora.engine.POLICIES`
    ("credits", "f8"),  # credit with which requests of an adapter come first
    ("merged_ms", "f8"),  # time of a merged batch, and of one that is not, as the scheduler knows them
    ("mixed_ms", "f8"),
    ("switch_ms", "f8"),  # time to merge or to unmerge
    ("swap_ms", "f8"),  # time to move a block between GPU and host
    ("merged", "i8"),  # row of the adapter that is merged, 0: none
    ("join_share", "f8"),  # share of the requests from which on an adapter is merged
    ("stay_share", "f8"),  # and that from which on it stays so
    ("rounds", "i8"),  # steps since the last change between merged and not
    ("merged_count", "i8"),  # requests that merged batches of these steps have, or would have had
    ("mixed_count", "i8"),  # and those that batches by arrival would have had
    ("busiest", "i8"),  # row of the adapter with the most requests
    ("turns", "i8"),  # how often that was another one
    ("swapped_out", "i8"),  # whether this step moved a request to the host
    ("extra_ms", "f8"),  # of the step, to merge or unmerge and to move KV cache
)
CACHED = record(
    ("loading", "i8"),  # whether an adapter is on its way to the GPU
    ("kept", "i8"),  # whether a policy keeps it there
    ("uses", "i8"),
    ("wanted", "i8"),  # waiting requests
    ("tagged", "i8"),  # number of the prefetch that brought it
    ("counted", "i8"),  # step + 1 in whose prefill it was counted
    ("credit", "f8"),  # what batches without it owe it
    ("credited", "i8"),  # whether its requests come first because of that
    ("picked", "i8"),  # the same of the step that is planned, where 2 is yes
)


@runtime_checkable
class CellEngine(Protocol):
    """An engine that keeps this of a server."""

    @property
    def batch(self) -> int:
        """Largest batch."""

    def own(self, setup: Any) -> Record:
        """What it keeps of an idle server, a record of `OWN`."""


class Own(NamedTuple):
    """Of S servers: servers (S,) of `OWN` and fresh (S,) as they were before the first request; adapters (S, rows + 1)
    of `CACHED`; order int64 (S, batch): running requests, last to finish first.
    """

    servers: Record
    fresh: Record
    adapters: Record
    order: IntArray

    def with_rows(self, rows: int) -> Own:
        """The same with room for so many adapters each."""
        adapters = np.zeros((len(self.adapters), rows + 1), dtype=CACHED)
        adapters[:, : self.adapters.shape[1]] = self.adapters
        return self._replace(adapters=adapters)

    def reset(self, s: int) -> None:
        """Server `s` starts anew."""
        self.servers[s] = self.fresh[s]
        self.adapters[s] = self.order[s] = 0


def memory(setups: Sequence[Any], rows: int) -> Own:
    """Of idle servers, with room for so many adapters each; those of other engines have some that they do not use."""
    none = np.zeros(1, dtype=OWN)[0]
    own = [setup.engine.own(setup) if isinstance(setup.engine, CellEngine) else none for setup in setups]
    batch = max(setup.engine.batch for setup in setups if isinstance(setup.engine, CellEngine))
    servers, adapters = np.array(own, dtype=OWN), np.zeros((len(setups), rows + 1), dtype=CACHED)
    return Own(servers, servers.copy(), adapters, np.zeros((len(setups), batch), dtype=np.int64))


class CellState(NamedTuple):
    """One server: fields of `engine.state.ServerState`, and its part of `Own`."""

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
    """Server `s`, as views."""
    return CellState(
        c.servers[s], c.requests, c.links, c.adapters[s], c.classes[s], c.histogram[s], c.timeline[s], c.vector[s],
        own.servers[s], own.adapters[s], own.order[s],
    )  # fmt: skip
