"""The capacity of a server by the twin: the largest load of its adapters' mix within the goal. Also what its prefix
cache holds, and what is lost of that when adapters move."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np

from packer.adapter import IDLE_RATE, Adapter
from packer.arrays import FloatArray
from packer.checks import slot_rank_for
from packer.cluster import ServerKind
from packer.plan import Plan
from packer.search import fewest, reach
from packer.solvers.nearest import Nearest
from packer.twin.engine_rules import rules_of
from packer.twin.memory.policy import kv_cache_tokens
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.words import counted, listed
from packer.workload import Workload

STEP = 1.05  # Ratio of successive loads that are tried.
SPAN_S, MOST_REQUESTS = 1200.0, 30_000  # Simulated time of a server, or the time of so many requests if shorter.
MOST_STEPS = 60
NEARLY = 0.15  # A load that differs by less than this share from the simulated one needs no new simulation.


class Left(NamedTuple):
    """Names of adapters without a server: `large` have a rank above `highest`, the largest that a server takes; for
    `others`, of ranks up to `rank`, there is no room, of which a server has `room` on average."""

    large: Sequence[str]
    highest: int
    others: Sequence[str]
    rank: int
    room: float

    @property
    def servers(self) -> int:
        """Number of servers that have room for `others`."""
        return max(1, math.ceil(len(self.others) / self.room)) if self.others else 0

    def words(self, starting: int) -> str:
        """Who has no server and why; empty if the servers that start, so many, have room for all."""
        found = [f"no server takes a rank above {self.highest}: {listed(self.large)}"] if self.large else []
        if self.servers > starting:
            found += [f"no server has room for {counted(len(self.others), 'adapter')}: {listed(self.others)}"]
        return "; ".join(found)


class Expected(NamedTuple):
    """The twin's prediction for a server: latencies, ms, and the share of prompt tokens found in the prefix cache."""

    mean_ttft_ms: float
    mean_itl_ms: float
    hit_rate: float


def server_kinds(plan: Plan, count: int) -> list[ServerKind]:
    """The kinds of the servers, in order; those beyond the plan's have its kind with the largest rank, most slots."""
    cluster = plan.cluster()
    kinds = [cluster.kind(k) for k in range(len(cluster))]
    most = max(kinds, key=lambda kind: (kind.max_lora_rank or 0, kind.max_loras))
    return [*kinds, *(most for _ in range(count - len(kinds)))][:count]


def rank_of(kind: ServerKind, fleet: Workload) -> int:
    """Largest rank that servers of this kind take."""
    return slot_rank_for(int(fleet.ranks.max())) if kind.max_lora_rank is None else kind.max_lora_rank


def left_of(left: Collection[int], fleet: Workload, kinds: Sequence[ServerKind], rooms: Sequence[int | None]) -> Left:
    """Why these adapters have no server. `rooms`: maximum adapters of each server; None: any number."""
    names, ranks, highest = fleet.names, fleet.ranks.tolist(), max(rank_of(kind, fleet) for kind in kinds)
    known = [math.inf if room is None else room for room in rooms]
    others = [a for a in left if 0 < ranks[a] <= highest]
    return Left(
        [names[a] for a in left if ranks[a] > highest], highest, [names[a] for a in others],
        max((ranks[a] for a in others), default=0), float(np.mean(known)) if known else math.inf,
    )  # fmt: skip


def load_of(held: Mapping[int, float], load: FloatArray) -> dict[int, float]:
    """Load of each adapter on a server, tok/s. `held`: shares by adapter; `load`: of each adapter in total, tok/s."""
    return {a: tok_s for a, share in held.items() if (tok_s := load[a] * share) > 0.0}


