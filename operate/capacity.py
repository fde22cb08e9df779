"""What a server holds within the goal, by the twin: the largest load of its adapters' mix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

from packer.adapter import Adapter
from packer.checks import slot_rank_for
from packer.cluster import ServerKind
from packer.plan import Plan
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

STEP = 1.05
"""Loads that are tried differ by this factor."""
SPAN_S, MOST_REQUESTS = 1200.0, 30_000
"""Simulated time of a server, which ends earlier where so many requests have come."""
MOST_STEPS = 60
NEARLY = 0.15
"""A load that differs by less from the one that was simulated needs no new simulation."""


class Expected(NamedTuple):
    """What the twin says of a server: latencies, ms, and the share of prompt tokens found in the prefix cache."""

    mean_ttft_ms: float
    mean_itl_ms: float
    hit_rate: float


def server_kinds(plan: Plan, count: int) -> list[ServerKind]:
    """The kinds of the servers, in their order; those beyond the plan's are of the kind that takes most adapters."""
    cluster = plan.cluster()
    kinds = [cluster.kind(k) for k in range(len(cluster))]
    most = max(kinds, key=lambda kind: (kind.max_lora_rank or 0, kind.max_loras))
    return [*kinds, *(most for _ in range(count - len(kinds)))][:count]


def rank_of(kind: ServerKind, fleet: Workload) -> int:
    """Largest rank that servers of this kind take."""
    return slot_rank_for(int(fleet.ranks.max())) if kind.max_lora_rank is None else kind.max_lora_rank


@dataclass(eq=False)
class Capacity:
    """Asks the twin for each server, beginning at the load that it held the last time."""

    workload: Workload
    kinds: Sequence[ServerKind]
    seed: int = 0
    _last: dict[str, int] = field(default_factory=dict)
    simulated: int = 0
    _expected: dict[int, tuple[Set[int], float, Expected]] = field(default_factory=dict)

    def of(self, server: int, load: Mapping[int, float]) -> float:
        """Load that the server keeps the goal at, tok/s; `load`: of its adapters, tok/s, whose mix counts."""
        return self.of_kind(self.kinds[server], load)

    def served(self, workload: Workload) -> None:
        """From now on requests are like this."""
        self.workload = workload
        self._expected.clear()

    def expected(self, server: int, load: Mapping[int, float]) -> Expected:
        """What the twin says of a server with this load, tok/s by adapter; as before while the load is nearly so."""
        total = sum(load.values())
        before = self._expected.get(server)
        if before is None or before[0] != load.keys() or abs(total / before[1] - 1.0) > NEARLY:
            run = self.run(self.kinds[server], load)
            before = load.keys(), total, Expected(run.mean_ttft_ms, run.mean_itl_ms, run.prefix_hit_rate)
            self._expected[server] = before
        return before[2]

    def of_kind(self, kind: ServerKind, load: Mapping[int, float]) -> float:
        """The same of a kind of server."""
        k = self._last.get(kind.name, round(math.log(sum(load.values())) / math.log(STEP)))
        step = 1 if kind.name in self._last else 8
        holds = self._holds(kind, load, k)
        way = step if holds else -step
        for _ in range(MOST_STEPS):
            if self._holds(kind, load, k + way) != holds:
                break
            k += way
        else:
            return STEP**k
        low, high = sorted((k, k + way))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._holds(kind, load, middle) else (low, middle)
        self._last[kind.name] = low
        return STEP**low

    def _holds(self, kind: ServerKind, load: Mapping[int, float], k: int) -> bool:
        return self.run(kind, load, STEP**k / sum(load.values())).slo_used <= 1.0

    def run(self, kind: ServerKind, load: Mapping[int, float], factor: float = 1.0) -> Run:
        """The server with this load, times a factor."""
        self.simulated += 1
        fleet = self.workload
        adapters: list[Adapter] = [
            replace(fleet.adapters[a], rate=max(factor * tok_s / float(fleet.mean_tokens[a]), 1e-6))
            for a, tok_s in load.items()
        ]
        settings = kind.profile.settings(kind.max_loras, rank_of(kind, fleet))
        given = replace(fleet, adapters=tuple(adapters))
        span_s = min(SPAN_S, MOST_REQUESTS / given.rate)
        return simulate(given, kind.profile, **asdict(settings), duration_s=span_s, seed=self.seed)
