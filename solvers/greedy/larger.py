"""Fewer servers, with more adapters than trees were trained on: each is simulated, so few are tried."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.solvers.base import Problem
from packer.solvers.candidates import slot_ranks
from packer.solvers.greedy.largest import largest
from packer.solvers.headroom import headroom
from packer.solvers.order import even_order, golden
from packer.solvers.slots import SlotSearch

_FACTORS = [1.02**k for k in range(232)]  # Factors of a server's rates, to find its load by the trees; up to 97.
_WORTH = 32  # The trees, which are optimistic, must predict a saving of more than one GPU in this many.
_UNITS = 64  # A server is filled in this number of parts of what it is expected to hold.
_SCALES = np.linspace(0.5, 1.0, 101).tolist()  # Shares of the load that servers carry; the least that suffices.
_FIRST = 8  # Number of servers of a plan that are simulated before the others.
_GROWTH = 50  # After a plan that fails, the next plan has one more GPU for each group of this many, at least one.


def larger(problem: Problem, bins: Sequence[Bin], limit: int) -> list[Bin] | None:
    """Fewer servers than `limit`, loaded evenly; None if none are found.

    In an even order, servers of equal slot rank are alike: one server of each rank is filled, which shows how much the
    others can carry. If the trees predict hardly any saving over `limit`, no server is simulated. `bins`: a complete
    plan in even order, of one kind and without replicas.
    """
    packing, fleet = _Packing(problem), problem.workload
    by_size = sorted(bins, key=lambda each: (len(each.adapters), each.offered_tok_s(fleet)))
    like = dict.fromkeys(packing.starts, by_size[-1]) | {item.max_lora_rank: item for item in by_size}
    rooms = headroom(fleet, list(like.values()), problem.evaluator, problem.out_of_time, _FACTORS)
    guess = {
        rank: item.offered_tok_s(fleet) * max(1.0, (room or 1.0) / (1.0 + problem.evaluator.margin_of(item.profile)))
        for (rank, item), room in zip(like.items(), rooms, strict=True)
    }
    if len(packing.cut(guess)) >= limit - limit // _WORTH:
        return None
    borne, share = dict[int, float](), 1.0  # share: last load found by simulation / load by the trees
    for rank, start in packing.starts.items():
        filled = packing.filled(start, guess[rank] * share, like[rank].max_loras)
        if filled is None:
            return None
        load = filled.offered_tok_s(fleet)
        if len(filled.adapters) < len(fleet) - start:
            share = load / guess[rank]
        like[rank], borne[rank] = filled, max(load, guess[rank] * share)
    n = len(packing.cut(borne))
    while n < limit and not problem.out_of_time():
        made = packing.made(packing.even(borne, n), like)
        if made is not None:
            return made
        n += max(1, n // _GROWTH)
    return None


class _Packing:
    """The fleet in even order; `starts`: the position where each slot rank begins, largest rank first."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.slots = problem, SlotSearch(problem)
        self.slots.width = 1  # a simulation takes longer than a call
        self.order = even_order(problem.workload)
        self._sums = np.cumsum(problem.workload.offered_tok_s_by_adapter[self.order])
        self._ranks: list[int] = slot_ranks(problem.workload.ranks[self.order], problem.profile).tolist()
        self.starts = {rank: self._ranks.index(rank) for rank in dict.fromkeys(self._ranks)}

    def _end(self, start: int, load_tok_s: float) -> int:
        """The end position of a server that begins at `start` and carries this load, but at least one adapter."""
        before = self._sums[start - 1] if start else 0.0
        end = int(np.searchsorted(self._sums, before + load_tok_s * (1.0 + 1e-9), side="right"))
        return min(max(end, start + 1), start + self.problem.most_adapters)

    def cut(self, borne_tok_s: dict[int, float], scale: float = 1.0) -> list[IntArray]:
        """Servers of consecutive adapters, each loaded with `scale` times what a server of its slot rank can carry."""
        ends = [0]
        while ends[-1] < len(self.order):
            ends.append(self._end(ends[-1], scale * borne_tok_s[self._ranks[ends[-1]]]))
        return [self.order[start:end] for start, end in pairwise(ends)]

    def even(self, borne_tok_s: dict[int, float], n: int) -> list[IntArray]:
        """At most `n` servers, with the smallest share of what they can carry; n servers at full load must suffice."""
        cuts = (self.cut(borne_tok_s, scale) for scale in _SCALES)
        return next(parts for parts in cuts if len(parts) <= n)

    def filled(self, start: int, load_tok_s: float, hint: int) -> Bin | None:
        """The server with the most adapters from `start` on; the search begins near this load. It runs first with slots
        near `hint`, then again with the number of slots that serves the server found best."""
        near = self._end(start, load_tok_s) - start
        unit = -(-near // _UNITS)

        found: dict[int, Bin] = {}

        def fits(sizes: Sequence[int]) -> list[bool]:
            nonlocal hint
            for n in sizes:
                server = self.slots.feasible(self.order[start:][: n * unit].tolist(), hint=hint)
                if server is not None:
                    found[n], hint = server, server.max_loras
            return [n in found for n in sizes]

        over = self.problem.out_of_time
        most = -(-min(len(self.order) - start, self.problem.most_adapters) // unit)
        n = largest(fits, near // unit, most, over, _UNITS // 16)
        if not n or (hint := self.slots.best(found[n]).max_loras) == found[n].max_loras:
            return found.get(n)
        found.clear()
        return found.get(largest(fits, n, most, over))

    def made(self, parts: Sequence[IntArray], like: dict[int, Bin]) -> list[Bin] | None:
        """Servers with about as many slots as the server of their rank in `like`; None once one does not hold."""
        made: dict[int, Bin] = {}
        spread = golden(len(parts))  # some of each rank first
        for chosen in (spread[:_FIRST].tolist(), spread[_FIRST:].tolist()):
            tried = [self.slots.make(parts[k].tolist(), 1) for k in chosen]
            tried = [item.with_slots(min(like[item.max_lora_rank].max_loras, len(item.adapters))) for item in tried]
            if self.problem.out_of_time():
                return None
            whole = self.slots.evaluate(tried)[1].tolist() if tried else []
            for k, each, holds in zip(chosen, tried, whole, strict=True):
                found = each if holds else self.slots.feasible(each.adapters, hint=each.max_loras)
                if found is None:
                    return None
                made[k] = found
        return [made[k] for k in range(len(parts))]
