"""Keep a plan up to date on running servers: observe, decide, act, and report what was done and why."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packer.arrays import FloatArray
from packer.change import Change
from packer.errors import IncompatibleError, PackerError
from packer.live.act import Acting, words
from packer.live.host import Models
from packer.live.matching import by_others, fitting, planned_routes
from packer.live.traffic import PRIOR, Traffic
from packer.operate.capacity import load_of, server_kinds
from packer.operate.drift import followed
from packer.operate.keeper import LONG_S, SHORT_S, Decision, Keeper
from packer.operate.measured import Observation
from packer.times import HOUR_S
from packer.words import counted
from packer.workload import Workload

After = Callable[[list[Decision]], None]
MOST_LOG = 1000  # Number of decisions that are kept for the page.


@dataclass(eq=False)
class Following:
    """The loop over running servers.

    `acting`: the servers, locked against other processes. `fleet`: the adapters to serve now.
    `read`: measures the fleet from a log or a gateway, over `span_s`; None: the servers' own metrics.
    `dry_run`: decide and report, but change nothing; later decisions are made as if the changes had been made.
    """

    acting: Acting
    fleet: Workload
    every_s: float = 60.0
    read: Callable[[], Workload] | None = None
    dry_run: bool = False
    log: list[dict[str, Any]] = field(default_factory=list)
    last_error: str = ""
    span_s: float = HOUR_S

    def __post_init__(self) -> None:
        self.fleet, servers = followed(self.fleet), self.acting.servers
        rooms = [each.host.room for each in servers]
        self.traffic = Traffic(servers, LONG_S)
        self.changes = self.loads = self.pending = 0
        self.uncertainty = 1.0
        self.looked_s, self.load = 0.0, np.zeros(len(self.fleet))
        self._due_s = math.inf  # the next look
        self._measured = self.fleet  # as last read
        self._unread = ""  # why the fleet could not be read
        self._unserved = ""  # which adapters have no server, as last said
        self.ready = np.zeros(len(servers), dtype=np.bool_)
        self._resting: set[int] = set()
        # By server that a dry run pretends to start or stop: the time from which it would answer.
        self._pretended: dict[int, float] | None = None
        self._unloaded = set[tuple[int, str]]()  # in a dry run
        self._leaving: dict[int, float] = {}  # servers that were stopped: until when they may still answer
        self._stuck = set[tuple[int, str]]()  # tried to unload
        self._going_on: list[str] = []  # why servers were not stopped
        self._said, self._said_before = set[str](), set[str]()  # since the last look, and in the one before
        self._unrouted = False  # adapters came or left, or a server was lost, since the routes were written
        self._refused: dict[tuple[int, str], float] = {}  # loads that failed, and when
        self._bases: list[tuple[str, ...]] = []  # of each server, at the last look
        self._here: dict[int, Mapping[str, float]] = {}
        self._last_tok_s: dict[int, float] = {}
        plan = self.acting.plan
        said = repr([(each.adapters, each.shares, each.settings) for each in plan.bins])
        self.version = hashlib.sha256(said.encode()).hexdigest()[:12]
        self._startable = [each.host.start is not None for each in servers]
        self._stoppable = [each.host.stop is not None for each in servers]
        self.acting.cut, limits = self._cut, self.acting.fleet.limits
        self.keeper = Keeper(
            self.fleet, server_kinds(plan, len(servers)), [{} for _ in servers], self.ready.copy(), rooms, self.every_s,
            max(item.profile.startup_s for item in plan.bins), limits.loads_per_hour, self._startable, self._stoppable,
            spare=plan.spare,
        )  # fmt: skip

    def check(self, seen: Sequence[Models | str]) -> dict[int, str]:
        """Take each server that answers for the kind of the plan's server that it fits; return why others fit none."""
        kinds, wrong = server_kinds(self.acting.plan, len(self.acting.plan.bins)), dict[int, str]()
        for s, k in fitting(self.acting, seen).items():
            if isinstance(k, str):
                wrong[s] = k
            else:
                self.keeper.kinds[s] = kinds[k]
        return wrong

    def _misfits(self, seen: Sequence[Models | str]) -> dict[int, str]:
        """Check servers that came, or have another base model or slots now; return why some fit none of the plan."""
        bases = [() if isinstance(models, str) else models.base for models in seen]
        slots = [own[-1].max_loras if own else None for own in self.traffic.looks]
        alike = [slots[s] in (None, kind.max_loras) for s, kind in enumerate(self.keeper.kinds)]
        same = [self.ready[s] and alike[s] and base == self._bases[s] for s, base in enumerate(bases)]
        changed = ["" if known else models for known, models in zip(same, seen, strict=True)]
        self._bases = bases
        return self.check(changed) if self.traffic.times_s else {}  # `run` checks the first ones

    def serve(self, fleet: Workload) -> None:
        """Serve these adapters from now on: new ones get a server at the next step, removed ones leave theirs."""
        planned = self.fleet
        self.fleet = fleet = followed(fleet)
        self.acting.ranks |= dict(zip(fleet.names, fleet.ranks.tolist(), strict=True))
        # The next observation says what the servers hold, by the numbers of the new fleet.
        self.keeper.held = [{} for _ in self.keeper.kinds]
        self.keeper.know(self.keeper.requests.carried(planned, fleet))
        self._pretended, self._unloaded = None, set()

    def observed(self, now_s: float) -> Observation:
        """Observe which adapters the servers hold, and their load."""
        seen = self.acting.look()
        served, wrong = self.ready, self._misfits(seen)
        seen = [wrong.get(s, models) for s, models in enumerate(seen)]
        answers = {s for s, models in enumerate(seen) if not isinstance(models, str)}
        late = [self.acting.servers[s].name for s, end_s in self._leaving.items() if s in answers and now_s > end_s]
        self._leaving = {s: end_s for s, end_s in self._leaving.items() if s in answers and now_s <= end_s}
        away = {*self._leaving, *self.acting.stopping}
        self.ready = np.array([s in answers and s not in away for s in range(len(seen))])
        if not self.traffic.times_s:  # first observation: servers that are off are started when needed
            servers = enumerate(self.acting.servers)
            self._resting = {s for s, server in servers if server.host.start is not None}
        self._resting -= set(np.flatnonzero(self.ready).tolist())
        quiet = self._resting | set(self.acting.starting)
        silent = [each for s, each in enumerate(seen) if isinstance(each, str) and (s in wrong or s not in quiet)]
        # The keeper routes adapters of the fleet that have no share; a dry run writes no routes, so none are missing.
        self.placed = placed = self.acting.placement(seen, () if self.dry_run else self.fleet.names)
        planned = dict(zip(self.fleet.names, self.fleet.offered_tok_s_by_adapter.tolist(), strict=True))
        here = [{n: planned[n] * share for n, share in own.items() if n in planned} for own in placed]
        faults = self.traffic.scrape(now_s, {s: here[s] for s in np.flatnonzero(self.ready).tolist()})
        others = by_others(self.acting, seen, [] if self.dry_run else np.flatnonzero(served & self.ready).tolist())
        self._said_before, self._said = self._said, set()
        silent += [f"{name} still answers after its stop and serves again" for name in late]
        self._say_new((*silent, *others, *faults))
        self._unrouted |= bool(others or wrong or (served & ~self.ready).any())
        self.last_error = "; ".join([*silent, *others, *faults])[:400]
        number = {name: a for a, name in enumerate(self.fleet.names)}
        # Written with the next step. While no server answers, routes stay: it may be packer's own network that fails.
        if answers and not self.dry_run:
            names = [each.name for each in self.acting.servers]
            self.acting.state.servers = {name: dict(own) for name, own in zip(names, placed, strict=True)}
        self.held = [{number[n]: share for n, share in own.items() if n in number} for own in placed]
        # None starts that still answers after its stop. None stops because of a load that is not known, or while it has
        # requests of adapters that are not of the fleet.
        self.keeper.may_start = [able and s not in self._leaving for s, able in enumerate(self._startable)]
        alone = [not any(share and n not in number for n, share in own.items()) for own in placed]
        known = not faults or self.read is not None
        self.keeper.may_stop = [known and able and alone[s] for s, able in enumerate(self._stoppable)]
        # Of adapters that left the fleet, those take room that could not be unloaded.
        self.keeper.others = {
            s: sum(n not in self.acting.ranks or (s, n) in self._stuck for n in own) for s, own in enumerate(placed)
        }
        self._refused = {each: at_s for each, at_s in self._refused.items() if now_s < at_s + SHORT_S}
        self.keeper.refused = {(s, number[name]) for s, name in self._refused if name in number}
        pretended, ready = self._pretended is not None, self.ready.copy()
        for s, from_s in (self._pretended or {}).items():
            ready[s] = now_s >= from_s
        self._pretended = (self._pretended or {}) if self.dry_run else None
        # A server that answers counts as on, even if packer did not start it.
        self.keeper.on |= ready
        load, offered = self._counted(here, number), self.fleet.offered_tok_s_by_adapter
        if self.read is not None:
            load = offered = self._in_source(self.read)
        every, total = range(len(self.held)), float(offered.sum())
        recent = sum(self._tok_s(s, SHORT_S) for s in every)
        before = sum(self._tok_s(s, SHORT_S, SHORT_S) for s in every)
        if self.read is not None:  # servers that are full or gone serve less than what is asked for
            recent, before = (total, total) if faults else (max(total, recent), max(total, before))
        # Rates have a gamma prior: planned rates count as `PRIOR` requests, so that few requests change little.
        prior_s = PRIOR / max(float(self.fleet.rates.sum()), 1e-9)
        times_s = self.traffic.times_s
        span_s = times_s[-1] - times_s[0] if times_s else 0.0

        def blended(measured: Any, given: Any, most_s: float = math.inf) -> Any:
            own_s = min(span_s, most_s)
            return (given * prior_s + measured * own_s) / (prior_s + own_s)

        samples = {}
        if self.read is None:
            samples = {s: self.traffic.sampled(s, self.keeper.requests.same_since_s(s)) for s in every}
            self.uncertainty = 1.0 / math.sqrt(PRIOR + self.traffic.requests())
        return Observation(
            blended(load, offered), blended(recent, total, SHORT_S), blended(before, total, SHORT_S), ready,
            self.held, samples, pretended,
        )  # fmt: skip

    def _in_source(self, read: Callable[[], Workload]) -> FloatArray:
        """Load of each adapter in a log or a gateway's counters, tok/s; the last known one if they can't be read."""
        try:
            self._measured = read()
        except PackerError as error:  # servers are looked after with what was known before
            self.keeper.may_stop = False
            self.last_error = "; ".join(filter(None, [str(error), self.last_error]))
            self.acting.say(str(error))
        measured = self._measured
        if said := self.keeper.requests.meet(measured, self.span_s):
            self.keeper.know(self.keeper.requests)
            self.acting.say(said)
        rates = dict(zip(measured.names, measured.rates.tolist(), strict=True))
        return np.array([rates.get(n, 0.0) for n in self.fleet.names]) * self.keeper.workload.mean_tokens

    def _counted(self, here: Sequence[Mapping[str, float]], number: Mapping[str, int]) -> FloatArray:
        """Load of each adapter by the servers' own counters, tok/s. `here`: the planned loads on each server."""
        load, factors = np.zeros(len(self.fleet)), self.traffic.factors(self.acting.base)
        for s, own in enumerate(here):
            # The load of a server that does not answer is attributed to the adapters that it had.
            self._here[s] = own or self._here.get(s, {})
            tok_s = self._tok_s(s)
            for name, share in self.traffic.shares(s, self._here[s], factors).items():
                if name in number:
                    load[number[name]] += share * tok_s
        return load

    def _tok_s(self, s: int, *window: float) -> float:
        """Load of a server; while its pages do not say it, the last known one, before that the planned one."""
        found = self.traffic.tok_s(s)
        if found is not None or s not in self._last_tok_s:
            self._last_tok_s[s] = sum(self._here[s].values()) if found is None else found
        part = self.traffic.tok_s(s, *window) if window else found
        return self._last_tok_s[s] if part is None else part

    def step(self, now_s: float) -> list[Decision]:
        """Observe, decide and act once. Faults are reported, and dealt with at the next step."""
        self.looked_s = time.time()
        gone = self.acting.started()
        for s in gone:
            self.keeper.never_came(s)
        self._stop(now_s)
        seen = self.observed(now_s)
        self.load = seen.load_tok_s
        self._correct(seen)
        made = self.keeper.decide(now_s, seen)
        if more := self.keeper.missing:
            self._say_new([f"{counted(more, 'more server')} needed"])
        for s, sentences in self.keeper.learnt.items():
            self.acting.say(f"{self.acting.servers[s].name}: {'; '.join(sentences)}")
        # The keeper no longer waits for these servers, which took too long to start.
        self.acting.give_up(set(self.acting.starting) - set(self.keeper.starting))
        if (unserved := self.keeper.left.words(len(self.keeper.starting))) not in ("", self._unserved):
            self.acting.say(unserved)
        self._unserved = unserved
        errors = [*gone.values(), *self._going_on, self._unread, unserved, self.last_error]
        self._going_on = []
        self.last_error = "; ".join(filter(None, errors))[:400]
        left, self.pending = self._gone(), int(self.keeper.waiting != "")
        filled = {s for each in made for s, _ in each.change.load if self.keeper.rooms[s] is not None}
        first = any(s in filled for each in left for s, _ in each.change.unload)  # they make room
        made = [*left, *made] if first else [*made, *left]
        names = [server.name for server in self.acting.servers]
        for each in made:
            change = replace(each.change, time_s=0.0)
            entry: dict[str, Any] = {
                "time_s": round(self.looked_s, 3), "why": each.why, "steps": words(change, names), "loads": each.loads,
            }  # fmt: skip
            if self._pretended is not None:
                self._pretended |= dict.fromkeys(change.start, now_s + self.keeper.startup_s)
                self._pretended |= dict.fromkeys(change.stop, math.inf)
            else:
                entry["failed"] = self.acting.carry_out(change)
                own = self.acting.state.servers
                self._refused |= {each: now_s for each in change.load if each[1] not in own[names[each[0]]]}
                self.last_error = "; ".join([self.last_error, *entry["failed"]]).strip("; ")[:400]
                self.pending += len(entry["failed"])
            self.changes, self.loads = self.changes + 1, self.loads + each.loads
            self.log = [*self.log, entry][-MOST_LOG:]
            self._resting = (self._resting | set(change.stop)) - set(change.start)
        if self._unrouted and not self.dry_run:
            self._write_routes()
        self._stuck = {each for decision in left for each in decision.change.unload if not self.dry_run}
        return made

    def _stop(self, now_s: float) -> None:
        """Stop the servers whose requests have ended; these may still answer for a while. Say why others go on."""
        try:
            found = self.acting.stopped()
            end_s = now_s + self.acting.fleet.limits.drain_s
            self._leaving |= {s: end_s for s, fault in found.items() if not fault}
            faults = [fault for fault in found.values() if fault]
        except PackerError as error:
            faults = [str(error)]
        faults = [each for each in faults if each not in self._going_on]
        self._say_new(faults)
        self._going_on += faults

    def _say_new(self, sentences: Iterable[str]) -> None:
        """Say what the look before did not say."""
        for each in sentences:
            if each not in self._said | self._said_before:
                self.acting.say(each)
            self._said.add(each)

    def _write_routes(self) -> None:
        """Write routes that the file lacks, as of adapters that came, and end those to servers that no longer serve."""
        placed = [self.acting.state.servers.get(each.name, {}) for each in self.acting.servers]
        try:
            if self.acting.unwritten(placed):
                self.acting.adopt(placed, self.acting.state.plan)
            self._unrouted = False
        except PackerError as error:
            self.last_error = "; ".join(filter(None, [self.last_error, str(error)]))[:400]

    def _gone(self) -> list[Decision]:
        """Unload the adapters of the plan, or of an earlier fleet, that the fleet no longer has."""
        left = set(self.acting.ranks) - self.acting.base - set(self.fleet.names)
        held = {(s, name) for s, own in enumerate(self.placed) for name in left.intersection(own)}
        unload = tuple(sorted(held - self._unloaded))
        self._unloaded |= held if self.dry_run else set()
        return [Decision(Change(0.0, unload=unload), "adapters left the fleet")] if unload else []

    def _correct(self, seen: Observation) -> None:
        """Correct the assumed capacities of servers by the predicted and the measured time per token."""
        pairs = []
        for s in self.keeper.serving:
            measured, own = self.traffic.mean_ms(s, "itl"), self.own_load(s, seen.load_tok_s)
            if measured is not None and own:
                predicted = self.keeper.capacity.expected(s, own).mean_itl_ms
                pairs += [(predicted, measured)] if predicted > 0.0 < measured else []
        if not pairs:
            return
        # Geometric means, because `corrected` compares the two by their ratio.
        predicted, measured = np.exp(np.log(np.array(pairs)).mean(axis=0)).tolist()
        before = self.keeper.level
        level = self.keeper.corrected(predicted, measured)
        if abs(level - before) > 1e-3:
            said = f"level {before:.3f} → {level:.3f}: the mean ITL is {measured:.1f} ms,"
            self.acting.say(f"{said} predicted {predicted:.1f} ms")

    @property
    def drift(self) -> float:
        """The measured load over the planned one."""
        return float(self.load.sum() / max(self.fleet.offered_tok_s_by_adapter.sum(), 1e-9))

    def own_load(self, s: int, load: FloatArray) -> dict[int, float]:
        """Load of each adapter on a server, tok/s."""
        return load_of(self.holding[s], load)

    @property
    def holding(self) -> Sequence[dict[int, float]]:
        """What the servers really hold, whatever a dry run pretends."""
        return self.keeper.held if self._pretended is None else self.held

    def run(self, after: After, fleet: Callable[[], Workload] | None = None) -> None:
        """Make a step every `every_s` until interrupted, and as soon as a serving server does not answer. `after`:
        called after each step. `fleet`: the adapters to serve, read before each step."""
        seen = self.acting.look()
        if wrong := self.check(seen):
            raise IncompatibleError(next(iter(wrong.values())))
        self.acting.say_changed(seen)
        if not self.acting.state.servers:  # the plan's commands started them: their routes are the plan's
            self.acting.state.servers = planned_routes(self.acting, seen)
        if not any(isinstance(each, Models) for each in seen):  # perhaps packer's own network: routes stay
            self._unrouted = True
        elif not self.dry_run:
            self.acting.adopt(self.acting.placement(seen), f"follow {self.acting.plan.workload.name}")
        try:
            self._loop(after, fleet)
        finally:  # nobody would look after servers that are still starting
            self.acting.give_up(set(self.acting.starting))

    def _loop(self, after: After, fleet: Callable[[], Workload] | None) -> None:
        self._due_s = 0.0
        while True:
            now_s = time.monotonic()  # does not follow jumps of the machine's clock
            if now_s >= self._due_s or self._lost():
                self._due_s = now_s + self.every_s
                try:
                    self._unread = ""
                    if fleet is not None and followed(found := fleet()) != self.fleet:
                        self.serve(found)
                except PackerError as error:  # the servers are looked after all the same
                    self._unread = str(error)
                    self.acting.say(self._unread)
                try:
                    after(self.step(now_s))
                except PackerError as error:
                    self.last_error = str(error)[:400]
                    self.acting.say(self.last_error)
                    with suppress(PackerError):  # as where the page can't be written
                        after([])
            time.sleep(max(0.0, min(self._due_s - time.monotonic(), self.every_s / 4)))
            self._stop(time.monotonic())

    def _cut(self) -> str:
        """Before what a wait for requests has to end; "" while it may go on."""
        due = "before the next look" if time.monotonic() > self._due_s else ""
        return "before another server was lost" if self._lost() else due

    def _lost(self) -> bool:
        """Whether a server that serves does not answer."""
        serving = set(self.keeper.serving) - set(self._pretended or {})
        return any(not self.acting.servers[s].healthy for s in serving)
