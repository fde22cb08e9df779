"""Placements near the running one: move adapters between servers with few adapter loads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from packer.arrays import FloatArray
from packer.bin import Bin
from packer.failover import nearness
from packer.search import fewest

EVEN = 0.02  # Two servers count as even if their used shares differ by less than this.
MOST_STEPS = 200
NONE: Mapping[int, int] = MappingProxyType({})


def lightest(
    item: Bin,
    load: Mapping[int, float] | FloatArray,
    made: Callable[[list[int]], Bin | None],
    over: Callable[[], bool] = lambda: False,
) -> Bin | None:
    """Remove the fewest adapters, heaviest first, so that the server holds; None if nothing helps.

    `load`: of each adapter. `made`: returns the server with given adapters, or None if it does not hold. Once `over` is
    true, the first number of adapters found to be enough is taken.
    """
    falling, found = sorted(item.adapters, key=lambda i: (-load[i], i)), dict[int, Bin | None]()

    def enough(gone: int) -> bool:
        found[gone] = made(sorted(falling[gone:]))
        return found[gone] is not None

    gone = fewest(enough, 0, len(falling) - 1, lambda: any(found.values()) and over())
    return None if gone is None else found[gone]


def _sum(share: float, more: float) -> float:
    """The sum of two shares of one adapter, capped at 1 against rounding."""
    return min(1.0, float(share + more))


class Nearest:
    """What servers hold, in the running placement (`before`) and in the new one (`held`).

    `load`: of each adapter, tok/s, float64 (m,). `held`: adapters of each server with their shares, 0 for a copy with
    no requests. `serving`: indices of the servers in use; others hold nothing. `fits`: whether a server can load an
    adapter. `rooms`: most adapters of each server; none: any number; adapters of `roomless`, as the base model, take
    no room. `refused`: (server, adapter) that failed to load, for which other servers come first. `order`: place of
    each adapter's limits (`packer.Goal.order`); none: all alike. `loads`: (server, adapter) to load, in order.
    `unloads`: copies that leave full servers before that. `left`: adapters that `place_rest` found no server for.
    """

    def __init__(
        self, load: FloatArray, held: Iterable[Mapping[int, float]], serving: Sequence[int],
        fits: Callable[[int, int], bool] = lambda _server, _adapter: True, rooms: Sequence[int | None] = (),
        roomless: Collection[int] = (), refused: Collection[tuple[int, int]] = (), order: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.refused, self.order = refused, list(order) or [0] * len(load)
        self.load, self.serving, self.fits, self.rooms = load, list(serving), fits, rooms
        self.roomless, self.left = set(roomless), list[int]()
        self.before = [dict(own) for own in held]
        self.held = [dict(own) for own in self.before]
        self.loads: list[tuple[int, int]] = []
        self.unloads: list[tuple[int, int]] = []

    def used(self) -> FloatArray:
        """Offered load of each server, tok/s, float64 (S,)."""
        return np.array([sum(self.load[a] * share for a, share in own.items()) for own in self.held])

    def routes(self) -> dict[int, dict[int, float]]:
        """The new shares by server of each adapter whose shares change."""
        changed = {
            a
            for was, now in zip(self.before, self.held, strict=True)
            for a in {*was, *now}
            if was.get(a, 0.0) != now.get(a, 0.0)
        }
        return {a: {s: own[a] for s, own in enumerate(self.held) if own.get(a)} for a in sorted(changed)}

    def _full(self, s: int, a: int) -> bool:
        room = self.rooms[s] if self.rooms and a not in self.roomless else None
        return room is not None and len(self.held[s].keys() - self.roomless) >= room

    def _idle(self, s: int) -> int | None:
        """A copy that had and has no requests, of an adapter with requests on another server; None if there is none."""
        idle = (b for b, share in self.held[s].items() if not share and not self.before[s].get(b, 1.0))
        others = [self.held[t] for t in self.serving if t != s]
        known = (b for b in idle if b not in self.roomless and any(own.get(b) for own in others))
        return min(known, key=lambda b: self.load[b], default=None)

    def _takes(self, s: int, a: int) -> bool:
        """Whether a server may load an adapter, and has room for it if an idle copy leaves."""
        return self.fits(s, a) and (not self._full(s, a) or self._idle(s) is not None)

    def _load(self, s: int, a: int) -> None:
        """Load an adapter on a server that takes it, without requests so far."""
        if self._full(s, a) and (idle := self._idle(s)) is not None:
            del self.held[s][idle]
            self.unloads.append((s, idle))
        self.held[s][a] = 0.0
        self.loads.append((s, a))

    def _merge(self, a: int) -> int:
        """Give the requests of a copy to the adapter's other copies, so that it leaves a full server for `a`: of all
        copies that may, the one with the least load. Returns the server; -1 if there is no such copy."""
        copies = Counter(b for s in self.serving for b, share in self.held[s].items() if share)
        found = [
            (self.load[b] * share, s, b)
            for s in (self.serving if self.rooms else ())
            if self.fits(s, a) and len(self.held[s].keys() - self.roomless) <= (self.rooms[s] or 0)
            for b, share in self.held[s].items()
            if share and copies[b] > 1 and b not in self.roomless
        ]
        if not found:
            return -1
        _, s, b = min(found)
        rest = 1.0 - self.held[s].pop(b)
        for t in (t for t in self.serving if self.held[t].get(b)):
            self.held[t][b] = min(1.0, self.held[t][b] / rest)
        self.unloads.append((s, b))
        return s

    def place_rest(self, opens: Callable[[int], bool] = lambda _adapter: False) -> None:
        """Place each adapter that no server holds on the server with the least load of those with the nearest limits
        (`packer.failover`), heaviest first; if all are full, a copy leaves whose adapter has requests elsewhere. One of
        which serving servers hold only copies without requests goes to one of these. Scale other shares to a sum of 1.

        `opens`: whether a new server can be opened for an adapter that none takes; later adapters may go there too.
        """
        rest = []
        for a in range(len(self.load)):
            own = {s: self.held[s][a] for s in self.serving if a in self.held[s]}
            total = sum(own.values())
            if not total and not (own and a in self.roomless):
                rest.append(a)
            elif abs(total - 1.0) > 1e-9:
                for s, share in own.items():
                    self.held[s][a] = share / total if total else 1.0 / len(own)
        used, order, kinds = self.used().tolist(), self.order, self._kinds()
        for a in sorted(rest, key=lambda a: -self.load[a]):
            copies = [s for s in self.serving if a in self.held[s]]
            near = {s: ((s, a) in self.refused, *nearness(order[a], kinds[s]), used[s]) for s in copies or self.serving}
            rising = sorted(near, key=lambda s: near[s])
            s = next((s for s in rising if copies or self._takes(s, a)), -1)
            if s < 0 and opens(a):
                s = len(self.held)
                self.serving, used, kinds = [*self.serving, s], [*used, 0.0], [*kinds, set()]
                self.before, self.held = [*self.before, {}], [*self.held, {}]
            elif s < 0 and (s := self._merge(a)) >= 0:
                used = self.used().tolist()
            if s < 0:
                self.left.append(a)
                continue
            used[s] += self.load[a]
            if not copies:
                self._load(s, a)
            self.held[s][a] = 1.0

    def _kinds(self) -> list[set[int]]:
        """Places of the limits of the adapters with requests on each server (`order`)."""
        return [{self.order[a] for a, share in own.items() if share} for own in self.held]

    def crowds(self, slots: Sequence[int]) -> dict[int, int]:
        """By server, its adapters with requests beyond its `slots` (below 0: free slots); empty unless a server has too
        many and another one has free slots."""
        routed = {s: {a for a, share in self.held[s].items() if share} - self.roomless for s in self.serving}
        found = {s: len(own) - slots[s] for s, own in routed.items()}
        return found if max(found.values()) > 0 > min(found.values()) else {}

    def even(self, caps: FloatArray, most: float, most_loads: int, crowds: Mapping[int, int] = NONE) -> None:
        """Move load from the server with the largest used share to the one with the least, until no share is above
        `most`: part of an adapter that both hold, else of the busiest adapter, of which the latter loads a copy. Before
        that, the adapters beyond the slots of a server (`crowds`) leave it, for free slots or for copies with requests:
        those that come nearest to even loads.

        `caps`: capacity of each server, tok/s, float64 (S,). `most_loads`: at most this many copies are loaded.
        """
        own, used, left = self.held, self.used(), most_loads + len(self.loads)
        over = {s: crowds.get(s, -math.inf) for s in self.serving}
        for _ in range(MOST_STEPS + sum(n + 1 for n in crowds.values() if n > 0)):
            s = max(self.serving, key=lambda k: (over[k] > 0, used[k] / caps[k]))
            part = [(tok_s, a) for a, share in own[s].items() if (tok_s := self.load[a] * share) > 0.0]
            # A server with too many gives adapters to free slots, or where they have requests already.
            there, others = {a for _, a in part}, [k for k in self.serving if k != s and over[s] > 0]
            to = [k for k in others if over[k] < 0 or any(own[k].get(a) for a in there)]
            t = min(to or self.serving, key=lambda k: used[k] / caps[k])
            if over[s] <= 0 and (used[s] / caps[s] <= most or used[s] / caps[s] - used[t] / caps[t] < EVEN):
                return
            # The load, tok/s, that makes the used shares of both servers equal.
            wanted = (used[s] * caps[t] - used[t] * caps[s]) / (caps[s] + caps[t])
            able = [each for each in part if own[t].get(each[1]) or (each[1] in own[t] and over[t] < 0)]
            if (to or not able) and over[t] < 0 and len(self.loads) < left:
                new = (each for each in part if each[1] not in own[t] and (t, each[1]) not in self.refused)
                able += [each for each in new if self._takes(t, each[1])]
            if over[s] > 0:
                fits = [(-abs(tok_s - wanted / over[s]), tok_s, a) for tok_s, a in able if a not in self.roomless]
                able, wanted = [each[1:] for each in sorted(fits)[-1:] if to], math.inf
            if not able and over[s] > 0:
                over[s] = 0  # the others take none of its adapters: they stay
                continue
            if not able:
                return
            tok_s, a = max(able)
            if a not in own[t]:  # later, its shares can follow the traffic without loading an adapter
                self._load(t, a)
            given = min(tok_s, wanted)
            share = own[s][a] * given / tok_s
            own[s][a] -= share
            over[t] += own[t][a] == 0.0
            # What rounding would leave goes along, so that the adapter has left the server.
            if own[s][a] < 1e-9:
                share, own[s][a] = share + own[s][a], 0.0
                over[s] -= 1
            own[t][a] = _sum(own[t][a], share)
            used[s] -= given
            used[t] += given

    def empty(self, s: int, caps: FloatArray) -> bool:
        """Move a server's adapters to copies, else to the least used of the servers with the nearest limits that take
        them, if possible within their capacity; False: nothing changed."""
        before, loads, unloads = [dict(own) for own in self.held], len(self.loads), len(self.unloads)
        serving, others = self.serving, [t for t in self.serving if t != s]
        self.serving, used, kinds = others, self.used(), self._kinds()
        for a, share in sorted(before[s].items(), key=lambda item: (-self.load[item[0]] * item[1], item[0])):
            copies = any(a in self.held[t] for t in others)
            then, own = used + self.load[a] * share > caps, self.order[a]
            near = {t: ((t, a) in self.refused, then[t], *nearness(own, kinds[t]), used[t] / caps[t]) for t in others}
            rising = sorted(others, key=lambda t: near[t])
            t = next((t for t in rising if a in self.held[t] or (not copies and self._takes(t, a))), None)
            if t is None:
                self.held, self.serving = before, serving
                del self.loads[loads:], self.unloads[unloads:]
                return False
            if not copies:
                self._load(t, a)
            self.held[t][a] = _sum(self.held[t][a], share)
            used[t] += self.load[a] * share
        self.held[s] = {}
        return True
