"""Carry out changes on running servers: each step is checked, retried, rolled back if it fails, and recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from packer.change import Change
from packer.errors import IncompatibleError, LiveError, OutputError, PackerError, shown
from packer.io.files import claimed
from packer.live.fleet_file import LiveFleet, LiveState
from packer.live.host import Models, RunningServer, ShellCommand, each_of
from packer.live.matching import by_others, goal_of
from packer.live.metrics import Page, page_of
from packer.live.router_file import RouterWriter
from packer.moves import Placement, by_adapter, ordered
from packer.plan import Plan
from packer.words import counted, listed

POLL_S = 0.25  # Seconds between checks whether an adapter's requests ended, and before a server's second look.
REST, MOST_REST_S = 10.0, 5.0
"""While adapters leave, /metrics is read again after this many times the time of its answer, at most these seconds: a
server renders a long page in a second or more, without any output."""


class _BusyError(LiveError):
    """Requests of an adapter did not end in time."""


class Acting:
    """The servers of a fleet, packer's state of them, and the actions on them.

    Use it within `held()`, which keeps other processes from changing the same servers. Raises `IncompatibleError`: the
    plan is for another engine, whose servers load adapters in another way.
    """

    def __init__(self, plan: Plan, fleet: LiveFleet, say: Callable[[str], None] = lambda _text: None) -> None:
        for engine in {item.profile.engine.name.lower() for item in plan.bins} - {"vllm"}:
            rule = "Expected a plan for vLLM, whose running servers packer changes, got one for"
            raise IncompatibleError(f"{rule} {shown(engine)}: use `packer export`.")
        pairs = zip(fleet.servers, fleet.addresses(), strict=True)
        self.plan, self.fleet, self.say = plan, fleet, say
        self.servers = [RunningServer(host, where, fleet.limits) for host, where in pairs]
        self.numbers = {each.name: s for s, each in enumerate(self.servers)}
        self.ranks = {each.name: each.rank for each in plan.workload.adapters}
        self.router = RouterWriter(fleet, plan, self.ranks)
        self.state = LiveState.read(fleet.state)
        self.starting: dict[int, ShellCommand] = {}
        self.stopping: dict[int, float] = {}  # servers whose requests have to end: since when
        self.cut: Callable[[], str] = lambda: ""  # before what a wait for requests has to end
        self._fresh = True
        self._pages: dict[int, tuple[Page, float]] = {}  # of servers that adapters leave, and until when they are new

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the servers against other packer processes. Raises `OutputError`: they can't be locked."""
        with ExitStack() as stack:
            try:
                stack.enter_context(claimed(Path(f"{self.fleet.state}.lock")))
            except OutputError as error:
                raise OutputError(f"The servers can't be locked beside their file `state`: {error}") from None
            self.state = LiveState.read(self.fleet.state)
            yield

    @property
    def base(self) -> set[str]:
        """Names of the base model, which every server holds besides its adapters."""
        return {name for name, rank in self.ranks.items() if not rank}

    # ---- observe
    def look(self) -> list[Models | str]:
        """Return what each server serves, or why it does not answer; a server that fails is queried once more."""

        def models(server: RunningServer) -> Models:
            try:
                return server.models()
            except LiveError:
                time.sleep(POLL_S)
            return server.models()

        return each_of(self.servers, models)

    def placement(self, seen: Sequence[Models | str], but: Iterable[str] = ()) -> list[dict[str, float]]:
        """Return the adapters that each server reports, with the state's shares; none for servers that don't answer.
        One without a share on any server that answers gets equal shares on all that hold it, unless it is in `but`."""
        known = self.state.routes(self.numbers)
        found: list[dict[str, float]] = []
        for s, models in enumerate(seen):
            held = () if isinstance(models, str) else {*models.adapters, *self.base}
            found.append({name: known.get(name, {}).get(s, 0.0) for name in sorted(held)})
        for name in {name for placed in found for name in placed}.difference(but):
            holding = [placed for placed in found if name in placed]
            if not any(placed[name] for placed in holding) and self.ranks.get(name, 1):
                for placed in holding:
                    placed[name] = 1.0 / len(holding)
        return found

    def changes(self, *, prune: bool = False) -> list[Change]:
        """Return the changes to the plan. Raises `IncompatibleError`: servers are missing, do not fit or lack room;
        `OutputError`: of the router's file."""
        seen = self.look()
        goal = goal_of(self, seen, prune=prune)
        if self.fleet.router is not None and (routes := _routes(goal)):
            self.router.differs(routes)  # raises before the first change
        now = self.placement(seen)
        for server in (self.servers[s] for s, models in enumerate(seen) if isinstance(models, str)):
            self.say(f"{server.name} does not answer and is left out")
        self.say_changed(seen)
        rooms, names = [each.host.room for each in self.servers], list(self.numbers)
        return ordered(now, goal, rooms, prune=prune, roomless=self.base, names=names)

    def say_changed(self, seen: Sequence[Models | str]) -> None:
        """Say what servers hold that packer did not leave there, and what the plan's adapters came from if that is not
        the path that the file of servers names: they stay."""
        if not self.state.doing:  # packer was not ended in a step, which explains what came or left
            for each in by_others(self, seen, range(len(seen))):
                self.say(each)
        found = []
        for server, models in zip(self.servers, seen, strict=True):
            for name, path in () if isinstance(models, str) else models.adapters.items():
                expected = self.fleet.path_of(name, self.ranks.get(name, 0), server.where.url)
                if name in self.ranks and path != expected:
                    found.append(f"{shown(name)} on {server.name} from {shown(path)} instead of {shown(expected)}")
        if found:
            self.say(f"loaded from other paths than `adapters` says, and left so: {listed(found, 3)}")

    def unwritten(self, placed: Placement) -> bool:
        """Whether `adopt` has to write these routes: the router's file lacks them, or packer was ended in a step."""
        if self.fleet.router is None:
            return False
        routes = _routes(placed)
        return bool(routes) and (self.state.doing != "" or self.router.differs(routes))

    # ---- act
    def adopt(self, placed: Placement, plan: str) -> None:
        """Set the state to `placed`; write the routes once more, because packer may have been killed before."""
        self.state.plan = plan
        self.state.servers = {name: dict(held) for name, held in zip(self.numbers, placed, strict=True)}
        self.state.doing = ""
        if routes := self.state.routes(self.numbers):
            what = "route as the state says"
            try:
                self._step(what, lambda: self._tried(lambda: self.router.write(routes, again=self._fresh)))
            except LiveError:
                self.state.begin(what)  # not done: the file may be right, but its router has not read it
                raise
        self._fresh = False

    def carry_out(self, change: Change) -> list[str]:
        """Make a change; return its failures as sentences. An adapter that failed stays loaded and routed as before, as
        does one that a server lacks because its load failed in an earlier change. `stopped` stops its servers. Raises
        `OutputError`: the state can't be written; the change stops there."""
        failed: dict[str, str] = {}
        faults: list[str] = []
        for s in change.start:
            self._try(faults, f"start {self.servers[s].name}", partial(self._start, s))
        idle = [(s, name) for s, name in change.unload if not self._share(s, name)]
        routed = [(s, name) for s, name in change.unload if self._share(s, name)]
        self._unload_all(faults, idle)  # these make room
        if early := [each for each in routed if self._in_the_way(change, *each)]:
            try:
                self._route({name: change.route[name] for _, name in early}, [])
            except LiveError as error:
                return [*faults, str(error)]
            self._unload_all(faults, early)
            routed = [each for each in routed if each not in early]
        for s, name in change.load:
            if name not in failed and (fault := self._load(s, name)):
                failed[name] = fault
        left = set(failed)
        for name, shares in change.route.items():
            if name not in left and any(self._share(s, name) is None for s in shares):
                faults.append(f"{shown(name)} is not on all its new servers and stays as it is.")
                left.add(name)
        routes = {name: shares for name, shares in change.route.items() if name not in left}
        unload = [(s, name) for s, name in routed if name not in left]
        gone = [(s, name) for s, name in unload if name not in change.route]
        if routes or gone:
            try:
                self._route(routes, gone)
            except LiveError as error:
                return [*faults, *failed.values(), str(error)]
        self._unload_all(faults, unload)
        self.stopping |= dict.fromkeys(change.stop, time.monotonic())
        return [*faults, *failed.values()]

    def _in_the_way(self, change: Change, s: int, name: str) -> bool:
        """Whether an adapter must leave a full server before the loads there, and its new servers hold it already."""
        room, own = self.servers[s].host.room, self.state.servers.get(self.servers[s].name, {})
        held, coming = len(own.keys() - self.base), sum(t == s for t, _ in change.load)
        there = change.route.get(name, {})
        known = bool(there) and all(self._share(t, name) is not None for t in there)
        return known and room is not None and coming > 0 and held + coming > room

    def _step(self, what: str, work: Callable[[], Any]) -> None:
        """Do a step between two writes of the state; the second write records an error of the step."""
        self.state.begin(what)
        self.say(what)
        try:
            work()
        except PackerError as error:
            self.state.done(str(error))
            raise
        self.state.done()

    def _try(self, faults: list[str], what: str, work: Callable[[], Any]) -> None:
        try:
            self._step(what, lambda: self._tried(work))
        except LiveError as error:
            faults.append(f"{what}: {error}")

    def _tried(self, work: Callable[[], Any]) -> None:
        """Call `work`; if it fails, retry after pauses, up to `limits.tries` attempts; not after `_BusyError`."""
        for left in reversed(range(self.fleet.limits.tries)):
            try:
                work()
                return
            except LiveError as error:
                if not left or isinstance(error, _BusyError):
                    raise
                self.say(f"trying again: {error}")
                time.sleep(min(POLL_S * 2 ** (self.fleet.limits.tries - left), 10.0))

    def _share(self, s: int, name: str) -> float | None:
        return self.state.servers.get(self.servers[s].name, {}).get(name)

    def _load(self, s: int, name: str) -> str:
        """Load an adapter if there is room for it, and unload it again if that fails; returns the failure."""
        server, own = self.servers[s], self.state.servers.setdefault(self.servers[s].name, {})
        path = self.fleet.path_of(name, self.ranks.get(name, 0), server.where.url)
        what, room = f"load {shown(name)} on {server.name}", server.host.room
        if room is not None and len(own.keys() - self.base) >= room:
            return f"{what}: not done, the server has room for {counted(room, 'adapter')} and holds as many."

        def work() -> None:
            self._tried(lambda: server.load(name, path))
            own[name] = 0.0

        try:
            self._step(what, work)
        except LiveError as error:
            self._try([], f"take back: {what}", lambda: server.unload(name))
            return f"{what}: {error}"
        return ""

    def _route(self, routes: Mapping[str, Mapping[int, float]], gone: Sequence[tuple[int, str]]) -> None:
        before = self.state.servers
        now = {name: dict(placed) for name, placed in before.items()}
        for s, server in enumerate(self.servers):
            own = now.setdefault(server.name, {})
            for name, shares in routes.items():
                if name in own or s in shares:
                    own[name] = shares.get(s, 0.0)
        for s, name in gone:
            now[self.servers[s].name][name] = 0.0
        named = listed([shown(n) for n in dict.fromkeys((*routes, *(name for _, name in gone)))], 5)
        what = f"route {counted(len(routes), 'adapter')}: {named}" if routes else f"end the routes of {named}"

        def work() -> None:
            self.state.servers = now
            try:
                self._tried(lambda: self.router.write(self.state.routes(self.numbers)))
            except BaseException:
                self.state.servers = before
                raise

        self._step(what, work)

    def _unload_all(self, faults: list[str], pairs: Sequence[tuple[int, str]]) -> None:
        """Unload these adapters of servers when their requests, to which no route leads any more, have ended."""
        time.sleep(self.fleet.limits.settle_s if pairs else 0.0)
        self._pages.clear()
        end_s = time.monotonic() + self.fleet.limits.drain_s
        for s, name in pairs:
            what = f"unload {shown(name)} from {self.servers[s].name}"
            self._try(faults, what, partial(self._unload, s, name, end_s))

    def _unload(self, s: int, name: str, end_s: float) -> None:
        self._drain(s, name, end_s)
        self.servers[s].unload(name)
        self.state.servers.get(self.servers[s].name, {}).pop(name, None)

    def _drain(self, s: int, name: str, end_s: float) -> None:
        """Wait until the requests of an adapter have ended. Raises `_BusyError`: they have not at `end_s`, or `cut`."""
        late = f"within {self.fleet.limits.drain_s:g} s"
        while (busy := self._page(s).busy(name)) is not False:
            if within := self.cut() or (late if time.monotonic() > end_s else ""):
                raise _BusyError(_busy_words(busy, f" of {shown(name)}", within, "loaded"))
            time.sleep(POLL_S)

    def _page(self, s: int) -> Page:
        """A server's /metrics, at most `MOST_REST_S` old: no request comes to an adapter whose routes have ended."""
        if s not in self._pages or time.monotonic() >= self._pages[s][1]:
            begun_s = time.monotonic()
            page = page_of(self.servers[s].metrics())
            now_s = time.monotonic()
            self._pages[s] = page, now_s + min(REST * (now_s - begun_s), MOST_REST_S)
        return self._pages[s][0]

    def _start(self, s: int) -> None:
        server = self.servers[s]
        if server.host.start is None:
            raise LiveError(f"{server.name} has no command to start it in the file of servers.")
        self.stopping.pop(s, None)
        if not server.healthy:
            self.starting[s] = server.begin(server.host.start)

    def started(self) -> dict[int, str]:
        """Check the servers that are starting, without waiting; return why some of them failed."""
        faults: dict[int, str] = {}
        for s, command in list(self.starting.items()):
            if self.servers[s].healthy:
                self.starting.pop(s).leave()
            elif fault := command.fault():
                faults[s] = fault
            elif time.monotonic() - command.begun_s > self.fleet.limits.start_s:
                faults[s] = f"{self.servers[s].name} was not healthy within {self.fleet.limits.start_s:g} s."
        self.give_up(faults)
        return faults

    def give_up(self, servers: Iterable[int]) -> None:
        """Abort the start of these servers unless they are healthy: kill the start commands, run the stop commands."""
        for s in list(servers):
            command = self.starting.pop(s, None)
            if command is not None and self.servers[s].healthy:
                command.leave()
            elif command is not None:
                self.say(f"the start of {self.servers[s].name} is given up")
                command.end()
                self._try([], f"stop {self.servers[s].name}", partial(self._stop, s))

    def stopped(self) -> dict[int, str]:
        """Stop the servers of `stopping` whose requests have ended, without waiting; return for each server that leaves
        `stopping` why it was not stopped, or ""."""
        limits, found = self.fleet.limits, dict[int, str]()
        for s, begun_s in list(self.stopping.items()):
            server, waited_s = self.servers[s], time.monotonic() - begun_s - limits.settle_s
            what, own = f"stop {server.name}", self.state.servers.get(server.name, {})
            if routed := [shown(name) for name, share in own.items() if share]:
                found[s] = f"{what}: not done, it still has the requests of {listed(routed, 5)}."
            elif server.healthy and (waited_s < 0.0 or (busy := self._busy(s)) is not False):
                if waited_s <= limits.drain_s:
                    continue
                found[s] = f"{what}: {_busy_words(busy, '', f'within {limits.drain_s:g} s', 'on')}"
            else:
                self._try(faults := list[str](), what, partial(self._stop, s))
                found[s] = "".join(faults)
            del self.stopping[s]
        return found

    def _busy(self, s: int) -> bool | None:
        """Whether a server has requests; None: its /metrics does not say it, or can't be read."""
        try:
            return page_of(self.servers[s].metrics()).busy()
        except LiveError:
            return None

    def _stop(self, s: int) -> None:
        server = self.servers[s]
        self.state.servers[server.name] = {}
        if server.host.stop is not None:
            server.command(server.host.stop)


