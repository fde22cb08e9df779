"""The controller that keeps a running plan up to date: how many servers, which adapters on which server, and why.

One object decides for the cluster twin (`act`) and for real servers (`decide`). A server's capacity is the load at
which it keeps the goal, by the twin; servers are used up to a share of it. The planner of `packer solve --from` makes
placements, the twin judges them, and a change must be worth its cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packer.arrays import BoolArray, FloatArray
from packer.change import Change
from packer.cluster import ServerKind
from packer.live.traffic import Sampled
from packer.operate.capacity import Capacity, cache_lost, left_of, load_of, rank_of
from packer.operate.measured import Observation, Requests
from packer.operate.schedule import MOVE_COST_S
from packer.operate.trend import expected_tok_s
from packer.solvers.nearest import Nearest
from packer.twin.engine_rules import rules_of
from packer.words import counted
from packer.workload import Workload

LOWER = 0.07  # An overloaded server is relieved to this much below `FULL`, so that it is not soon overloaded again.
FULL, ENOUGH = 0.98, 0.9  # Used capacity above which a server is added, and that a stop may leave to the others.
LONG_S, SHORT_S = 1800.0, 600.0  # Windows in which the load of each adapter, and the total load, are measured.
STAY_S = 600.0  # A server is stopped only after the others have had enough capacity for at least this long.
ROUNDS = 3  # Maximum number of placements that the twin judges for one decision.
AGAIN_S = 4 * 3600.0  # Capacities are simulated again, and trends forgotten, after this time: traffic changes.


@dataclass(frozen=True)
class Decision:
    """A change and why; `loads` of adapters, of which `forced` are for adapters without a server, and `starts`."""

    change: Change
    why: str
    loads: int = 0
    starts: int = 0
    forced: int = 0


@dataclass(eq=False)
class Keeper:
    """Servers of a cluster; some of them are on.

    `kinds`: kind of each server, with its settings. `held`: adapters of each server, by index, with the share of their
    requests; 0 for an idle copy. `on`: which servers are to serve. `rooms`: maximum adapters of each; None: any number.
    `others`: number of adapters on each beside the fleet's. `refused`: (server, adapter) that failed to load.
    `startup_s`: time of a server's start. `loads_per_hour`: maximum of adapter loads, except for adapters without a
    server. `may_start`, `may_stop`: whether servers, all alike or each, may be started and stopped. `missing`: servers
    to add beyond those that start. `spare`: number of servers (0, 1) without which the others are to hold. `waiting`: a
    change that is not yet worth its cost, in words. `learnt`: by server, what its requests last showed, in sentences.
    """

    workload: Workload
    kinds: list[ServerKind]
    held: list[dict[int, float]]
    on: BoolArray
    rooms: Sequence[int | None] = ()
    period_s: float = 60.0
    startup_s: float = 120.0
    loads_per_hour: int = 600
    may_start: bool | Sequence[bool] = True
    may_stop: bool | Sequence[bool] = True
    seed: int = 0
    log: list[Decision] = field(default_factory=list)
    missing: int = 0
    waiting: str = ""
    level: float = 1.0
    learnt: dict[int, list[str]] = field(default_factory=dict)
    others: Mapping[int, int] = field(default_factory=dict)
    refused: Collection[tuple[int, int]] = ()
    spare: int = 0

    def __post_init__(self) -> None:
        self.requests = Requests(self.workload)
        self.expected = self.on.copy()  # servers that were seen ready since their start
        self.starting: dict[int, float] = {}
        self.capacity = Capacity(self.workload, self.kinds, self.seed)
        self._asked_s: dict[int, float] = {}
        self._caps = np.full(len(self.kinds), math.inf)  # infinite: unknown
        self.left = left_of((), self.workload, self.kinds, self.rooms)  # without a server
        self._spare_since_s = self._over_since_s = math.inf
        self._less = ", one of them lost," if self.spare else ""
        self._refused_stop: tuple[list[int], str] = ([], "")  # of these servers, why one of them was not stopped
        self._made: list[tuple[float, int]] = []
        self._past: list[tuple[float, float, float]] = []  # see `expected_tok_s`

    # ---- the twin
    def act(self, now_s: float, view: Any) -> Iterable[Change]:
        """See `packer.change.Controller`; no changes before the first `SHORT_S` have passed."""
        if now_s < SHORT_S:
            return []
        since_s = max(0.0, now_s - LONG_S)
        tokens = self.workload.mean_tokens
        load = view.requests_since(since_s, now_s) * tokens / (now_s - since_s)
        recent = float(view.requests_since(now_s - SHORT_S, now_s) @ tokens) / SHORT_S
        start_s = max(0.0, now_s - 2 * SHORT_S)
        before = float(view.requests_since(start_s, now_s - SHORT_S) @ tokens)
        span_s = now_s - SHORT_S - start_s
        same_s = np.array([max(since_s, self.requests.same_since_s(s)) for s in range(len(self.kinds))])
        each = enumerate(np.array(view.sampled_since(same_s, now_s)).T.tolist())
        samples = {s: Sampled(n, prompt / n, output / n) for s, (n, prompt, output) in each if n}
        was = before / span_s if span_s > 0 else recent
        seen = Observation(load, recent, was, view.on.copy(), None, samples)
        return [each.change for each in self.decide(now_s, seen)]

    # ---- decisions
    def decide(self, now_s: float, seen: Observation) -> list[Decision]:
        """Return the changes to make now, in this order."""
        if seen.held is not None and not seen.pretended:
            self.held = [dict(own) for own in seen.held]
        self.waiting = ""
        self._lost_and_found(now_s, seen.ready)
        self._learn(now_s, seen)
        load = self._expected_load(now_s, seen)
        made = self._without_server(now_s, load)
        self._ask(now_s, load)
        made += self._evened(now_s, load)
        overload = self.waiting
        made += self._sized(now_s, load)
        self.waiting = overload or self.waiting
        self.log += made
        self._made = [(at_s, n) for at_s, n in self._made if at_s > now_s - 3600.0]
        self._made += [(now_s, each.loads) for each in made if each.loads]
        return made

    def _learn(self, now_s: float, seen: Observation) -> None:
        """Adopt measured lengths and hit rates that differ from the known ones by more than their error."""
        load, held = seen.load_tok_s, self.held if seen.held is None else seen.held
        loads = {s: own for s in self.serving if (own := load_of(held[s], load))}

        def hit_rate(s: int) -> float | None:
            if not rules_of(self.kinds[s].profile.engine).prefix_caching:
                return None
            return self.capacity.expected(s, loads[s]).hit_rate if self.workload.shares_prefixes else 0.0

        self.learnt = self.requests.learn(now_s, loads, seen.samples, hit_rate)
        if self.learnt:
            self.know(self.requests)

    def know(self, requests: Requests) -> None:
        """Adopt these requests, and simulate the capacities of servers again."""
        self.requests, self.workload = requests, requests.fleet
        self.capacity.served(requests.fleet)
        self._asked_s.clear()

    def _expected_load(self, now_s: float, seen: Observation) -> FloatArray:
        """Load of each adapter when a server that is started now would serve, by its trend (`expected_tok_s`)."""
        total = float(seen.load_tok_s.sum())
        if total <= 0.0:
            return np.full(len(self.workload), 1e-6)
        ahead_s = self.startup_s + self.period_s + 0.5 * SHORT_S
        self._past = [each for each in self._past if each[0] > now_s - AGAIN_S]
        self._past.append((now_s, seen.recent_tok_s, seen.before_tok_s))
        ahead = expected_tok_s(self._past, ahead_s, SHORT_S, self.period_s)
        return np.maximum(seen.load_tok_s * ahead / total, 1e-6)

    def _lost_and_found(self, now_s: float, ready: BoolArray) -> None:
        """Mark servers that stopped answering as off and empty, and servers that began to answer as serving."""
        for s in np.flatnonzero(self.on & ready & ~self.expected).tolist():
            self.expected[s] = True
            self.starting.pop(s, None)
            self._spare_since_s = math.inf
        for s in np.flatnonzero(self.on & ~ready & self.expected).tolist():
            self.expected[s] = self.on[s] = False
            self.held[s] = {}
        for s, until_s in list(self.starting.items()):
            if now_s > until_s:
                self.never_came(s)

    def never_came(self, s: int) -> None:
        """Mark a server that was started, but does not serve, as off."""
        self.on[s] = False
        self.starting.pop(s, None)

    @property
    def serving(self) -> list[int]:
        """Servers that serve now."""
        return np.flatnonzero(self.on & self.expected).tolist()

    def _near(self, load: FloatArray, held: Sequence[Mapping[int, float]] = (), serving: Sequence[int] = ()) -> Nearest:
        """A placement, by default the current one, for the planner of `packer solve --from` to change."""
        ranks, most = self.workload.ranks, [rank_of(kind, self.workload) for kind in self.kinds]
        fits, base = lambda s, a: most[s] >= int(ranks[a]), np.flatnonzero(ranks == 0).tolist()
        rooms = [None if room is None else room - self.others.get(s, 0) for s, room in enumerate(self.rooms)]
        order = self.workload.slo.order(self.workload).tolist()
        return Nearest(load, held or self.held, serving or self.serving, fits, rooms, base, self.refused, order)

    def _left(self, load: FloatArray, held: Sequence[Mapping[int, float]], servers: Sequence[int]) -> float:
        """What servers with these adapters hold, tok/s; with a spare server, after the loss that leaves least."""
        if not self.spare:
            return float(self.caps(servers).sum())
        nears = {lost: self._near(load, held, servers) for lost in servers}
        return min(self.capacity.without(lost, near, self._caps) for lost, near in nears.items()) * self.level

    def _largest(self, caps: FloatArray, least: float = 0.0) -> float:
        """With a spare server, the largest of these capacities, which may be lost, if known; else 0."""
        largest = float(caps.max(initial=least)) if self.spare else 0.0
        return largest if math.isfinite(largest) else 0.0

    def _without_server(self, now_s: float, load: FloatArray) -> list[Decision]:
        """Load adapters without a server (`Nearest.place_rest`); give the shares of lost copies to the others."""
        near = self._near(load)
        near.place_rest()
        self.left = left_of(near.left, self.workload, self.kinds, self.rooms)
        fresh, route = near.loads, near.routes()
        if not route:
            return []
        parts = [f"{counted(len(fresh), 'adapter')} without a server"] if fresh else []
        parts += [f"{counted(renewed, 'route')} renewed"] if (renewed := len(route) - len(fresh)) else []
        return [replace(self._decided(now_s, near, ", ".join(parts)), forced=len(fresh))]

    def _ask(self, now_s: float, load: FloatArray) -> None:
        """Simulate the capacity of servers whose adapters changed, or whose capacity is older than `AGAIN_S`."""
        late = [s for s in self.serving if now_s - self._asked_s.get(s, -math.inf) >= AGAIN_S]
        self._ask_again(now_s, load, late)
        if len(known := self._caps[np.isfinite(self._caps)]):
            self._caps[np.isinf(self._caps)] = known.mean()

    def _ask_again(self, now_s: float, load: FloatArray, servers: Iterable[int]) -> None:
        """Simulate these servers with what they hold, also after a placement was judged that is not made."""
        for s in servers:
            self._judge(now_s, s, load, self.held[s])

    def _judge(self, now_s: float, s: int, load: FloatArray, held: Mapping[int, float]) -> None:
        """Simulate the capacity of a server for the mix of these adapters."""
        if own := load_of(held, load):
            self._caps[s] = self.capacity.of(s, own)
            self._asked_s[s] = now_s

    def caps(self, servers: Sequence[int]) -> FloatArray:
        """Capacities of these servers, tok/s, corrected by measurements, float64 (n,)."""
        return self._caps[list(servers)] * self.level

    def _evened(self, now_s: float, load: FloatArray) -> list[Decision]:
        """Move load from overloaded servers to others, by new routes if these suffice, else by loading adapters. The
        twin judges the servers with their new mix; a refused placement is planned again with the new capacities."""
        serving, left = self.serving, self.loads_per_hour - sum(n for _, n in self._made)
        if len(serving) < 2:
            return []
        first, used = self._most_used(near := self._near(load)), near.used()[serving]
        excess = float(np.maximum(used - FULL * self.caps(serving), 0.0).sum())
        # If all servers together are overloaded, an even load is the best that can be reached.
        if first <= max(FULL, 1.05 * used.sum() / self.caps(serving).sum()):
            self._over_since_s = math.inf
            return []
        crowds, judged = near.crowds([kind.max_loras for kind in self.kinds]), set[int]()
        for _ in range(ROUNDS):
            near, mean = self._near(load), float(used.sum() / self.caps(serving).sum())
            near.even(self._caps * self.level, max(FULL - LOWER, 1.02 * mean), max(0, left), crowds)
            judged |= (changed := {s for s in serving if near.held[s] != self.held[s]})
            for s in judged:
                self._judge(now_s, s, load, near.held[s])
            after = self._most_used(near)
            if after <= max(FULL, 1.05 * mean) or not (changed or crowds):
                break
            crowds = crowds if after < first else {}
        if not changed or after >= first:
            self._ask_again(now_s, load, changed)
            self.waiting = f"a server has {first:.0%} of what it holds, and no other one can take more" * (first > 1.0)
            return []
        why = f"a server has {first:.0%} of what it holds; the nearest placement brings it to {after:.0%}, by the twin"
        lost = cache_lost(self.workload, load, near, self.kinds)
        if lost > 0.0:
            self._over_since_s = min(self._over_since_s, now_s)
            if excess * (STAY_S + now_s - self._over_since_s) < lost:
                self.waiting = (
                    f"a server has {first:.0%} of what it holds: a placement that brings it to {after:.0%} loses "
                    f"{lost:,.0f} tokens of prefix caches and is worth it after {lost / excess - STAY_S:.0f} s"
                )
                self._ask_again(now_s, load, changed)
                return []
            why += f"; {lost:,.0f} tokens of prefix caches are computed again"
        self._over_since_s = math.inf
        return [self._decided(now_s, near, why, judged=True)]

    def _most_used(self, near: Nearest) -> float:
        """The largest used share of a server's capacity under this placement."""
        return float((near.used()[near.serving] / self.caps(near.serving)).max())

    def _sized(self, now_s: float, load: FloatArray) -> list[Decision]:
        """Start the servers that the load or the number of adapters needs, or stop one if that is worth its cost."""
        serving = self.serving
        total, caps = float(load.sum()), self.caps(serving)
        usual = float(caps.mean()) if len(caps) else float(self._caps.max()) * self.level
        usual = usual if math.isfinite(usual) and usual > 0.0 else max(total, 1.0)
        at_hand = float(caps.sum()) + usual * len(self.starting)
        on = [*serving, *self.starting]
        largest = self._largest(caps, usual)
        short = max(0.0, total / FULL - at_hand, total + largest - at_hand)
        by_load = max(0 if on else 1, math.ceil(short / usual))
        if by_load and any(len(load_of(self.held[s], load)) > self.kinds[s].max_loras for s in serving):
            new = max(range(len(self.kinds)), key=lambda s: (not self.on[s], self.kinds[s].max_loras))
            tok_s, least = total / FULL / self.level, int(not self.starting)
            by_load = self.capacity.more(new, on[self.spare :], load, tok_s, least, by_load)
            usual = max(usual, total / FULL / (len(on) + by_load - self.spare))
        by_room = self.left.servers - len(self.starting)
        rooms = [self.rooms[s] or math.inf for s in serving] if self.spare and self.rooms else []
        if rooms and math.isfinite(each := float(np.mean(rooms))):
            homeless = np.count_nonzero(self.workload.ranks) - sum(rooms) + max(rooms)
            by_room = max(by_room, math.ceil(homeless / each) - len(self.starting))
        needed = self.missing = max(by_load, by_room)
        if needed > 0:
            self._spare_since_s = math.inf
            off = np.flatnonzero(~self.on & np.asarray(self.may_start)).tolist()  # last, those with too small a rank
            starts = tuple(sorted(off, key=lambda s: rank_of(self.kinds[s], self.workload) < self.left.rank)[:needed])
            for s in starts:
                self.on[s], self.expected[s], self.held[s] = True, False, {}
                self.starting[s] = now_s + 3.0 * self.startup_s + self.period_s
                self._asked_s.pop(s, None)
                self._caps[s] = usual / self.level
            self.missing, at_hand = self.missing - len(starts), max(0.0, at_hand - largest)
            why = f"{total:,.0f} tok/s are expected, {at_hand:,.0f} is what the servers{self._less} hold"
            if by_room > by_load:
                unplaced = counted(len(self.left.others), "adapter") if self.left.others else "all adapters"
                why = f"the servers{self._less} have no room for {unplaced}"
            return [Decision(Change(now_s, start=starts), why, starts=len(starts))] if starts else []
        return self._one_less(now_s, load, serving)

    def _one_less(self, now_s: float, load: FloatArray, serving: list[int]) -> list[Decision]:
        """Stop a server once the others have had the capacity for its load for longer than the stop costs."""
        total, caps = float(load.sum()), self.caps(serving)
        able = np.flatnonzero(np.broadcast_to(self.may_stop, len(self.on))[serving]).tolist()
        if len(serving) < 2 or self.starting or not able:
            return []
        copies = Counter(a for s in serving for a in self.held[s])
        alone = [sum(copies[a] == 1 for a in self.held[s]) for s in serving]
        offered = (near := self._near(load)).used()
        k = min(able, key=lambda k: (alone[k], offered[serving[k]], -serving[k]))
        s, others = serving[k], [t for t in serving if t != serving[k]]
        if total > ENOUGH * (float(caps.sum()) - float(caps[k]) - self._largest(np.delete(caps, k))):
            self._spare_since_s, self._refused_stop = math.inf, ([], "")
            return []
        self._spare_since_s = min(self._spare_since_s, now_s)
        possible = near.empty(s, self._caps)
        lost = cache_lost(self.workload, load, near, self.kinds)
        # Lost tokens are computed again at a server's rate for the whole mix, which is lower than for prompts alone.
        cold_s = lost / float(caps.mean())
        cost_s = max(STAY_S, 2.0 * self.startup_s + MOVE_COST_S * alone[k] + cold_s)
        cost = counted(alone[k], "load") + (f" and {lost:,.0f} tokens of prefix caches lost" if lost else "")
        had_s = now_s - self._spare_since_s
        if had_s < cost_s:
            if self._refused_stop[0] == serving:
                self.waiting = f"{self._refused_stop[1]}; this is tried again in {cost_s - had_s:.0f} s"
            elif possible:
                self.waiting = (
                    f"{counted(len(others), 'server')} would be enough for {had_s:.0f} s now: a stop with "
                    f"{cost} is worth it after {cost_s:.0f} s"
                )
            return []
        self._spare_since_s = math.inf
        if not possible:
            return []
        changed = [t for t in others if near.held[t] != self.held[t]]
        for t in changed:
            self._judge(now_s, t, load, near.held[t])
        left = self._left(load, near.held, others)
        if total > ENOUGH * left:  # with more adapters than slots
            self._ask_again(now_s, load, changed)
            self.waiting = f"server {s} was not stopped: the others{self._less} would have held {left:,.0f} tok/s"
            self.waiting += f" with its adapters, and {total / ENOUGH:,.0f} tok/s were needed"
            self._refused_stop = serving, self.waiting
            return []
        why = f"the other servers{self._less} have had {1.0 - total / left:.0%} in reserve for {cost_s:.0f} s, the cost"
        made = self._decided(now_s, near, f"{why} of a stop with {cost}", stop=(s,), judged=True)
        self.on[s] = self.expected[s] = False
        return [made, *self._evened(now_s, load)]

    def _decided(
        self, now_s: float, near: Nearest, why: str, *, stop: tuple[int, ...] = (), judged: bool = False
    ) -> Decision:
        """The change to this placement. `judged`: whether the twin has simulated its servers."""
        names = self.workload.names
        for s, (was, now) in enumerate(zip(self.held, near.held, strict=True)):
            if was != now and not judged:  # another mix has another capacity
                self._asked_s.pop(s, None)
        self.held = near.held
        change = Change(
            now_s, load=tuple((s, names[a]) for s, a in near.loads), stop=stop,
            unload=tuple((s, names[a]) for s, a in near.unloads),
            route={names[a]: shares for a, shares in near.routes().items()},
        )  # fmt: skip
        return Decision(change, why, len(near.loads))

    def corrected(self, predicted: float, measured: float) -> float:
        """Move `level` a tenth of the way towards predicted / measured, within 0.7 to 1.3, and return it. `predicted`,
        `measured`: a time per token of the same load, in the same unit."""
        if predicted > 0.0 and measured > 0.0:
            wanted = min(max(predicted / measured, 0.5), 2.0)
            self.level = min(max(self.level * (wanted / self.level) ** 0.1, 0.7), 1.3)
        return self.level
