"""Repair plans of which few servers break the goal, mostly by chance: redistribute adapters among pairs of servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from packer.bin import Bin
from packer.planning.kept import Hour, KeptHours
from packer.planning.settle import with_most_slots
from packer.solvers.order import levelled

NEAR = 1.5
"""Plans with a server that uses at least this multiple of its limits are not redistributed."""
FEW = 0.2
"""Plans are not redistributed, either, if more than this share of the servers breaks its limits."""
TRIES = 6
"""Number of other servers with which a server that breaks its limits is tried, until both servers keep theirs."""
SPREAD = 0.3
"""Standard deviation of the noise in the logarithms of loads, so that each attempt has a different order."""


def dealt_anew(
    kept: KeptHours, plans: Sequence[Sequence[Bin]], hours: Sequence[Hour], over: Callable[[], bool]
) -> list[Bin] | None:
    """The plan with the fewest servers that break their limits in an hour, redistributed so that none does.

    A server that breaks its limits in one hour of several, or by little, carries no more load than others: a quiet
    adapter sent its few requests when many others waited. The adapters of that server and of one that keeps its limits
    are pooled and divided in an order with noise, so that each server gets about half of the load.
    None if more than `FEW` of the servers break their limits, one uses `NEAR` of them, or no division is found.
    """
    judged = [(_near(kept, bins, hours), bins) for bins in plans if len(bins) > 1 and not over()]
    near = [(used, bins) for used, bins in judged if used]
    if not near or over():
        return None
    used, bins = min(near, key=lambda each: sum(share > 1.0 for share in each[0]))
    made, rng = list(bins), np.random.default_rng(kept.seed)
    broken = sorted((k for k, share in enumerate(used) if share > 1.0), key=lambda k: -used[k])
    for k in broken:
        alike = [j for j in range(len(made)) if j not in broken and _alike(made[j], made[k])]
        for j in sorted(alike, key=lambda j: used[j])[:TRIES]:
            pair = _dealt(kept, (made[k], made[j]), rng)
            if over():
                return None
            if max(kept.used(pair, hours, [1.0, 1.0])) <= 1.0:
                made[k], made[j] = pair
                break
        else:
            return None
    return made


def _near(kept: KeptHours, bins: Sequence[Bin], hours: Sequence[Hour]) -> list[float]:
    """The share of its limits that each server uses in the worst hour; [] if too many break them, or one by much."""
    worst = [0.0] * len(bins)
    for hour in hours:
        used = kept.used(bins, [hour], [NEAR] * len(bins))
        worst = [max(pair) for pair in zip(worst, used, strict=True)]
        if max(worst) >= NEAR or sum(share > 1.0 for share in worst) > max(1.0, FEW * len(bins)):
            return []
    return worst


def _alike(one: Bin, other: Bin) -> bool:
    """Whether each server can hold the other's adapters: equal slot ranks, and no split adapters."""
    return one.max_lora_rank == other.max_lora_rank and not (one.is_split or other.is_split)


def _dealt(kept: KeptHours, pair: tuple[Bin, Bin], rng: np.random.Generator) -> list[Bin]:
    """Two servers that divide the adapters of the pair, each with about half of the load."""
    adapters = np.array([i for item in pair for i in item.adapters])
    loads = kept.workload.offered_tok_s_by_adapter
    noisy = loads[adapters] * rng.lognormal(0.0, SPREAD, len(adapters))
    full = any(item.max_loras >= len(item.adapters) for item in pair)
    slots = len(adapters) if full else max(item.max_loras for item in pair)
    made = []
    for part in levelled(adapters[np.argsort(-noisy, kind="stable")], loads, 2):
        item = Bin(tuple(part), pair[0].profile.settings(1, pair[0].max_lora_rank), pair[0].profile)
        made.append(item)
    return with_most_slots(made, slots)
