"""Which servers may serve which adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.cluster import Cluster
from packer.errors import ValidationError, shown
from packer.workload import Workload


@dataclass(frozen=True, eq=False)
class Candidates:
    """Adapters with the same servers form a group: a fleet of equal servers has one.

    group int64 (m,): group of each adapter. start int64 (g + 1,): the servers of group k are
    `server[start[k]:start[k + 1]]`, in increasing order, int64. share float64, beside `server`: share of the
    adapter's requests by the placement; 1 without one.
    """

    group: IntArray
    start: IntArray
    server: IntArray
    share: FloatArray

    def same(self, other: Candidates) -> bool:
        """Whether each adapter has the same servers and shares."""
        mine, theirs = ((c.group, c.start, c.server, c.share) for c in (self, other))
        return all(np.array_equal(one, two) for one, two in zip(mine, theirs, strict=True))

    def of(self, adapter: int) -> IntArray:
        """Servers that may serve an adapter, int64."""
        k = int(self.group[adapter])
        return self.server[self.start[k] : self.start[k + 1]]

    def groups_of_servers(self, servers: int) -> list[tuple[int, ...]]:
        """The groups that each server may serve, in increasing order."""
        found: list[list[int]] = [[] for _ in range(servers)]
        for k in range(len(self.start) - 1):
            for server in self.server[self.start[k] : self.start[k + 1]].tolist():
                found[server].append(k)
        return [tuple(groups) for groups in found]


def candidates_of(cluster: Cluster, workload: Workload, slot_ranks: Sequence[int]) -> Candidates:
    """The groups of a cluster; `slot_ranks`: the largest rank that each server holds.

    Raises `ValidationError`: no server may serve an adapter, or the placement names an adapter that the workload
    lacks.
    """
    ranks = np.asarray(slot_ranks, dtype=np.int64)
    if len(workload.models) > 1 and cluster.placement is None:
        raise ValidationError(
            f"Expected a placement for adapters of several base models ({', '.join(workload.models)}): plan.cluster()."
        )
    if cluster.placement is None:
        steps = np.unique(ranks)  # an adapter's group is the least slot rank that holds it
        groups = [[(int(s), 1.0) for s in np.flatnonzero(ranks >= step)] for step in steps]
        return grouped(workload, np.searchsorted(steps, workload.ranks), [*groups, []])
    number = {name: i for i, name in enumerate(workload.names)}
    placed: list[list[tuple[int, float]]] = [[] for _ in number]
    for server, adapters in enumerate(cluster.placement):
        for name, share in adapters.items():
            if name not in number:
                raise ValidationError(f"Expected to place adapters of the workload, got {shown(name)}.")
            if workload.ranks[number[name]] <= ranks[server]:
                placed[number[name]].append((server, share))
    order = {key: k for k, key in enumerate(dict.fromkeys(map(tuple, placed)))}
    group = np.array([order[tuple(item)] for item in placed], dtype=np.int64)
    return grouped(workload, group, list(map(list, order)))


def grouped(
    workload: Workload, group: IntArray, groups: Sequence[list[tuple[int, float]]], *, gaps: bool = False
) -> Candidates:
    """Candidates from the group of each adapter, and the (server, share) of each group.

    `gaps`: adapters may have no server. Else raises `ValidationError` where one has none.
    """
    sizes = np.array([len(item) for item in groups], dtype=np.int64)
    without = np.flatnonzero(sizes[group] == 0)
    if len(without) and not gaps:
        i = int(without[0])
        raise ValidationError(
            f"Expected a server for every adapter, but none may serve {shown(workload.names[i])} "
            f"(rank {workload.ranks[i]})."
        )
    pairs = [pair for item in groups for pair in item]
    return Candidates(
        group.astype(np.int64),
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.array([server for server, _ in pairs], dtype=np.int64),
        np.array([share for _, share in pairs], dtype=np.float64),
    )
