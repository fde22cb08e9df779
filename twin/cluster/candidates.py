"""Which servers may serve which adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.cluster import Cluster
from packer.errors import ValidationError, shown
from packer.words import counted
from packer.workload import Workload


class Candidates(NamedTuple):
    """Groups of adapters that the same servers may serve: without a placement, equal servers make one group.

    group int64 (m,): group of each adapter. start int64 (g + 1,): group k has the servers
    `server[start[k]:start[k + 1]]`, in increasing order, int64. share float64, parallel to `server`: share of each
    adapter's requests by the placement; 1 without a placement.
    """

    group: IntArray
    start: IntArray
    server: IntArray
    share: FloatArray

    def same(self, other: Candidates) -> bool:
        """Whether each adapter has the same servers and shares."""
        return all(np.array_equal(one, two) for one, two in zip(self, other, strict=True))

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
    """Return the candidates of a cluster; `slot_ranks`: the largest rank that the slots of each server hold. Raises
    `ValidationError`: no server may serve an adapter, the placement names an adapter that the workload does not have,
    or adapters of several base models have no placement."""
    if len(workload.models) > 1 and cluster.placement is None:
        said = f"Expected a placement for adapters of several base models ({', '.join(workload.models)}):"
        raise ValidationError(f"{said} plan.cluster().")
    placement = None
    if cluster.placement is not None:
        number = {name: i for i, name in enumerate(workload.names)}
        names = dict.fromkeys(name for placed in cluster.placement for name in placed)
        if unknown := [name for name in names if name not in number]:
            lacks = f"lacks {len(unknown):,} of its {counted(len(names), 'adapter')}, as {shown(unknown[0])}"
            raise ValidationError(
                f"Expected a plan or placement of this workload, got one of another: the workload {lacks}."
            )
        placement = [{number[name]: share for name, share in each.items()} for each in cluster.placement]
    found = allowed(workload, np.asarray(slot_ranks, dtype=np.int64), range(len(cluster)), placement)
    without = np.flatnonzero(np.diff(found.start)[found.group] == 0)
    if len(without):
        i = int(without[0])
        may = placement is None or any(i in placed for placed in placement)
        rule = f"Expected a server for every adapter, but {'none may serve' if may else 'the placement has none for'}"
        raise ValidationError(f"{rule} {shown(workload.names[i])} (rank {workload.ranks[i]}).")
    return found


def allowed(
    workload: Workload, ranks: IntArray, on: Iterable[int], placement: Sequence[Mapping[int, float]] | None
) -> Candidates:
    """Group the adapters by the servers among `on` that may serve them; an adapter may have no server. `ranks` (S,):
    the largest rank that each server holds. `placement`: adapters of each server with their shares; None: every server
    may serve every adapter that its slots hold."""
    groups: list[list[tuple[int, float]]]
    if placement is None:
        steps = distinct(ranks)  # an adapter's group is the least slot rank that holds it
        group = np.searchsorted(steps, workload.ranks)
        groups = [*([(s, 1.0) for s in on if ranks[s] >= step] for step in steps), []]
    else:
        placed: list[list[tuple[int, float]]] = [[] for _ in range(len(workload))]
        for s in on:
            for a, share in placement[s].items():
                if workload.ranks[a] <= ranks[s]:
                    placed[a].append((s, share))
        # If no server that is on has a share of an adapter, those that hold it share its requests equally.
        held = [tuple(own if any(share for _, share in own) else ((s, 1.0) for s, _ in own)) for own in placed]
        order = {key: k for k, key in enumerate(dict.fromkeys(held))}
        group, groups = np.array([order[own] for own in held]), list(map(list, order))
    pairs = [pair for item in groups for pair in item]
    return Candidates(
        group.astype(np.int64),
        np.concatenate([[0], np.cumsum([len(item) for item in groups])]).astype(np.int64),
        np.array([server for server, _ in pairs], dtype=np.int64),
        np.array([share for _, share in pairs], dtype=np.float64),
    )
