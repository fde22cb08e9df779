"""Cache policies decide which adapters stay on a server's GPU, for engines other than vLLM's, which has its own policy.

A policy names one of the compiled eviction rules below. It may also keep adapters on servers of its choice, at regular
times. A third-party package registers a class under the entry-point group `packer.caches`; the fields of its dataclass
are the policy's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable


if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView

(LRU, LFU, DROP, NOTHING, FIXED) = range(5)
"""Eviction rules. LRU, LFU: idle adapters leave on demand, least recently or least frequently used first; DROP: an
adapter leaves with its last request; NOTHING: with each request, so that each request loads its adapter; FIXED: never.
"""


@dataclass(frozen=True, slots=True)
class Move:
    """Keep an adapter (by its index into the workload) on a server from now on, or stop keeping it."""

    adapter: int
    server: int
    keep: bool


@runtime_checkable
class CachePolicy(Protocol):
    """Attributes of every policy. `rule`: one of the rules above. `high_water`: share of the memory above which idle
    adapters leave at once. `takes_memory`: False if adapters take no memory."""

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
        """Return the adapters to keep and to keep no longer, decided by what has happened until now."""
