"""Which servers may hold an adapter, as routers know it without looking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import njit

from packer.twin.cluster.residents import Residents, may_have, new_residents, note_residents
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.state import Servers


@njit
def note(c: Servers, known: Residents, s: int) -> None:
    """`note_residents`, which only kernels call."""
    note_residents(c, known, s)


@njit
def may(known: Residents, s: int, a: int) -> bool:
    """`may_have`, which only kernels call."""
    return bool(may_have(known.bits, s, a))


@pytest.mark.parametrize("seed", range(12))
def test_an_adapter_on_the_gpu_or_in_the_batch_is_never_missed(case: Callable[..., Any], seed: int) -> None:
    """Whatever a server holds in its slots or runs when a router looks, its filter says that it may."""
    found = case(seed)
    for share in (0.1, 0.4):
        run = simulate_cluster(found.workload, found.cluster, router="most-idle", duration_s=share * found.duration_s)
        state = run.state
        assert state is not None
        known = new_residents(state)
        for s in range(len(found.cluster)):
            note(state, known, s)
            held = state.adapters[s][1 : state.seen[s] + 1]
            held = held[(held["rank"] > 0) & ((held["resident"] == 1) | (held["in_batch"] > 0))]
            assert all(may(known, s, int(a)) for a in held["number"])
            if state.members.shape[1] > 1:
                listed = state.servers["entries"][s] + state.servers["residents"][s]
                assert known.length[s] <= listed
                assert np.count_nonzero(known.bits[:, s >> 3] & (1 << (s & 7))) <= listed
