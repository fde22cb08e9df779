"""Slots of servers, settled by simulated hours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packer.bin import Bin
from packer.planning.kept import STARVING, Hour, KeptHours
from packer.solvers.candidates import AWAY, candidates_of, neighbours

TIGHT = 0.5
"""A server that uses more than this of its limits is tried with more slots."""


def with_best_slots(
    kept: KeptHours,
    bins: Sequence[Bin],
    hours: Sequence[Hour],
    over: Callable[[], bool],
    tight: float = TIGHT,
    *,
    alike: bool = False,
) -> list[Bin]:
    """Each server with the number of slots that keeps its limits best.

    More are tried where it uses > `tight`, then fewer where it breaks its limits and they leave more of a scarce KV
    cache. `alike`: of the worst server first; where that breaks its limits with any, all get what is best for it.
    """
    best = list(bins)
    if alike and len(best) > 1 and kept.required == len(kept.workload):
        used = kept.used(best, hours[:1])
        (worst,) = with_best_slots(kept, [best[used.index(max(used))]], hours, over)
        if kept.used([worst], hours, [1.0])[0] > 1.0:
            return [item.with_slots(min(candidates_of(item)[-1], worst.max_loras)) for item in best]
    for away, least in ((AWAY, tight), (-AWAY, 1.0)):
        start, used = [item.max_loras for item in best], kept.used(best, hours)
        short = kept.short_of_cache(best, hours[0])
        open_ = {k for k in range(len(best)) if away > 0 or short[k]}
        while open_ and not over():
            near = {k: neighbours(best[k].with_slots(start[k]), away) for k in open_ if used[k] > least}
            better = set()
            for place in range(AWAY):  # the nearer ones only where the farthest are not enough
                tries = [k for k in sorted(near) if used[k] > least and len(near[k]) > place]
                others = [best[k].with_slots(near[k][place]) for k in tries]
                found = kept.used(others, hours, [used[k] for k in tries])
                for k, other, now in zip(tries, others, found, strict=True):
                    if now < used[k]:
                        best[k], used[k], start[k] = other, now, other.max_loras
                        better.add(k)
                    elif k not in better and place == 0:
                        start[k] = other.max_loras
            open_ = {k for k, some in near.items() if some and (k in better or used[k] >= STARVING)}
    return best
