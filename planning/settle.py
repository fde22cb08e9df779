"""Slots of servers: as many as adapters are likely to have requests at once, settled by simulated hours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from packer.bin import Bin, indices
from packer.failover import with_slots_for_loss
from packer.planning.kept import FAR_BEYOND, STARVING, Hour, KeptHours
from packer.solvers.candidates import AWAY, candidates_of, neighbours
from packer.twin.memory.policy import kv_cache_tokens
from packer.workload import Workload

TIGHT = 0.5
"""A server that uses more than this of its limits is tried with more slots."""
FIRST = 4
"""Of servers that keep their limits but are tried with more slots, so many are tried first."""
LESS = 0.9
"""The others are tried, too, where one of these uses no more than this part of what it used."""
PACE = 0.5
"""The mean ITL that is expected, as a part of its limit."""
SLOWEST_MS = 100.0
"""The ITL limit that is taken where there is none, or a wider one."""
SPREAD = 3.0
"""Slots are for so many standard deviations more adapters than have a request at once on average."""


def likely_slots(fleet: Workload, item: Bin) -> int:
    """The candidate that is enough for the adapters that have a request at once, not less than the server has.

    An adapter has one for 1 - exp(-rate x time) of the time, where a request takes its output tokens at `PACE`. Fewer
    where these leave too little KV cache for the tokens of all requests.
    """
    own = indices(item.adapters)
    pace_s = PACE * np.minimum(fleet.slo.columns(fleet)[1][own], SLOWEST_MS) * 1e-3
    output = fleet.mean_output_tokens[own]
    open_ = item.rates(fleet) * output * pace_s
    busy = 1.0 - np.exp(-open_)
    wanted = float(busy.sum() + SPREAD * math.sqrt(float(busy @ (1.0 - busy))))
    held = float(open_ @ (fleet.mean_input_tokens[own] + output))
    fits = [
        n
        for n in candidates_of(item)
        if n <= item.max_loras or kv_cache_tokens(item.profile, item.with_slots(n).settings) >= held
    ]
    return max(item.max_loras, next((n for n in fits if n >= wanted), fits[-1]))


def with_most_slots(bins: Sequence[Bin], slots: int) -> list[Bin]:
    """Each server with so many slots, or with as many as its candidates have."""
    return [item.with_slots(min(candidates_of(item)[-1], slots)) for item in bins]


def with_best_slots(
    kept: KeptHours,
    bins: Sequence[Bin],
    hours: Sequence[Hour],
    over: Callable[[], bool],
    *,
    tight: float = TIGHT,
    alike: bool = False,
) -> list[Bin]:
    """Each server with the number of slots that keeps its limits best, from `likely_slots`.

    More are tried where it uses > `tight` of its limits. By the first hour, of the worst server first: where that
    breaks its limits with any number, the others stay as they are, or, `alike`, get what is best for it. Servers that
    break their limits in further hours are settled by all.
    """
    best = [item.with_slots(likely_slots(kept.workload, item)) for item in bins]
    used = kept.used(best, hours[:1])
    if len(best) > 1 and max(used) > 1.0 and kept.all_count:
        worst = used.index(max(used))
        (best[worst],), (least,) = _settled(kept, [best[worst]], hours[:1], over)
        if least > 1.0:
            return with_most_slots(best, best[worst].max_loras) if alike else best
    best, used = _settled(kept, best, hours[:1], over, tight)
    if len(hours) > 1 and (max(used) <= 1.0 or not kept.all_count):
        best, _ = _settled(kept, best, hours, over, 1.0)
    return best


def with_spare_slots(kept: KeptHours, bins: Sequence[Bin], over: Callable[[], bool]) -> list[Bin]:
    """Servers with the slots that they need when any other one is lost."""
    slotted = partial(with_best_slots, kept, hours=[kept.given], over=over)
    return with_slots_for_loss(kept.workload, bins, slotted) or list(bins)


def _settled(
    kept: KeptHours,
    bins: Sequence[Bin],
    hours: Sequence[Hour],
    over: Callable[[], bool],
    tight: float = TIGHT,
) -> tuple[list[Bin], list[float]]:
    """The servers with more slots where they use > `tight` of their limits, then with fewer where they break them and
    fewer leave more of a scarce KV cache; and how much of their limits they use.

    Of servers that keep their limits those that use most come first: the others stay where these gain little.
    """
    best, used = list(bins), kept.used(bins, hours)
    for away, least in ((AWAY, tight), (-AWAY, 1.0)):
        open_ = {k for k in range(len(best)) if used[k] > least}
        if away < 0 and open_:
            short = kept.short_of_cache(best, hours[0])
            open_ = {k for k in open_ if short[k]}
        keeping, before = sorted((k for k in open_ if used[k] <= 1.0), key=lambda k: -used[k]), list(used)
        _climb(kept, best, used, hours, (away, least), open_ - set(keeping[FIRST:]), over)
        if any(used[k] <= LESS * before[k] for k in keeping[:FIRST]):
            _climb(kept, best, used, hours, (away, least), set(keeping[FIRST:]), over)
    return best, used


def _climb(
    kept: KeptHours,
    best: list[Bin],
    used: list[float],
    hours: Sequence[Hour],
    way: tuple[int, float],
    open_: set[int],
    over: Callable[[], bool],
) -> None:
    """Put in place of servers those of their neighbours that use less of their limits.

    `way`: how many neighbours, above or (negative) below; of which part of the limits a server must use more.
    """
    (away, least), start = way, [item.max_loras for item in best]
    while open_ and not over():
        near = {k: neighbours(best[k].with_slots(start[k]), away) for k in open_ if used[k] > least}
        better = set()
        for place in range(AWAY):  # the nearer ones only where the farthest are not enough
            most = least if place == 0 else 1.0
            tries = [k for k in sorted(near) if used[k] > most and len(near[k]) > place]
            others = [best[k].with_slots(near[k][place]) for k in tries]
            then = [
                (kept.job(best[k].with_slots(near[k][place + 1]), hours[0]), FAR_BEYOND)
                for k in tries
                if used[k] >= FAR_BEYOND and len(near[k]) > place + 1
            ]
            found = kept.used(others, hours, [used[k] for k in tries], then)
            for k, other, now in zip(tries, others, found, strict=True):
                if now < used[k]:
                    best[k], used[k], start[k] = other, now, other.max_loras
                    better.add(k)
                elif k not in better and place == 0:
                    start[k] = other.max_loras
        open_ = {
            k for k, some in near.items() if some and (used[k] >= STARVING or (k in better and used[k] > 1.0))
        }
