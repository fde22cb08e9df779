"""The repacking of a few servers as a constraint program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray

SCALE = 100_000  # CP-SAT needs integers: shares of a server are multiples of 1 / `SCALE`.
_LEVELS, _REQUESTS = 200, 10_000
_NEAR = 0.003  # Relative gap at which CP-SAT stops: the estimate is no more accurate than this.
_PRICE_UNITS = 1000


class Aim(Enum):
    """What a repacking minimises after the price."""

    EMPTY = "what is left on one server"
    STAY = "adapters away from where they run"
    WORST = "the fullest server"
    SUM = "the waits of all requests"


@dataclass(frozen=True)
class ServerOption:
    """A kind of server in the program; `shares`, float64 (K,): what an adapter of each class takes, up to `limit`.
    `base`: fill of an empty server. `allowed`: classes that its slots hold, bool (K,). `gpu`, `gpus`: what it uses."""

    shares: FloatArray
    base: float
    limit: float
    allowed: BoolArray
    price: float
    gpu: str
    gpus: int

    @property
    def whole(self) -> tuple[IntArray, int]:
        """`shares` and `base` in units of 1 / `SCALE`. Shares are rounded up: what fits in whole numbers fits."""
        return np.ceil(self.shares * SCALE).astype(np.int64), int(self.base * SCALE)


@dataclass(frozen=True)
class Refused:
    """A server that the predictor refused: counts (K,) on an option. `heavier`: every superset is refused too."""

    counts: IntArray
    option: int
    heavier: bool


@dataclass
class Repacking:
    """Adapters of K classes to be packed again on S servers.

    `demand`: int64 (K,). `running`: adapters of each class on the running server that each continues, int64 (S, K).
    `options`: kinds that each server may become. `start`, `used`: present counts, int64 (S, K), and kind of each
    server, -1: not in use. `fixed`: every server is in use. `stock`: GPUs left of each kind, "" for all together.
    `emptied`: the server of `Aim.EMPTY`. `rates`: of an adapter of each class, float64 (K,), for `Aim.SUM`.
    """

    aim: Aim
    demand: IntArray
    running: IntArray
    kinds: Sequence[ServerOption]
    options: Sequence[Sequence[int]]
    start: IntArray
    used: Sequence[int]
    fixed: bool = False
    stock: dict[str, int] = field(default_factory=dict)
    emptied: int = 0
    rates: FloatArray = field(default_factory=lambda: np.zeros(0))
    refused: list[Refused] = field(default_factory=list)

    def solve(self, *, seed: int, work: float, seconds: float) -> tuple[IntArray, list[int], float] | None:
        """Counts (S, K), the option of each server (-1: none), and the deterministic work; None without a solution.

        With `Aim.EMPTY` and `Aim.STAY`, only solutions better than the start are searched for.
        """
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        counts, chosen, fills = self._servers(model)
        self._covered(model, counts, chosen)
        self._forbidden(model, counts, chosen)
        self._minimised(model, counts, chosen, fills)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # as the next lines: the same seed gives the same plan
        solver.parameters.random_seed = seed
        solver.parameters.max_deterministic_time = work
        solver.parameters.relative_gap_limit = _NEAR
        solver.parameters.max_time_in_seconds = max(0.05, seconds)
        solver.parameters.catch_sigint_signal = False  # else Ctrl-C ends the process, now and later
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        held = np.array([[solver.value(each) for each in row] for row in counts], dtype=np.int64)
        option = [next((o for o, on in row.items() if solver.value(on)), -1) for row in chosen]
        return held, option, float(solver.response_proto.deterministic_time)

    def _servers(self, model: Any) -> tuple[list[list[Any]], list[dict[int, Any]], list[Any]]:
        """Variables for the counts, options and fill of each server, and the constraints that link them."""
        counts, chosen, fills = [], [], []
        for s, options in enumerate(self.options):
            row = [model.new_int_var(0, int(most), "") for most in self.demand]
            on = {o: model.new_bool_var("") for o in options}
            fill = model.new_int_var(0, max(self._limit(s, o) for o in options), "")
            total = sum(on.values())
            model.add(total == 1) if self.fixed else model.add(total <= 1)
            for o in options:
                kind = self.kinds[o]
                weights, base = kind.whole
                taken = base + sum(w * n for w, n in zip(weights.tolist(), row, strict=True))
                model.add(fill >= taken).only_enforce_if(on[o])
                model.add(fill <= self._limit(s, o)).only_enforce_if(on[o])
            for k, most in enumerate(self.demand.tolist()):
                model.add(row[k] <= most * sum(on[o] for o in options if self.kinds[o].allowed[k]))
                model.add_hint(row[k], int(self.start[s, k]))
            for o in options:
                model.add_hint(on[o], int(self.used[s] == o))
            counts.append(row)
            chosen.append(on)
            fills.append(fill)
        return counts, chosen, fills

    def _limit(self, s: int, o: int) -> int:
        """How full a server may be: up to its kind's limit, or as full as at present if it keeps its kind."""
        kind = self.kinds[o]
        weights, base = kind.whole
        present = base + int(weights @ self.start[s]) if self.used[s] == o else 0
        return max(int(kind.limit * SCALE), present)

    def _covered(self, model: Any, counts: list[list[Any]], chosen: list[dict[int, Any]]) -> None:
        """Require that every adapter has a server, and that the GPUs suffice."""
        for k, most in enumerate(self.demand.tolist()):
            model.add(sum(row[k] for row in counts) == most)
        for gpu, left in self.stock.items():
            taken = [
                self.kinds[o].gpus * on for row in chosen for o, on in row.items() if gpu in ("", self.kinds[o].gpu)
            ]
            model.add(sum(taken) <= left)

    def _forbidden(self, model: Any, counts: list[list[Any]], chosen: list[dict[int, Any]]) -> None:
        """Exclude servers that were refused, and supersets of a refused server with `heavier`."""
        for cut in self.refused:
            held = np.flatnonzero(cut.counts).tolist()
            for row, on in zip(counts, chosen, strict=True):
                if cut.option not in on:
                    continue
                other = [on[cut.option].negated()]
                for k in held if cut.heavier else range(len(cut.counts)):
                    n, less = int(cut.counts[k]), model.new_bool_var("")
                    model.add(row[k] <= n - 1).only_enforce_if(less)
                    other.append(less)
                    if not cut.heavier:
                        more = model.new_bool_var("")
                        model.add(row[k] >= n + 1).only_enforce_if(more)
                        other.append(more)
                model.add_bool_or(other)

    def _minimised(self, model: Any, counts: list[list[Any]], chosen: list[dict[int, Any]], fills: list[Any]) -> None:
        """Minimise the price, then the aim, both together below the start's; WORST and SUM minimise the aim alone."""
        if self.aim is Aim.WORST:
            worst = model.new_int_var(0, 10 * SCALE, "")
            for fill in fills:
                model.add(worst >= fill)
            # The sum only decides between plans whose fullest servers are equally full.
            model.minimize(worst * 100 + sum(fills))
            return
        if self.aim is Aim.SUM:
            waits = []
            # The wait in a queue grows with 1 / (1 - fill).
            table = [int(100 / max(1.0 - z / _LEVELS, 0.02)) for z in range(2 * _LEVELS)]
            total = float(self.rates @ self.demand)
            shares = np.rint(self.rates * (_REQUESTS / total)).astype(np.int64).tolist()
            for row, fill in zip(counts, fills, strict=True):
                level, wait = model.new_int_var(0, len(table) - 1, ""), model.new_int_var(0, max(table), "")
                model.add(level * (SCALE // _LEVELS) >= fill)
                model.add_element(level, table, wait)
                rate = model.new_int_var(0, 2 * _REQUESTS, "")
                model.add(rate == sum(w * n for w, n in zip(shares, row, strict=True)))
                product = model.new_int_var(0, 2 * _REQUESTS * max(table), "")
                model.add_multiplication_equality(product, [rate, wait])
                waits.append(product)
            model.minimize(sum(waits))
            return
        price = sum(round(self.kinds[o].price * _PRICE_UNITS) * on for row in chosen for o, on in row.items())
        now = sum(round(self.kinds[o].price * _PRICE_UNITS) for o in self.used if o >= 0)
        if self.aim is Aim.STAY:
            moved = int(self.running.sum() - np.minimum(self.running, self.start).sum())
            rest, before = self._moved(model, counts), moved
        else:
            kind = self.kinds[self.used[self.emptied]]
            weights = np.ceil(kind.shares * 1000).astype(np.int64).tolist()
            rest = sum(w * n for w, n in zip(weights, counts[self.emptied], strict=True))
            before = int(np.dot(weights, self.start[self.emptied]))
        # A lower price outweighs any change of the rest; at the same price, the rest must fall.
        much = int(self.demand.sum()) * 2000 + max(before, 1) + 1
        total = price * much + rest
        model.add(total <= now * much + before - 1)
        model.minimize(total)

    def _moved(self, model: Any, counts: list[list[Any]]) -> Any:
        """Adapters that are not on the server where they ran."""
        kept = []
        for s, row in enumerate(counts):
            for k in np.flatnonzero(self.running[s]).tolist():
                stays = model.new_int_var(0, int(self.running[s, k]), "")
                model.add(stays <= row[k])
                kept.append(stays)
        return int(self.running.sum()) - sum(kept)
