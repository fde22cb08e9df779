"""Which adapters run on a server, as routers know it without looking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from packer.twin.cluster.residents import may_have, row_of_bits
from packer.twin.cluster.routers.base import AnyCluster, Request
from packer.twin.cluster.running import Running, new_running, note_running
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.state import Servers
from packer.twin.cluster.view import ClusterView


@njit
def note(c: Servers, known: Running, s: int) -> None:
    """`note_running`, which only kernels call."""
    note_running(c, known, s)


@njit
def may(known: Running, s: int, a: int) -> bool:
    """`may_have`, which only kernels call."""
    return bool(may_have(known.bits, s, a))


@njit
def row(known: Running, a: int) -> int:
    """`row_of_bits`, which only kernels call."""
    return int(row_of_bits(known.bits, a))


class Looking(AnyCluster):
    """A random router that follows the batches of some servers at each request, and compares."""

    name = "looking"

    def start(self, view: ClusterView, seed: int) -> None:
        """Nothing is known."""
        self.rng, self.known, self.looks = np.random.default_rng(seed), None, 0

    def route(self, request: Request, view: ClusterView) -> int:
        """Adapters of a batch are never missed; others have a bit only where they share it with one of the batch."""
        state: Any = view._servers
        self.known = new_running(state) if self.known is None else self.known
        for s in np.flatnonzero(self.rng.random(len(view.running)) < 0.7).tolist():
            note(state, self.known, s)
            held = state.adapters[s][1 : state.seen[s] + 1]
            held = held[held["rank"] > 0]
            batch = {row(self.known, int(a)) for a in held["number"][held["in_batch"] > 0]}
            if state.members.shape[1] > 1:
                bits = np.flatnonzero(self.known.bits[:, s >> 3] & (1 << (s & 7)))
                assert set(bits.tolist()) == batch
                self.looks += len(batch)
            assert all(may(self.known, s, int(a)) for a in held["number"][held["in_batch"] > 0])
        return int(self.rng.choice(view.candidates(request.adapter)))


def test_bits_are_those_of_the_batch(case: Callable[..., Any]) -> None:
    """At each request, whether a server was looked at since the last one or not."""
    looks = 0
    for seed in range(12):
        found, router = case(seed), Looking()
        simulate_cluster(found.workload, found.cluster, router=router, duration_s=found.duration_s, seed=seed)
        looks += router.looks
    assert looks > 100