def _routes(placed: Placement) -> dict[str, dict[int, float]]:
    """For each adapter with requests, its servers with their shares."""
    return by_adapter((s, {name: share for name, share in own.items() if share}) for s, own in enumerate(placed))


def _busy_words(busy: bool | None, of: str, within: str, stays: str) -> str:
    """Why what has requests, or may have them (None), stays as it is."""
    why = f"/metrics did not say {within} that no request{of} is in flight"
    return f"{f'Requests{of} did not end {within}' if busy else why}; it stays {stays}."


def words(change: Change, names: Sequence[str]) -> list[str]:
    """Return the steps of a change as text; `names`: the servers' names."""
    found = [f"start {names[s]}" for s in change.start]
    found += [f"load {shown(name)} on {names[s]}" for s, name in change.load]
    for name, shares in change.route.items():
        parts = (f"{names[s]} {share:.0%}" if len(shares) > 1 else names[s] for s, share in shares.items())
        found.append(f"route {shown(name)} to {', '.join(parts)}")
    found += [f"unload {shown(name)} from {names[s]}" for s, name in change.unload]
    return [*found, *(f"stop {names[s]} when its requests have ended" for s in change.stop)]


def apply(acting: Acting, changes: Sequence[Change], what: str) -> list[str]:
    """Carry out changes in order to reach `what`; return failures as sentences. Raises `OutputError`."""
    acting.adopt(acting.placement(acting.look()), what)
    failed: list[str] = []
    for change in changes:
        failed += acting.carry_out(change)
    return failed
