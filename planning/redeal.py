"""Repair plans of which few servers break the goal: redistribute adapters among pairs of servers, or divide one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from packer.bin import Bin
from packer.planning.kept import Hour, KeptHours
from packer.planning.settle import with_most_slots
from packer.search import fewest
from packer.solvers.candidates import slot_ranks
from packer.solvers.order import levelled
from packer.workload import Workload

NEAR = 1.5  # Plans with a server that uses at least this multiple of its limits are not redistributed.
FEW = 0.2  # Plans are not redistributed, either, if more than this share of the servers breaks its limits.
TRIES = 6  # Other servers with which a server that breaks its limits is tried, until both keep theirs.
GIVEN = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # Shares of its load of an adapter that a server gives; all, at last.
HOTTEST = 2  # Number of adapters of a server of which parts are given away, the hottest first.
SPREAD = 0.3  # Standard deviation of the noise in the logarithms of loads, so that each attempt has a different order.


def dealt_anew(
    kept: KeptHours, plans: Sequence[Sequence[Bin]], hours: Sequence[Hour], over: Callable[[], bool], copies: int = 1
) -> list[Bin] | None:
    """The plan with the fewest servers that break their limits in an hour, redistributed so that none does.

    A server that breaks its limits in one hour of several, or by little, carries no more load than others: a quiet
    adapter sent its few requests when many others waited. The adapters of that server and of one that keeps its limits
    are pooled and divided in an order with noise, so that each server gets about half of the load. If no such division
    keeps the limits, the server gives part of a hot adapter to another server.
    None if more than `FEW` of the servers break their limits, one uses `NEAR` of them, or no division is found.

    `copies`: largest number of servers that may hold an adapter.
    """
    judged = [(_near(kept, bins, hours), bins) for bins in plans if len(bins) > 1 and not over()]
    near = [(used, bins) for used, bins in judged if used]
    if not near or over():
        return None
    used, bins = min(near, key=lambda each: (sum(share > 1.0 for share in each[0]), max(each[0])))
    made, rng = list(bins), np.random.default_rng(kept.seed)

    def ways(k: int) -> Iterator[tuple[int, list[Bin]]]:
        others = sorted((j for j in range(len(made)) if j not in broken), key=lambda j: used[j])
        for j in [j for j in others if _alike(made[j], made[k])][:TRIES]:
            yield j, _dealt(kept, (made[k], made[j]), rng)
        for j in others[:TRIES]:
            for i in _hottest(kept.workload, made[k], made[j])[:HOTTEST]:
                more = i in made[j].adapters or sum(i in item.adapters for item in made) < copies
                parts = [part for part in GIVEN if (more if part < 1 else len(made[k].adapters) > 1)]
                pairs = [_given(kept.workload, made[k], made[j], i, part) for part in parts]
                if (pair := _first_kept(kept, hours, pairs, over)) is not None:
                    yield j, pair

    broken = sorted((k for k, share in enumerate(used) if share > 1.0), key=lambda k: -used[k])
    for k in broken:
        for j, pair in ways(k):
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
    """Whether each server can hold the other's adapters: one kind, equal slot ranks, and no split adapters."""
    same = one.profile == other.profile and one.max_lora_rank == other.max_lora_rank
    return same and not (one.is_split or other.is_split)


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


def _first_kept(
    kept: KeptHours, hours: Sequence[Hour], pairs: Sequence[list[Bin]], over: Callable[[], bool]
) -> list[Bin] | None:
    """The first pair of servers whose first one keeps its limits in all of the hours, as in all later pairs."""
    n = fewest(lambda n: kept.used(pairs[n][:1], hours, [1.0])[0] <= 1.0, 0, len(pairs) - 1, over)
    return None if n is None else pairs[n]


def _hottest(fleet: Workload, item: Bin, other: Bin) -> list[int]:
    """The adapters of a server, first those that fit the other server's slots, the hottest first."""
    loads, ranks = fleet.offered_tok_s_by_adapter, slot_ranks(fleet.ranks)
    held = dict(zip(item.adapters, item.shares, strict=True))
    return sorted(held, key=lambda i: (ranks[i] > other.max_lora_rank, -held[i] * loads[i]))


def _given(fleet: Workload, item: Bin, other: Bin, i: int, part: float) -> list[Bin]:
    """The two servers after the first one has given this part of its share of adapter `i` to the second one."""
    mine, theirs = (dict(zip(each.adapters, each.shares, strict=True)) for each in (item, other))
    share = part * mine[i]
    theirs[i] = theirs.get(i, 0.0) + share
    mine[i] -= share
    if not mine[i]:
        del mine[i]
    made = []
    for each, held in ((item, mine), (other, theirs)):
        rank = max(each.max_lora_rank, int(slot_ranks(fleet.ranks[[*held]]).max()))
        new = Bin(tuple(held), each.profile.settings(1, rank), each.profile, tuple(held.values()))
        full = each.max_loras >= len(each.adapters)
        made += with_most_slots([new], len(held) if full else each.max_loras)
    return made
