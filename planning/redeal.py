"""Plans of which few servers break the goal, most often by chance: they and others deal their adapters anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from packer.bin import Bin
from packer.planning.kept import Hour, KeptHours
from packer.planning.settle import with_most_slots
from packer.solvers.order import levelled

NEAR = 1.5
"""Plans with a server that uses so much of its limits are not dealt anew."""
FEW = 0.2
"""Nor those of which more than this part of the servers breaks its limits."""
TRIES = 6
"""With how many others a server that breaks its limits deals, one after the other, until both keep them."""
SPREAD = 0.3
"""Standard deviation of the noise in the logarithms of loads, so that each deal has another order."""


def dealt_anew(
    kept: KeptHours, plans: Sequence[Sequence[Bin]], hours: Sequence[Hour], over: Callable[[], bool]
) -> list[Bin] | None:
    """The plan with the fewest servers that break their limits in one of the hours, dealt anew so that none does.

    A server that breaks its limits in one hour of several, or by little, carries no more than others do: a quiet
    adapter had its few requests when many waited. It puts its adapters together with those of a server that keeps its
    limits, and each gets about half of the load, in an order with noise.
    None where more than `FEW` of the servers break their limits, one by much, or no deal is found.
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
    """How much of its limits each server uses in the worst of the hours; none where too many break them, or by much."""
    worst = [0.0] * len(bins)
    for hour in hours:
        used = kept.used(bins, [hour], [NEAR] * len(bins))
        worst = [max(pair) for pair in zip(worst, used, strict=True)]
        if max(worst) >= NEAR or sum(share > 1.0 for share in worst) > max(1.0, FEW * len(bins)):
            return []
    return worst


def _alike(one: Bin, other: Bin) -> bool:
    """Whether adapters may go from each of the servers to the other."""
    return one.max_lora_rank == other.max_lora_rank and not (one.is_split or other.is_split)


def _dealt(kept: KeptHours, pair: tuple[Bin, Bin], rng: np.random.Generator) -> list[Bin]:
    """Two servers with the adapters of both, each with about half of the load."""
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
