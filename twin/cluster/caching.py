"""Cache policies: which adapters stay on the GPU of a server, for engines other than vLLM's, which has its own.

A policy names one of the compiled rules by which adapters leave, and may in addition keep adapters on servers of
its choice, at regular times. A third-party package registers a class under the entry-point group
`packer.caches`; parameters of a policy are the fields of its dataclass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable


if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView

(LRU, LFU, DROP, NOTHING, FIXED) = range(5)
"""Rules: idle adapters leave on demand, least recently or least frequently used first; with the last request;
with each request, which loads its adapter anew; never.
"""


@dataclass(frozen=True, slots=True)
class Move:
    """An adapter, by its index into the workload, is kept on a server from now on, or no longer."""

    adapter: int
    server: int
    keep: bool


@runtime_checkable
class CachePolicy(Protocol):
    """What every policy has.

    `rule`: one of the rules above. `high_water`: share of the memory above which idle adapters leave at once.
    `takes_memory`: False if adapters take none.
    """

    name: str
    rule: int
    high_water: float = 1.0
    takes_memory: bool = True


@runtime_checkable
class TickingPolicy(CachePolicy, Protocol):
    """A policy that acts every `period_s`."""

    period_s: float

    def start(self, view: ClusterView, seed: int) -> None:
        """Called once before the first request."""

    def tick(self, now_s: float, view: ClusterView) -> Iterable[Move]:
        """What to keep and what no longer, by what happened until now."""
