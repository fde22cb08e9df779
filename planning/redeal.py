"""Plans of which few servers break the goal, most often by chance: they and others deal their adapters anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np

from packer.bin import Bin
from packer.planning.kept import Hour, KeptHours
from packer.planning.splits import FEW
from packer.solvers.candidates import candidates_of

NEAR = 1.5
"""Plans with a server that uses so much of its limits are not dealt anew."""
MOST_HOURS = 8
"""Beyond so many, fresh hours broke servers that were dealt anew so often that the plan needs more of them."""
TRIES = 8
"""How often a server that breaks its limits deals, with one server after the other, until both keep them."""
SPREAD = 0.3
"""Standard deviation of the noise in the logarithms of loads, so that each deal has another order."""
STEEP = 0.25
"""A server is taken to use its limits by the load to the power 1 / `STEEP`."""


def dealt_anew(
    kept: KeptHours, plans: Sequence[Sequence[Bin]], hours: Sequence[Hour], over: Callable[[], bool]
) -> list[Bin] | None:
    """The plan with the fewest servers that break their limits in one of the hours, dealt anew so that none does.

    A server that breaks its limits in one hour of several, or by little, carries no more than others do: a quiet
    adapter had its few requests when many waited. It puts its adapters together with those of a server that keeps its
    limits, and they are dealt again, in an order with noise; that which used more of its limits gets less load.
    None where more than `FEW` of the servers break their limits, one by much, in too many hours, or no deal is found.
    """
    several = [bins for bins in plans if len(bins) > 1 and len(hours) <= MOST_HOURS]
    judged = [(kept.used(bins, hours, [NEAR] * len(bins)), bins) for bins in several if not over()]
    near = [(used, bins) for used, bins in judged if max(used) < NEAR]
    if not near or over():
        return None
    used, bins = min(near, key=lambda each: sum(share > 1.0 for share in each[0]))
    made, rng = list(bins), np.random.default_rng(kept.seed)
    broken = sorted((k for k, share in enumerate(used) if share > 1.0), key=lambda k: -used[k])
    if len(broken) > max(1.0, FEW * len(made)):
        return None
    for k in broken:
        whole = [
            j for j in range(len(made)) if j not in broken and not (made[j].is_split or made[k].is_split)
        ]
        for j in islice(cycle(sorted(whole, key=lambda j: used[j])), TRIES):
            pair = _dealt(kept, (made[k], made[j]), (used[k], used[j]), rng)
            if over():
                return None
            if max(kept.used(pair, hours, [1.0, 1.0])) <= 1.0:
                made[k], made[j] = pair
                break
        else:
            return None
    return made


def _dealt(
    kept: KeptHours, pair: tuple[Bin, Bin], used: tuple[float, float], rng: np.random.Generator
) -> list[Bin]:
    """Servers like these two with the adapters of both, the heaviest first, each on the one that is then less full of
    what it may carry; those of ranks beyond the slots of one on the other, first of all."""
    fleet, loads = kept.workload, kept.workload.offered_tok_s_by_adapter
    adapters = np.array([i for item in pair for i in item.adapters])
    noisy = loads[adapters] * rng.lognormal(0.0, SPREAD, len(adapters))
    bound = fleet.ranks[adapters] > min(item.max_lora_rank for item in pair)
    larger = int(pair[1].max_lora_rank > pair[0].max_lora_rank)
    bears = [
        item.offered_tok_s(fleet) / max(share, 0.1) ** STEEP for item, share in zip(pair, used, strict=True)
    ]
    parts: tuple[list[int], list[int]] = ([], [])
    full = [0.0, 0.0]
    for place in np.lexsort((-noisy, ~bound)).tolist():
        i = int(adapters[place])
        to = larger if bound[place] else int(full[1] < full[0])
        parts[to].append(i)
        full[to] += float(loads[i]) / bears[to]
    slotted = zip(pair, parts, strict=True)
    return [
        _like(item, part, each=any(p.max_loras >= len(p.adapters) for p in pair)) for item, part in slotted
    ]


def _like(item: Bin, part: list[int], *, each: bool) -> Bin:
    """A server with these adapters, and as many slots; `each`: with a slot for every adapter."""
    made = Bin(tuple(part), item.profile.settings(1, item.max_lora_rank), item.profile)
    return made.with_slots(min(len(part) if each else item.max_loras, candidates_of(made)[-1]))
