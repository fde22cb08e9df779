"""First fit with bisection: fill one GPU after another as far as the predictor allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin, indices
from packer.checks import slot_rank_for
from packer.profile import Profile
from packer.solvers.base import MAX_LORAS_CANDIDATES, Problem, used_gpus
from packer.solvers.candidates import most_slots_of
from packer.solvers.greedy.largest import largest
from packer.solvers.greedy.top_up import top_up
from packer.solvers.order import by_falling_load
from packer.solvers.reasons import largest_share, merged, out_of_gpus, too_hot
from packer.solvers.slots import SlotSearch, most_slots

_FIRST_GUESS = 32
_GUESS_SLACK = 1.0 + 1e-9  # equal loads stay equal, in whatever order they are summed


class FirstFit:
    """Pack a fleet in a given order into `bins`; `left`: the unplaced adapters, `reasons`: why."""

    def __init__(self, problem: Problem, order: IntArray) -> None:
        self.problem = problem
        self.slots = SlotSearch(problem)
        self.queue = order
        self.loads = problem.workload.offered_tok_s_by_adapter
        self._waiting = np.zeros(len(problem.workload), dtype=bool)
        self._waiting[order] = True
        self._falling = by_falling_load(problem.workload, order)
        self.bins: list[Bin] = []
        self.left: list[int] = []
        self._sold_out_reasons: tuple[str, ...] = ()
        self._hot_ones: list[tuple[int, str]] = []  # adapters too hot for a GPU, and why
        # The latest GPU of each type, with its load, is the guess for the next one; the fullest one if time is up.
        self._last: dict[Profile, tuple[float, Bin]] = {}
        self._fullest: dict[Profile, tuple[float, Bin]] = {}

    @property
    def reasons(self) -> list[str]:
        """Why adapters are unplaced, one sentence for each reason."""
        return [*merged(self.problem.workload, self._hot_ones), *self._sold_out_reasons]

    def run(self) -> None:
        """Pack until the queue is empty; once the time is up, the rest is packed without searching."""
        total = len(self.queue)
        while self.queue.size:
            self.problem.progress("packing", total - len(self.queue), total)
            opened = self._open()
            if opened is None and self._sold_out():
                self.left += self.queue.tolist()
                self._sold_out_reasons = out_of_gpus(self.problem, self.left)
                return
            if opened is None:
                hot = int(self.queue[0])
                self._take([hot])
                self._hot(hot)
                continue
            self.close(opened)

    def close(self, opened: Bin) -> None:
        """Add what still fits, choose the slots, and take the adapters out of the queue."""
        self._take(opened.adapters)
        # The next adapter of the queue did not fit, so only lighter ones may.
        lighter = self.queue.size > 0 and self.loads[self._falling[-1]] < self.loads[self.queue[0]]
        if lighter and not self.problem.out_of_time():
            opened = top_up(self.slots, opened, self._falling)
            self._take(opened.adapters)
        if not self.problem.out_of_time():
            opened = self.slots.best(opened)
        last = self._last[opened.profile] = opened.offered_tok_s(self.problem.workload), opened
        self._fullest[opened.profile] = max(self._fullest.get(opened.profile, last), last, key=itemgetter(0))
        self.bins.append(opened)

    def _take(self, adapters: Sequence[int]) -> None:
        self._waiting[np.array(adapters)] = False
        self.queue = self.queue[self._waiting[self.queue]]
        self._falling = self._falling[self._waiting[self._falling]]

    def _open(self) -> Bin | None:
        """The next GPU, filled with a prefix of the queue, of the type that suits the objective best."""
        used = used_gpus(self.bins) if self.problem.stock else {}
        found = [
            self.fill(profile)
            for profile in self.problem.profiles
            if used.get(profile.gpu.name, 0) + profile.engine.gpus <= self.problem.stock.get(profile.gpu.name, math.inf)
        ]
        bins = [bin_ for bin_ in found if bin_ is not None]
        return bins[0] if len(bins) == 1 else min(bins, key=self._preference, default=None)

    def _sold_out(self) -> bool:
        """Whether the stock of some kind of GPU is used up, which may be why the queue can't be placed."""
        used = used_gpus(self.bins)
        return any(used.get(name, 0) >= most for name, most in self.problem.stock.items())

    def _preference(self, bin_: Bin) -> tuple[float, float]:
        """Smaller is better: price per load if the price counts, else the largest load, then the lower price."""
        price = bin_.profile.gpu.price_per_hour
        price = math.inf if price is None else price  # unknown prices come last
        load = bin_.offered_tok_s(self.problem.workload)
        return (price / load if self.problem.objective.minimises == "price" else -load / bin_.gpus, price)

    def fill(self, profile: Profile, alone: Bin | None = None) -> Bin | None:
        """The largest bin that holds, of the adapters of `alone` and a prefix of the queue; None if there is none."""
        slots, over = self.slots, self.problem.out_of_time
        given = 0 if alone is None else len(alone.adapters)
        limit = min(len(self.queue), self.problem.most_adapters - given)
        adapters, shares = self.queue, None
        if alone is not None:
            adapters = np.concatenate((indices(alone.adapters), self.queue[:limit]))
            shares = np.array((*alone.shares, *(1.0,) * limit))

        def made(n: int, most: int) -> Bin:
            end = given + n
            parts = [] if shares is None else shares[:end].tolist()
            return slots.make(adapters[:end].tolist(), min(most, end), profile, parts)

        def fits(sizes: Sequence[int]) -> list[bool]:
            held = [given + n for n in sizes]
            return slots.holds(slots.first(adapters, held, [min(most, n) for n in held], profile, shares))

        last = (self._fullest if over() else self._last).get(profile)
        most = _FIRST_GUESS if last is None else most_slots(last[1])
        if alone is not None:  # few adapters fit on a server with a hot one
            most = MAX_LORAS_CANDIDATES[0]
        most = min(most, most_slots_of(profile, slot_rank_for(int(self.problem.workload.ranks[adapters[0]]))))
        (guess, step), n = self._guess(last, limit), 0
        while True:
            n = largest(fits, guess, limit, over, step, low=n, batch=slots.batch)
            if n == limit or (over() and (n or alone)):
                break
            # One adapter more may fit with other slots; then the search goes on with these.
            more = slots.any_slots(made(n + 1, given + n + 1))
            if more is None:
                break
            n, most, guess, step = n + 1, most_slots(more), n + 2, 1
        found = made(n, most) if n else alone
        if found is None or last is not None or over():
            return found
        return slots.best(found)  # more adapters fit with the slots that serve a GPU best

    def _guess(self, last: tuple[float, Bin] | None, limit: int) -> tuple[int, int]:
        """The number of adapters that carry the load of the latest GPU of that type, and the first step from there."""
        if last is None:
            return min(_FIRST_GUESS, limit), _FIRST_GUESS
        target, like = last
        near = min(limit, 4 * len(like.adapters) + _FIRST_GUESS)
        sums = np.cumsum(self.loads[self.queue[:near]])
        guess = max(1, min(limit, int(np.searchsorted(sums, target * _GUESS_SLACK, side="right"))))
        return guess, max(1, guess // 16)

    def _hot(self, adapter: int) -> None:
        """Split an adapter that an empty GPU can't serve over replicas, or say which rate a GPU can serve."""
        profiles = self.problem.profiles
        shares = [largest_share(self.slots, adapter, profile) for profile in profiles]
        for k in sorted(range(len(profiles)), key=lambda k: -shares[k]):
            replicas = self._replicas(adapter, profiles[k], shares[k])
            if replicas:
                for alone in replicas:
                    self.close(self.fill(profiles[k], alone) or alone)
                return
        self.left.append(adapter)
        self._hot_ones.append((adapter, self._why(adapter, max(shares))))

    def _replicas(self, adapter: int, profile: Profile, share: float) -> list[Bin]:
        """The adapter alone in the fewest equal parts that GPUs of that type can serve; [] if no number is allowed.
        Predictors are not exactly monotone: a smaller part than one that passed may fail."""
        if share <= 0.0:
            return []
        for n in range(math.ceil(1.0 / share), self.problem.max_replicas + 1):
            alone = self.slots.feasible([adapter], profile, [1.0 / n])
            if alone is not None:
                return [alone] * n
        return []

    def _why(self, adapter: int, share: float) -> str:
        """Why a hot adapter is unplaced; `share` is the largest part of its rate that a GPU can serve."""
        allowed = self.problem.max_replicas
        if share <= 0.0 or math.ceil(1.0 / share) > allowed:
            return too_hot(self.slots, adapter, share)
        said = f"too much for a GPU of its own, and none of the equal parts that are allowed, up to {allowed}, passes."
        return f"{said} What would help: --max-replicas {allowed + 1} or more, a lower rate, or a faster GPU"