@dataclass(eq=False)
class Capacity:
    """Simulates the capacity of servers, starting at the last capacity that was found for the kind."""

    workload: Workload
    kinds: Sequence[ServerKind]
    seed: int = 0
    _last: dict[str, int] = field(default_factory=dict)
    _expected: dict[int, tuple[Set[int], float, Expected]] = field(default_factory=dict)

    def of(self, server: int, load: Mapping[int, float]) -> float:
        """The largest load at which the server keeps the goal, tok/s. `load`: of its adapters; only the mix counts."""
        kind = self.kinds[server]
        # Servers of a kind differ little: begin at the last capacity, else in wide steps from the load.
        k = self._last.get(kind.name, round(math.log(sum(load.values())) / math.log(STEP)))
        step = 1 if kind.name in self._last else 8
        low, high = k - MOST_STEPS * step, k + MOST_STEPS * step
        even = 2 * MOST_STEPS  # steps outwards never grow
        held, _ = reach(lambda n: self._holds(kind, load, n), low, high, start=k, step=step, same=even)
        if low <= held < high:
            self._last[kind.name] = held
        return STEP ** max(low, held)

    def _holds(self, kind: ServerKind, load: Mapping[int, float], k: int) -> bool:
        return self.run(kind, load, STEP**k / sum(load.values())).slo_used <= 1.0

    def more(self, new: int, there: Sequence[int], load: FloatArray, tok_s: float, low: int, high: int) -> int:
        """The fewest servers like `new`, from `low`, that hold `tok_s` with those `there`; else `high`. Each has its
        part of all adapters, and no more of them than slots if there are enough slots: after a loss, servers with
        more hold far less."""
        hottest, slots = np.argsort(-load, kind="stable").tolist(), self.kinds[new].max_loras
        beyond = len(hottest) - sum(self.kinds[s].max_loras for s in there)

        def enough(more: int) -> bool:
            n = len(there) + more
            own = hottest[::n][: slots if beyond <= more * slots else None]
            return n * self.of(new, {a: float(load[a]) for a in own}) >= tok_s

        found = fewest(enough, low, high)
        return high if found is None else found

    def without(self, lost: int, near: Nearest, caps: FloatArray) -> float:
        """What the servers of a placement hold after the loss of one, tok/s; 0 if its adapters have no room. `caps`:
        what each holds now; those that then have more adapters than slots are simulated."""
        had, left = [len(own) for own in near.held], caps.copy()
        if not near.empty(lost, caps):
            return 0.0
        for s in near.serving:
            if len(near.held[s]) > max(self.kinds[s].max_loras, had[s]):
                left[s] = self.of(s, load_of(near.held[s], near.load))
        return float(left[near.serving].sum())

    def served(self, workload: Workload) -> None:
        """Adopt the requests of this workload from now on."""
        self.workload = workload
        self._expected.clear()

    def expected(self, server: int, load: Mapping[int, float]) -> Expected:
        """The twin's prediction for a server with this load, tok/s by adapter; reused for a similar load (`NEARLY`)."""
        total = sum(load.values())
        before = self._expected.get(server)
        if before is None or before[0] != load.keys() or abs(total / before[1] - 1.0) > NEARLY:
            run = self.run(self.kinds[server], load)
            before = load.keys(), total, Expected(run.mean_ttft_ms, run.mean_itl_ms, run.prefix_hit_rate)
            self._expected[server] = before
        return before[2]

    def run(self, kind: ServerKind, load: Mapping[int, float], factor: float = 1.0) -> Run:
        """Simulate a server with this load times a factor."""
        fleet = self.workload
        adapters: list[Adapter] = [
            replace(fleet.adapters[a], rate=max(factor * tok_s / float(fleet.mean_tokens[a]), IDLE_RATE))
            for a, tok_s in load.items()
        ]
        given = replace(fleet, adapters=tuple(adapters))
        # A server may really take larger ranks than the plan says: what it holds was loaded.
        rank = max(rank_of(kind, fleet), slot_rank_for(int(given.ranks.max())))
        settings = kind.profile.settings(kind.max_loras, rank)
        span_s = min(SPAN_S, MOST_REQUESTS / given.rate)
        return simulate(given, kind.profile, **asdict(settings), duration_s=span_s, seed=self.seed)


def cache_lost(fleet: Workload, load: FloatArray, near: Nearest, kinds: Sequence[ServerKind]) -> float:
    """Tokens that servers compute again after a change to a placement, because the caches that hold them are elsewhere.

    A server computes at most as many as its KV cache holds.
    `load`: of each adapter, tok/s, float64 (m,). `kinds`: of each server.
    """
    if not fleet.shares_prefixes:
        return 0.0
    cached, lost = cached_tokens(fleet, load), 0.0
    for s in near.serving:
        kind, was, now = kinds[s], near.before[s], near.held[s]
        if was != now and rules_of(kind.profile.engine).prefix_caching:
            most = kv_cache_tokens(kind.profile, kind.profile.settings(kind.max_loras, rank_of(kind, fleet)))
            came = sum(float(cached[a]) * max(0.0, share - was.get(a, 0.0)) for a, share in now.items())
            lost += min(came, max(0.0, most))
    return lost


def cached_tokens(fleet: Workload, load: FloatArray) -> FloatArray:
    """Tokens of each adapter that a prefix cache holds for later requests, float64 (m,). A server without them computes
    them again.

    The shared prefix, plus the contexts of sessions between two turns. The number of these sessions is later turns per
    second × the time between turns (Little's law); each has first + turns × (output + added) - added tokens, the mean
    at a later turn if the number of turns is geometric.

    `load`: of each adapter, tok/s, float64 (m,).
    """
    found: FloatArray = fleet.shared_prefix_tokens.astype(np.float64)
    for a, own in enumerate(fleet.sessions_by_adapter):
        if own is not None:
            adapter, output = fleet.adapters[a], float(fleet.mean_output_tokens[a])
            first = (adapter.input_tokens or fleet.input_tokens).expected
            added = own.added_tokens(first, adapter.shared_prefix_tokens)
            # Of a session's requests, 1 − 1 / turns are later turns.
            waiting = load[a] / fleet.mean_tokens[a] * (1.0 - 1.0 / own.turns) * own.gap_s(output)
            found[a] += waiting * (first + own.turns * (output + added) - added)
    return found
