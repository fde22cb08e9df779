"""Choose the slots of servers: estimate how many adapters are active at once, then refine by simulated hours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from packer.bin import Bin, indices
from packer.failover import with_slots_for_loss
from packer.planning.kept import FAR_BEYOND, STARVING, Hour, KeptHours
from packer.solvers.candidates import AWAY, candidates_of, gains_cache, neighbours
from packer.twin.memory.held import share_held
from packer.twin.memory.policy import kv_cache_tokens
from packer.workload import Workload

TIGHT = 0.5  # Try more slots for a server that uses more than this share of its limits.
FIRST = 4  # Number of servers within their limits whose slots are increased first.
LESS = 0.9  # Increase the other servers' slots, too, if one of the first then uses so much less of its limits.
PACE = 0.5  # Expected mean ITL, as a share of its limit.
SLOWEST_MS = 100.0  # ITL limit to assume if there is none, or if it is wider than this.
SPREAD = 3.0  # Provide slots for the mean number of adapters with a request, plus this number of standard deviations.


def likely_slots(fleet: Workload, item: Bin) -> int:
    """The candidate with slots for the adapters that have a request at once; at least the server's, up to one each. An
    adapter has a request for 1 - exp(-rate x time) of the time; `time` is that of its output tokens at `PACE` times the
    ITL limit. More slots than now must leave enough KV cache for the tokens of all requests."""
    own = indices(item.adapters)
    pace_s = PACE * np.minimum(fleet.slo.columns(fleet)[1][own], SLOWEST_MS) * 1e-3
    output = fleet.mean_output_tokens[own]
    open_ = item.rates(fleet) * output * pace_s
    busy = (1.0 - np.exp(-open_))[fleet.ranks[own] > 0]  # requests to the base model take no slot
    wanted = min(len(busy), float(busy.sum() + SPREAD * math.sqrt(float(busy @ (1.0 - busy)))))
    held = float(open_ @ (fleet.mean_input_tokens[own] + output))
    if (shape := item.profile.model.kv_shape) is not None:
        held *= share_held(item.workload(fleet), shape)
    fits = [
        n
        for n in candidates_of(item)
        if n <= item.max_loras or kv_cache_tokens(item.profile, item.with_slots(n).settings) >= held
    ]
    return min(max(1, len(busy)), max(item.max_loras, next((n for n in fits if n >= wanted), fits[-1])))


def with_most_slots(bins: Sequence[Bin], slots: int) -> list[Bin]:
    """Each server with `slots` slots, or with its largest candidate if that is smaller."""
    return [item.with_slots(min(candidates_of(item)[-1], slots)) for item in bins]


def with_best_slots(
    kept: KeptHours, bins: Sequence[Bin], hours: Sequence[Hour], over: Callable[[], bool], *,
    tight: float = TIGHT, alike: bool = False,
) -> list[Bin]:  # fmt: skip
    """Each server with the number of slots that keeps its limits best, starting from `likely_slots`.

    In the first hour, try more slots for servers that use > `tight` of their limits, the worst server first. If that
    one breaks its limits with any slots, the others keep theirs or (`alike`) take its number. Then servers that break
    their limits in further hours are tuned on all hours, unless the goal is lost in one of them with any slots.
    """
    best = [item.with_slots(likely_slots(kept.workload, item)) for item in bins]
    used = kept.used(best, hours[:1])
    if len(best) > 1 and max(used) > 1.0 and kept.all_count:
        worst = used.index(max(used))
        (best[worst],), (least,) = _settled(kept, [best[worst]], hours[:1], over)
        if least > 1.0:
            return with_most_slots(best, best[worst].max_loras) if alike else best
    best, used = _settled(kept, best, hours[:1], over, tight)
    if len(hours) > 1 and not is_lost(kept, best, used) and not _lost_later(kept, best, hours[1:]):
        best, _ = _settled(kept, best, hours, over, 1.0)
    return best


def _lost_later(kept: KeptHours, bins: Sequence[Bin], hours: Sequence[Hour]) -> bool:
    """Whether servers that can have no other slots lose the goal in one of these hours, if some adapters may be late:
    plans that are made for each adapter are changed (`packer.planning.redeal`) with all their slots known."""
    fixed = [] if kept.all_count else [each for each in bins if not (neighbours(each, AWAY) or gains_cache(each))]
    return bool(fixed) and any(is_lost(kept, fixed, kept.used(fixed, [hour])) for hour in hours)


def is_lost(kept: KeptHours, bins: Sequence[Bin], used: Sequence[float]) -> bool:
    """Whether servers that use so much of their limits in an hour leave too few adapters that keep theirs. Of a server
    that breaks its limits, more than the share of adapters that may do so break theirs."""
    share, late, seen = kept.workload.slo.adapter_share, 0, set[int]()
    for item, each in zip(bins, used, strict=True):
        if each >= STARVING:
            return True
        if each > 1.0 and seen.isdisjoint(item.adapters):  # an adapter on several servers counts once
            seen.update(item.adapters)
            late += 1 + len(item.adapters) - math.ceil(share * len(item.adapters) - 1e-9)
    return late > len(kept.workload) - kept.required


def with_spare_slots(kept: KeptHours, bins: Sequence[Bin], over: Callable[[], bool]) -> list[Bin]:
    """Each server with the slots that it needs when any other server is lost; unchanged if none suffice."""

    def slotted(left: Sequence[Bin]) -> list[Bin] | None:
        made = with_best_slots(kept, left, [kept.given], over)
        return made if over() or kept.holds_in(made, kept.given) else None

    return with_slots_for_loss(kept.workload, bins, slotted) or list(bins)


def _settled(
    kept: KeptHours, bins: Sequence[Bin], hours: Sequence[Hour], over: Callable[[], bool], tight: float = TIGHT
) -> tuple[list[Bin], list[float]]:
    """The servers with the slots found, and the share of its limits that each server uses. Try more slots for servers
    that use > `tight` of their limits, then fewer for servers that break their limits for lack of KV cache. Of servers
    within their limits, the others follow the fullest only if those gain (`LESS`)."""
    best, used = list(bins), kept.used(bins, hours)
    for away, least in ((AWAY, tight), (-AWAY, 1.0)):
        open_ = {k for k in range(len(best)) if used[k] > least}
        if away < 0 and open_:
            short = kept.short_of_cache(best, hours[0])
            open_ = {k for k in open_ if short[k]}
        # The fullest of the servers within their limits show whether the others would gain, too.
        keeping, before = sorted((k for k in open_ if used[k] <= 1.0), key=lambda k: -used[k]), list(used)
        _climb(kept, best, used, hours, (away, least), open_ - set(keeping[FIRST:]), over)
        if any(used[k] <= LESS * before[k] for k in keeping[:FIRST]):
            _climb(kept, best, used, hours, (away, least), set(keeping[FIRST:]), over)
    return best, used


def _climb(
    kept: KeptHours, best: list[Bin], used: list[float], hours: Sequence[Hour], way: tuple[int, float],
    open_: set[int], over: Callable[[], bool],
) -> None:  # fmt: skip
    """Replace each server by its best neighbour if that uses less of its limits. `way`: number of neighbours, above or
    (if negative) below; share of its limits that a server must exceed."""
    (away, least), start = way, [item.max_loras for item in best]
    while open_ and not over():
        near = {k: neighbours(best[k].with_slots(start[k]), away) for k in open_ if used[k] > least}
        better = set()
        for place in range(AWAY):  # nearer neighbours only if the farthest do not suffice
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
                # Neighbours of the farthest value come next: a starving server may need many more slots.
                elif k not in better and place == 0:
                    start[k] = other.max_loras
        open_ = {k for k, some in near.items() if some and (used[k] >= STARVING or (k in better and used[k] > 1.0))}
