"""The plan kept true on running servers: look, decide, act, say what was done and why."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from packer.arrays import FloatArray
from packer.errors import IncompatibleError, PackerError
from packer.live.act import Acting, words
from packer.live.host import Models
from packer.live.traffic import PRIOR, Traffic
from packer.operate.keeper import LONG_S, SHORT_S, Decision, Keeper, Observation, server_kinds
from packer.workload import Workload

NEARLY = 0.15
"""A load that differs by less from the one that was simulated needs no new simulation."""
MOST_LOG = 1000
"""Decisions that are kept for the page."""


class Expected(NamedTuple):
    """Latencies of a server by the twin, ms."""

    mean_ttft_ms: float
    mean_itl_ms: float


@dataclass(eq=False)
class Following:
    """The loop over running servers.

    `acting`: the servers, held against other processes. `fleet`: what is to be served now.
    `read`: measures the fleet's rates from a log or a gateway; None: the servers' own metrics.
    `dry_run`: decide and say, but do nothing.
    """

    acting: Acting
    fleet: Workload
    every_s: float = 60.0
    read: Callable[[], Workload] | None = None
    dry_run: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)
    last_error: str = ""
    _predicted: dict[int, tuple[Set[int], float, Expected]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        servers = self.acting.servers
        rooms = [each.host.room for each in servers]
        self.traffic = Traffic(servers, LONG_S)
        self.changes = self.loads = self.pending = 0
        self.uncertainty = 1.0
        self.looked_s = 0.0
        self.ready = np.zeros(len(servers), dtype=np.bool_)
        plan = self.acting.plan
        said = repr([(each.adapters, each.shares, each.settings) for each in plan.bins])
        self.version = hashlib.sha256(said.encode()).hexdigest()[:12]
        startable = [each.host.start is not None for each in servers]
        limits = self.acting.fleet.limits
        self.keeper = Keeper(
            self.fleet, server_kinds(plan, len(servers)), [{} for _ in servers], self.ready.copy(), rooms,
            self.every_s, max(item.profile.startup_s for item in plan.bins), limits.loads_per_hour,
            all(startable),
        )  # fmt: skip

    def check(self, seen: Sequence[Models | str]) -> None:
        """Raise `IncompatibleError` if a server that answers is none that the plan was made for."""
        bins = self.acting.plan.bins
        most = max(bins, key=lambda item: (item.max_lora_rank, item.max_loras))
        for s, models in enumerate(seen):
            reason = None
            if not isinstance(models, str):
                reason = self.acting.misfit(bins[s] if s < len(bins) else most, s, models)
            if reason is not None:
                raise IncompatibleError(f"Server {s} does not fit the plan: {reason}.")

    def serve(self, fleet: Workload) -> None:
        """From now on these adapters are served: new ones get a server at the next look, others leave theirs."""
        old = self.keeper
        self.fleet = fleet
        self.acting.ranks |= dict(zip(fleet.names, fleet.ranks.tolist(), strict=True))
        self.keeper = Keeper(
            fleet, old.kinds, [{} for _ in old.kinds], old.on, old.rooms, old.period_s, old.startup_s,
            old.loads_per_hour, old.may_start, old.seed, old.log, level=old.level,
        )  # fmt: skip
        self.keeper.expected, self.keeper.starting = old.expected, old.starting

    def observed(self, now_s: float) -> Observation:
        """What the servers hold, and what they had to do."""
        seen = self.acting.look()
        self.ready = np.array([not isinstance(each, str) for each in seen])
        faults = self.traffic.scrape(now_s)
        self.last_error = "; ".join([*(each for each in seen if isinstance(each, str)), *faults])[:400]
        number = {name: a for a, name in enumerate(self.fleet.names)}
        placed = self.acting.placement(seen, whole=False)
        if not self.dry_run:  # written with the next step
            names = [each.name for each in self.acting.servers]
            self.acting.state.servers = {name: dict(own) for name, own in zip(names, placed, strict=True)}
        held = [{number[n]: share for n, share in own.items() if n in number} for own in placed]
        # A server that answers and was not started by packer is found, or found again.
        self.keeper.on |= self.ready
        if self.read is not None:
            measured = self.read()
            rates = dict(zip(measured.names, measured.rates.tolist(), strict=True))
            load = np.array([rates.get(n, 0.0) for n in self.fleet.names]) * self.fleet.mean_tokens
            total = float(load.sum())
            return Observation(load, total, total, self.ready, held)
        load = np.zeros(len(self.fleet))
        planned = self.fleet.offered_tok_s_by_adapter
        for s in range(len(held)):
            here = {n: float(planned[number[n]]) * share for n, share in placed[s].items() if n in number}
            for name, share in self.traffic.shares(s, here).items():
                if name in number:
                    load[number[name]] += share * self.traffic.tok_s(s)
        recent, before = (
            sum(self.traffic.tok_s(s, SHORT_S, skip_s) for s in range(len(held))) for skip_s in (0.0, SHORT_S)
        )
        # Rates with a gamma prior: the planned ones count as `PRIOR` requests, so that few requests change little.
        prior_s = PRIOR / max(float(self.fleet.rates.sum()), 1e-9)
        span_s = self.traffic.observed_s

        def blended(measured: Any, given: Any, most_s: float = math.inf) -> Any:
            own_s = min(span_s, most_s)
            return (given * prior_s + measured * own_s) / (prior_s + own_s)

        total = float(planned.sum())
        self.uncertainty = 1.0 / math.sqrt(PRIOR + self.traffic.requests())
        return Observation(
            blended(load, planned), blended(recent, total, SHORT_S), blended(before, total, SHORT_S), self.ready,
            held,
        )  # fmt: skip

    def step(self, now_s: float) -> list[Decision]:
        """One look, and what follows from it; faults are said and met at the next look."""
        self.looked_s = now_s
        seen = self.observed(now_s)
        self.load = seen.load_tok_s
        self._correct(seen)
        made = self.keeper.decide(now_s, seen)
        gone, self.pending = self._gone(), int(self.keeper.waiting != "")
        for each in [*made, *gone]:
            names = [server.name for server in self.acting.servers]
            change = replace(each.change, time_s=0.0)
            entry: dict[str, Any] = {
                "time_s": round(now_s, 3), "why": each.why, "steps": words(change, names), "loads": each.loads,
            }  # fmt: skip
            if not self.dry_run:
                entry["failed"] = self.acting.carry_out(change)
                self.last_error = "; ".join([self.last_error, *entry["failed"]]).strip("; ")[:400]
                self.pending += len(entry["failed"])
            self.changes, self.loads = self.changes + 1, self.loads + each.loads
            self.log = [*self.log, entry][-MOST_LOG:]
        return [*made, *gone]

    def _gone(self) -> list[Decision]:
        """Adapters of the plan that the fleet no longer has leave their servers."""
        from packer.change import Change

        left = set(self.acting.plan.workload.names) - set(self.fleet.names)
        held = self.acting.state.servers
        names = [each.name for each in self.acting.servers]
        unload = tuple(
            (s, n) for s, server in enumerate(names) for n in sorted(left & set(held.get(server, {})))
        )
        return [Decision(Change(0.0, unload=unload), "adapters left the fleet")] if unload else []

    def _correct(self, seen: Observation) -> None:
        """The measured time per token, beside the predicted one, corrects what servers are taken to hold."""
        pairs = []
        for s in self.keeper.serving:
            measured = self.traffic.mean_ms(s, "itl")
            own = self.own_load(s, seen.load_tok_s)
            predicted = self.predicted(s, own).mean_itl_ms if measured is not None and own else 0.0
            if measured is not None and predicted > 0.0:
                pairs.append((predicted, measured))
        if not pairs:
            return
        predicted, measured = np.exp(np.log(np.array(pairs)).mean(axis=0)).tolist()
        before = self.keeper.level
        level = self.keeper.corrected(predicted, measured)
        if abs(level - before) > 1e-3:
            self.acting.say(
                f"level {before:.3f} → {level:.3f}: the mean ITL is {measured:.1f} ms, predicted {predicted:.1f} ms"
            )

    def predicted(self, s: int, own: dict[int, float]) -> Expected:
        """What the twin says of a server with this load; the last one as long as the load is nearly the same."""
        total = sum(own.values())
        before = self._predicted.get(s)
        if before is None or before[0] != own.keys() or abs(total / before[1] - 1.0) > NEARLY:
            run = self.keeper.capacity.run(self.keeper.kinds[s], own)
            before = own.keys(), total, Expected(run.mean_ttft_ms, run.mean_itl_ms)
            self._predicted[s] = before
        return before[2]

    @property
    def drift(self) -> float:
        """The measured load over the planned one."""
        return float(self.load.sum() / max(self.fleet.offered_tok_s_by_adapter.sum(), 1e-9))

    def own_load(self, s: int, load: FloatArray) -> dict[int, float]:
        """Load of each adapter on a server, tok/s."""
        return {a: load[a] * share for a, share in self.keeper.held[s].items() if share * load[a] > 0.0}

    def run(
        self, after: Callable[[list[Decision]], None], fleet: Callable[[], Workload] | None = None
    ) -> None:
        """Observe every `every_s` until interrupted, and as soon as a server that served does not answer.

        `after`: called after each look. `fleet`: the adapters to serve, read at each look.
        """
        seen = self.acting.look()
        self.check(seen)
        if not self.dry_run:
            self.acting.adopt(self.acting.placement(seen), f"follow {self.acting.plan.workload.name}")
        due_s = time.time()
        while True:
            if time.time() >= due_s or self._lost():
                due_s = time.time() + self.every_s
                try:
                    if fleet is not None and (found := fleet()).names != self.fleet.names:
                        self.serve(found)
                    after(self.step(time.time()))
                except PackerError as error:
                    self.last_error = str(error)[:400]
                    self.acting.say(self.last_error)
            time.sleep(max(0.0, min(due_s - time.time(), self.every_s / 4)))

    def _lost(self) -> bool:
        """Whether a server that serves does not answer."""
        return any(not self.acting.servers[s].healthy for s in self.keeper.serving)


@dataclass(frozen=True)
class ServerRow:
    """One server: what it holds and has to do, beside what the twin says. Times in ms, loads in tok/s."""

    name: str
    ready: bool
    adapters: int
    routed: int
    load_tok_s: float
    holds_tok_s: float | None
    ttft_ms: float | None
    predicted_ttft_ms: float | None
    itl_ms: float | None
    predicted_itl_ms: float | None

    @property
    def used(self) -> float | None:
        """Share of what it holds that is in use."""
        return self.load_tok_s / self.holds_tok_s if self.holds_tok_s else None


def rows_of(following: Following) -> list[ServerRow]:
    """The servers now."""
    keeper, found = following.keeper, []
    for s, server in enumerate(following.acting.servers):
        own = following.own_load(s, following.load)
        run = following.predicted(s, own) if own else None
        ready = bool(following.ready[s])
        found.append(
            ServerRow(
                server.name, ready, len(keeper.held[s]), len(own), float(sum(own.values())),
                float(keeper.caps([s])[0]) if ready and own else None,
                following.traffic.mean_ms(s, "ttft"), None if run is None else run.mean_ttft_ms,
                following.traffic.mean_ms(s, "itl"), None if run is None else run.mean_itl_ms,
            )
        )  # fmt: skip
    return found
