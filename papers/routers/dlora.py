"""Router "dlora": the replica holder whose requests take the fewest rounds of merged and unmerged batches.

Its reactive program moves requests and adapters between two engines (Wu et al., dLoRA, OSDI 2024, section 5; by its
artifact: github.com/LLMServe/dLoRA-artifact, vllm/engine/migration_ilp.py and engine_manager.py,
`migration_schedule`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from packer import checks
from packer.arrays import IntArray
from packer.cluster import Cluster
from packer.twin.cluster.routers.base import Request, Resend
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView


MERGED_ROUND = 0.6  # Time of a merged batch, which has one adapter, relative to an unmerged batch.
LINK_BYTES_S = 32 * 2.0**30
UNKNOWN_S = 5.0  # Service time of an adapter without finished requests.


@dataclass
class DLoraRouter:
    """dLoRA's dispatcher (Wu et al., OSDI '24), to one of the servers that the placement gives the adapter.

    With batches of `batch` requests and n_m requests of adapter m, the cost of a server is 0.6 × Σ floor(n_m / batch)
    merged rounds plus floor(Σ (n_m mod batch) / batch) unmerged rounds. The lowest cost wins, then the fewest requests.
    `mode` "migrate": a server without the adapter may take the request too. It gives up an idle adapter that another
    server also holds, and its cost includes the transfer over a link of 32 GiB/s. `mode` "periodic": every `period_s`,
    requests and adapters move between the fullest and the emptiest engine (`balance`), which
    must be `dlora`. Moved requests keep their tokens; their KV cache is computed again. Places that the program leaves
    free keep their old adapters. An adapter that no server holds goes to the server with the fewest requests.
    """

    name = "dlora"
    mode: str = "dispatch"
    batch: int = 32
    period_s: float = 10.0

    def __post_init__(self) -> None:
        checks.integer("batch", self.batch, low=1)
        checks.choice("mode", self.mode, ("dispatch", "migrate", "periodic"))

    @property
    def relocates(self) -> bool:
        """Whether the placement only gives the initial servers of the adapters."""
        return self.mode != "dispatch"

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Why the router can't run: to migrate adapters, it needs an initial placement."""
        if self.relocates and cluster.placement is None:
            return f"mode={self.mode} needs a placement to start from: use plan.cluster(), or the system dlora"
        return None

    def start(self, view: ClusterView, seed: int) -> None:
        """Put adapters on the servers of the placement, or on all servers without a placement."""
        placement, number = view.cluster.placement, {name: i for i, name in enumerate(view.workload.names)}
        everywhere = set(range(len(view.workload)))
        servers = range(len(view.cluster))
        if placement is None:
            self._holds = [everywhere for _ in servers]
        else:
            self._holds = [{number[name] for name in placement[s]} for s in servers]
        self._given = [np.zeros((0, 2), dtype=np.int64) for _ in servers]

    def route(self, request: Request, view: ClusterView) -> int:
        """Choose the server with the lowest cost."""
        a = request.adapter
        allowed: list[int] = view.candidates(a).tolist()
        holders = [s for s in allowed if a in self._holds[s]] if self.relocates else allowed
        rows = {s: self._requests(s, view) for s in (allowed if self.relocates else holders)}
        if not holders:
            holders = [min(allowed, key=lambda s: (len(self._given[s]), s))]
            self._holds[holders[0]].add(a)
        best = min((self._cost(rows[s], a), len(self._given[s]), s, -1) for s in holders)
        if self.mode == "migrate":
            moved_s = float(view.adapter_bytes[a]) / LINK_BYTES_S
            for s in (each for each in allowed if each not in holders):
                # An adapter without requests here that another server holds too.
                idle = (x for x in sorted(self._holds[s]) if not rows[s][x])
                spare = next((x for x in idle if sum(x in held for held in self._holds) > 1), None)
                if spare is not None:
                    best = min(best, (self._cost(rows[s], a) + moved_s, len(self._given[s]), s, spare))
        _, _, server, spare = best
        if spare >= 0:
            self._holds[server] = (self._holds[server] - {spare}) | {a}
        self._given[server] = np.append(self._given[server], [[request.number, a]], axis=0)
        return server

    def tick(self, now_s: float, view: ClusterView) -> list[Resend]:
        """In mode "periodic", choose the requests that move to another server."""
        if self.mode != "periodic":
            return []
        known = [self._accepted(s, view) for s in range(len(self._given))]
        room = view.kv_blocks.tolist()
        pair = engines_to_balance([sum(n for _, _, n in own) for own in known], room, list(map(len, known)))
        if not pair:
            return []
        rows = [(e, number, a, blocks) for e, s in enumerate(pair) for number, a, blocks in known[s]]
        means = {a: view.served_s(a) for a in {a for _, _, a, _ in rows}}
        task = Task(
            [(e, a, blocks) for e, _, a, blocks in rows],
            [room[s] for s in pair],
            [len(self._holds[s]) for s in pair],
            {a: UNKNOWN_S if math.isnan(mean) else mean for a, mean in means.items()},
            view.block_bytes / LINK_BYTES_S,
        )
        chosen, held = balance(task)
        for s, wanted in zip(pair, held, strict=False):
            # An engine holds as many adapters as before: unwanted ones stay in the places that are left.
            before = sorted(self._holds[s] - wanted)
            self._holds[s] = wanted | set(before[: max(0, len(self._holds[s]) - len(wanted))])
        moves = []
        for (e, number, a, _), to in zip(rows, chosen, strict=True):
            if to != e:
                self._given[pair[e]] = self._given[pair[e]][self._given[pair[e]][:, 0] != number]
                self._given[pair[to]] = np.append(self._given[pair[to]], [[number, a]], axis=0)
                moves.append(Resend(number, pair[to]))
        return moves

    def _accepted(self, s: int, view: ClusterView) -> list[tuple[int, int, int]]:
        """Number, adapter and blocks of the unfinished requests that a server's engine has accepted."""
        self._requests(s, view)
        rows = np.column_stack([self._given[s], view.blocks_of(self._given[s][:, 0])])
        return [tuple(row) for row in rows[rows[:, 2] >= 0].tolist()]

    def _requests(self, s: int, view: ClusterView) -> IntArray:
        """Unfinished requests of each adapter on a server, (m,)."""
        own = self._given[s]
        self._given[s] = own[view.is_unfinished(own[:, 0])]
        return np.bincount(self._given[s][:, 1], minlength=len(view.workload))

    def _cost(self, requests: IntArray, a: int) -> float:
        counts = requests.copy()
        counts[a] += 1
        merged = int((counts // self.batch).sum())
        return MERGED_ROUND * merged + int((counts % self.batch).sum()) // self.batch


MOVE_S = 0.05  # Cost of moving a request, s.
FULL = 0.9  # Used share of the KV cache from which on an engine is full.
FEWEST_TOO_MANY = 16  # An engine has too many requests if it has at least this number more than the mean.
EFFORT, GAP = 0.5, 1e-3  # Deterministic time and gap at which CP-SAT stops: by wall time, two runs would differ.


@dataclass(frozen=True)
class Task:
    """Requests (engine, adapter, blocks); KV blocks and adapter places per engine; times per adapter and per block."""

    requests: Sequence[tuple[int, int, int]]
    blocks: Sequence[int]
    places: Sequence[int]
    service_s: dict[int, float]
    block_s: float


def engines_to_balance(blocks: Sequence[int], room: Sequence[int], requests: Sequence[int]) -> list[int]:
    """The engines with the most and fewest used blocks if the first is full and the second is not. Otherwise the
    engines with the most and fewest requests if the first has too many; otherwise []."""
    order = sorted(range(len(blocks)), key=lambda e: (blocks[e], e))
    least, most = order[0], order[-1]
    if blocks[most] >= FULL * room[most] and blocks[least] < FULL * room[least]:
        return sorted([most, least])
    order = sorted(range(len(requests)), key=lambda e: (requests[e], e))
    average = sum(requests) / len(requests)
    few, many = order[0], order[-1]
    if few == many or requests[many] - average < FEWEST_TOO_MANY or requests[few] >= average:
        return []
    return sorted([many, few])


def balance(task: Task) -> tuple[list[int], list[set[int]]]:
    """The new engine of each request, and the adapters that each engine must hold for its requests.

    Minimises the largest time of an engine: service of its requests, 0.05 s for each request that moves to it, and
    transfer of blocks that do not fit. The artifact's program may split a request, and sends it to the engine of its
    largest part. Here one variable counts the requests of one adapter that go from one engine to another, each with
    their mean blocks, so the time to solve does not grow with the number of requests. The last requests move first.
    """
    from ortools.sat.python import cp_model

    engines, adapters = range(len(task.blocks)), sorted({a for _, a, _ in task.requests})
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (at, a, _) in enumerate(task.requests):
        groups.setdefault((at, a), []).append(i)
    blocks = {key: round(sum(task.requests[i][2] for i in own) / len(own)) for key, own in groups.items()}
    model = cp_model.CpModel()
    x = {key: [model.new_int_var(0, len(own), "") for _ in engines] for key, own in groups.items()}
    y = {a: [model.new_bool_var("") for _ in engines] for a in adapters}
    most_us = sum(round(1e6 * (s + MOVE_S)) for s in (task.service_s[a] for _, a, _ in task.requests))
    block_us = round(1e6 * task.block_s)
    longest = model.new_int_var(0, most_us + block_us * sum(n for _, _, n in task.requests), "")
    for key, own in groups.items():
        model.add(sum(x[key]) == len(own))
        for e in engines:
            model.add(x[key][e] <= len(own) * y[key[1]][e])
    for e in engines:
        model.add(sum(y[a][e] for a in adapters) <= task.places[e])
        held = sum(blocks[key] * x[key][e] for key in groups)
        time_us = sum(round(1e6 * (task.service_s[a] + (MOVE_S if at != e else 0.0))) * x[at, a][e] for at, a in groups)
        # Transfers only count beyond the engine's blocks: if all fit, this bound is the larger one.
        model.add(longest >= time_us)
        model.add(longest >= time_us + block_us * (held - task.blocks[e]))
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time, solver.parameters.relative_gap_limit = EFFORT, GAP
    chosen = [at for at, _, _ in task.requests]
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return chosen, []
    for (at, a), own in groups.items():
        left = len(own)
        for e in engines:
            count = solver.value(x[at, a][e]) if e != at else 0
            for i in own[left - count : left]:
                chosen[i] = e
            left -= count
    return chosen, [{a for a in adapters if solver.value(y[a][e])} for e in engines]
