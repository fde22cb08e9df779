"""Hours of servers that certainly starve, simulated with a part of their requests."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from packer.arrival import Arrivals
from packer.bin import Bin
from packer.profile import Profile
from packer.solvers.backbone import load_bound
from packer.times import HOUR_S
from packer.twin.arrivals import MAX_REQUESTS
from packer.twin.engine_rules import caches_prefixes
from packer.twin.hours import Hours, Job, ServerHour
from packer.twin.parts import parts_s
from packer.twin.simulate import simulate
from packer.twin.until_clear import HARD_LIMIT
from packer.twin.watch import BrokenError
from packer.workload import Workload

BEYOND = 4  # A server certainly starves with this multiple of the load that any server can serve.


def servers_by_load(fleet: Workload, profile: Profile) -> int:
    """The fewest servers that the load takes (`load_bound`), also of rates and prompts for which that has no bound.
    Unpredictable rates count at their lowest. Of prompts that share prefixes, the tokens count that an unlimited cache
    leaves. That is an approximation, not a bound, so that half of this load counts."""
    part, arrivals = 1.0, fleet.arrivals
    if arrivals.kind == "unpredictable":
        fleet, part = fleet.with_arrivals(Arrivals()), 1.0 / arrivals.span
    if fleet.shares_prefixes:
        fleet, part = fleet.as_independent(cached=caches_prefixes(fleet, profile)), part / 2.0
    return max(1, math.ceil(part * load_bound(fleet, profile, 0.0, simulated=False)))


@dataclass(eq=False)
class PlannedHours(Hours):
    """Hours of servers of plans. A server that certainly starves is simulated for an hour, also with parts of adapters,
    and with fewer requests, but still far more than it can serve; its figures are those with all requests."""

    def _hour_of(self, job: Job, most: float | None) -> ServerHour | BrokenError:
        item, fleet, seed = job
        own = self._workload(item, fleet)
        if (share := starving_share(item, own)) is None:
            return super()._hour_of(job, most)
        run = simulate(own.scaled(share), item.profile, **asdict(item.settings), seed=seed)
        return _with_all(self._hour(run), share)


def _with_all(hour: ServerHour, share: float) -> ServerHour:
    """The hour of a server that starves, simulated with this share of its requests, with the figures of all of them."""
    known, each = hour.figures, hour.adapters
    figures = replace(
        known, offered_tok_s=known.offered_tok_s / share, starved=True, starvation_probability=1.0, slo_used=math.inf,
        slo_attainment=known.slo_attainment * share, stable=False,
    )  # fmt: skip
    adapters = each._replace(slo_attainment=each.slo_attainment * share, slo_used=np.full_like(each.slo_used, math.inf))
    return replace(hour, figures=figures, used=math.inf, adapters=adapters, late=hour.late[:, :0], holds=(False,) * 3)


def starving_share(item: Bin, own: Workload) -> float | None:
    """The share of a server's requests that are simulated for an hour if it certainly starves and its usual run has
    more than `HARD_LIMIT` requests; None for other servers. It gets at least `BEYOND` times the load that any server
    can serve, of which so much is simulated, or more requests than can be drawn (`MAX_REQUESTS`)."""
    hour_s = own.arrivals.whole_s(HOUR_S)
    sent = own.rate * (parts_s(item, own) or hour_s)
    if sent <= HARD_LIMIT or own.arrivals.trace is not None:
        return None
    load = servers_by_load(own, item.profile)
    if load >= BEYOND:
        return BEYOND / load
    return None if sent <= MAX_REQUESTS else min(1.0, HARD_LIMIT / (own.rate * hour_s))
