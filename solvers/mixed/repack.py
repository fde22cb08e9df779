"""A few servers emptied and packed anew on a cheaper mix of kinds, again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np

from packer.bin import Bin
from packer.profile import Profile
from packer.solvers.base import Problem, used_gpus
from packer.solvers.greedy.first_fit import FirstFit
from packer.solvers.order import paper_order

_MOST_EMPTIED = 5
_MOST_MIXES = 12
_PATIENCE = 12
"""Attempts without a gain for each server, after which the search ends."""
_HOPEFUL = 1.01
"""A kind is tried with up to so much more load than any server of that kind has carried yet."""

_CHEAPER = 1e-9


class Repack:
    """The servers of one base model, replaced by cheaper ones while the time lasts.

    Attributes
    ----------
    bins
        The best so far; always complete.
    """

    def __init__(self, problem: Problem, bins: Sequence[Bin], seed: int) -> None:
        self.problem, self.bins = problem, list(bins)
        self.rng = np.random.default_rng(seed)
        self.weight = problem.objective.weight
        self.loads = problem.workload.offered_tok_s_by_adapter
        self.orders = (paper_order(problem.workload), np.argsort(-self.loads, kind="stable"))
        self.carried = dict.fromkeys(problem.profiles, 0.0)
        for item in bins:
            self._learn(item)

    def _learn(self, item: Bin) -> None:
        load = item.offered_tok_s(self.problem.workload)
        self.carried[item.profile] = max(self.carried[item.profile], load)

    def know(self, profile: Profile, load_tok_s: float) -> None:
        """Some server of that kind carries this load."""
        self.carried[profile] = max(self.carried[profile], load_tok_s)

    def run(self, until_s: float) -> None:
        """Until nothing was gained for long, or only so many seconds are left."""
        tried = 0
        while tried < _PATIENCE * len(self.bins):
            if self.problem.out_of_time() or self.problem.remaining_s() <= until_s:
                return
            tried = 0 if self._step() else tried + 1

    def _step(self) -> bool:
        chosen = self._emptied()
        freed = sorted(i for k in chosen for i in self.bins[k].adapters)
        price = sum(self.weight(self.bins[k].profile) for k in chosen)
        kept = [item for k, item in enumerate(self.bins) if k not in chosen]
        load = float(self.loads[freed].sum())
        for mix in self._mixes(len(chosen), price, load, kept):
            for order in self.orders:
                made = self._packed(order[np.isin(order, freed)], mix)
                if made is not None:
                    for item in made:
                        self._learn(item)
                    self.bins = [*kept, *made]
                    return True
            if self.problem.out_of_time():
                return False
        return False

    def _emptied(self) -> list[int]:
        """Some servers, preferably those that carry little for their price."""
        size = int(self.rng.integers(1, min(_MOST_EMPTIED, len(self.bins)) + 1))
        worth = np.array(
            [item.offered_tok_s(self.problem.workload) / self.weight(item.profile) for item in self.bins]
        )
        chance = 1.0 / (worth + 0.25 * worth.mean())
        found: list[int] = self.rng.choice(
            len(self.bins), size, replace=False, p=chance / chance.sum()
        ).tolist()
        return found

    def _mixes(
        self, size: int, price: float, load: float, kept: Sequence[Bin]
    ) -> Iterator[tuple[Profile, ...]]:
        """Mixes of at most one server more, cheaper than `price`, that may carry the load: the most expensive first."""
        kinds = [profile for profile, carried in self.carried.items() if carried > 0.0]
        used = used_gpus(kept)
        options = [
            (sum(map(self.weight, mix)), mix)
            for n in range(1, size + 2)
            for mix in combinations_with_replacement(kinds, n)
            if sum(map(self.weight, mix)) < price - _CHEAPER
            and load <= _HOPEFUL * sum(self.carried[profile] for profile in mix)
            and self._at_hand(mix, used)
        ]
        options.sort(key=lambda option: -option[0])
        for _, mix in options[:_MOST_MIXES]:
            yield tuple(sorted(mix, key=lambda profile: -self.carried[profile]))

    def _at_hand(self, mix: Sequence[Profile], used: dict[str, int]) -> bool:
        needed = dict(used)
        for profile in mix:
            needed[profile.gpu.name] = needed.get(profile.gpu.name, 0) + profile.engine.tensor_parallel_size
        return all(needed.get(name, 0) <= count for name, count in self.problem.stock.items())

    def _packed(self, order: np.typing.NDArray[np.int64], mix: Sequence[Profile]) -> list[Bin] | None:
        """These adapters on these servers; None if they do not fit."""
        fit = FirstFit(replace(self.problem, stock={}), order)
        room = sum(self.carried[profile] for profile in mix)
        for profile in mix:
            if not fit.queue.size:
                break
            if float(self.loads[fit.queue].sum()) > _HOPEFUL * room:
                return None
            opened = fit.fill(profile)
            if opened is None:
                return None
            fit.close(opened)
            room -= self.carried[profile]
        return None if fit.queue.size else fit.bins
