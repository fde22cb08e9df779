"""Latency by number of GPUs, from the fewest on which nothing starves to where more GPUs gain little."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packer import checks
from packer.arrival import RequestTrace
from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.evaluation import Evaluations, mean_of
from packer.goal import GoalLike
from packer.gpu import Kinds, kinds_of, serving
from packer.plan import Plan, Status
from packer.planning.assemble import versions
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.public import public
from packer.solvers.evaluator import rate_margin_for
from packer.twin.hours import merged
from packer.twin.per_server import quantiles
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.planning.explore import Frontier


@dataclass(eq=False, kw_only=True)
class Conditions:
    """The parameters of `packer.recommend` and `packer.frontier` besides the fleet, its servers and its goal.

    `margin`, `confidence`: at most one of them; both None: the default margin of each profile.
    `log_hour`: the requests of an hour of a log, in which a plan must keep the limits, too.
    """

    margin: float | None = None
    confidence: float | None = None
    max_replicas: int | None = None
    spare: int = 0
    seed: int = 0
    verify: bool = True
    progress: Progress = silent
    stop: Callable[[], bool] = lambda: False
    time_limit_s: float | None = None
    log_hour: RequestTrace | None = None

    def margin_of(self, profile: Profile) -> float:
        """Share by which rates on servers of this profile are raised. Raises `ValidationError`: out of range, or both
        are given; `IncompatibleError`: no margin follows from the confidence, because the profile has no held-out
        errors."""
        return rate_margin_for(profile, confidence=self.confidence, margin=self.margin)


@dataclass(frozen=True, eq=False)
class FrontierPoint:
    """A plan on some number of GPUs, with its figures at the rates as given.

    `n_gpus`: GPUs used; in searches, servers used.
    `p95_ttft_ms`, `slo_attainment`, `goodput_tok_s`: over all requests. `mean_itl_ms`: over all gaps between tokens.
    `worst_adapter`, `worst_adapter_ttft_ms`: the adapter with the highest p95 TTFT, and that TTFT.
    `price_per_hour`: price of all GPUs; None if the profile has no price.
    `holds`: whether enough adapters keep their limits with every rate raised by the margin, in every further hour
    that plans were made for (points beyond the plan to deploy: in the first hour only), and with `spare` at the rates
    as given on the GPUs that are left when any one is lost.
    `broken_later`: whether the limits are kept in the first hour and broken in a further one.
    `starving`: numbers of the servers that starve or do not start at the rates as given. `queueing`: numbers of the
    servers that serve their load, but have a growing queue or an adapter beyond its limits in one of the hours.
    `plan`: the plan.
    """

    n_gpus: int
    p95_ttft_ms: float
    worst_adapter: str
    worst_adapter_ttft_ms: float
    mean_itl_ms: float
    slo_attainment: float
    goodput_tok_s: float
    price_per_hour: float | None
    holds: bool
    broken_later: bool
    starving: tuple[int, ...]
    queueing: tuple[int, ...]
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """The figures without the plan, JSON-able."""
        return {key: value for key, value in vars(self).items() if key != "plan"}


def point_of(job: Frontier, bins: Sequence[Bin]) -> FrontierPoint:
    """The point of these servers for the fleet of a search."""
    hours = job.hours.all(bins, job.workload, requests=True)
    adapters = merged(job.workload, bins, hours)
    worst = int(np.nan_to_num(adapters.p95_ttft_ms, nan=math.inf).argmax())
    requests = np.concatenate([hour.ttft_ms for hour in hours if hour.ttft_ms is not None])
    figures = Evaluations.of([hour.figures for hour in hours])
    starving = tuple(k for k, hour in enumerate(hours) if not hour.figures.feasible)
    used = job.kept.used(bins, (*job.kept.hours[:1], job.kept.planned, job.kept.given), [1.0] * len(bins))
    beyond = bool(starving) or not job.kept.holds_in(bins, job.kept.planned)
    holds = job.kept.holds(bins, job.spare)
    plan = Plan(
        job.workload, tuple(bins), figures, Status.INFEASIBLE if starving else Status.FEASIBLE, objective="gpus",
        solver="frontier", predictor="twin", margin=None if job.replayed else job.margin,
        objective_value=(float(sum(item.gpus for item in bins)),), adapters=adapters, runtime_s=job.elapsed_s(),
        seed=job.seed, versions=versions(tuple(dict.fromkeys(item.profile for item in bins))),
        statistics={"spare": 1} if job.spare else {},
    )  # fmt: skip
    (p95_ms,) = quantiles(np.sort(requests), 0.95)
    later = not (holds or beyond) and not all(job.kept.holds_in(bins, hour) for hour in job.kept.hours)
    queueing = tuple(k for k, used in enumerate(used) if used > 1.0 and k not in starving)
    return FrontierPoint(
        len(bins), p95_ms, job.workload.names[worst], float(adapters.p95_ttft_ms[worst]),
        mean_of(figures.mean_itl_ms, [item.gaps_s(job.workload) for item in bins]),
        mean_of(figures.slo_attainment, [item.requests_s(job.workload) for item in bins]),
        float(np.nan_to_num(figures.goodput_tok_s, nan=0.0).sum()), plan.price_per_hour, holds, later, starving,
        queueing, plan,
    )  # fmt: skip


@public
def frontier(
    workload: Workload,
    profile: Kinds,
    *,
    slo: GoalLike | None = None,
    margin: float | None = None,
    max_gpus: int | None = None,
    max_replicas: int | None = None,
    spare: int = 0,
    seed: int = 0,
    progress: Progress = silent,
) -> list[FrontierPoint]:
    """Latency and price by number of GPUs, from the fewest on which nothing starves to where more gain little.

    `workload` has one base model; the other parameters are as for `packer.recommend`. With several kinds of server,
    the points of each kind follow one another. `FrontierPoint.holds` refers to `slo`, `margin` and `spare`.
    Raises `IncompatibleError`: the fleet is of several base models.
    """
    from packer.planning.explore import Frontier
    from packer.planning.overload import Overload
    from packer.planning.recommend import Deployment

    fleet, kinds = workload.held_to(slo), kinds_of(profile)
    served = serving(fleet, [kind.profile for kind in kinds])
    if max_gpus is not None:
        checks.integer("max_gpus", max_gpus, low=1)
    most = {kind.profile: min((n for n in (max_gpus, kind.available) if n is not None), default=None) for kind in kinds}
    if len(served) > 1:
        raise IncompatibleError("Expected a fleet of one base model: the frontier of each model is its own.")
    found: list[FrontierPoint] = []
    for each in next(iter(served.values())):
        job = Frontier(fleet, each, margin=margin, max_replicas=max_replicas, spare=spare, seed=seed, progress=progress)
        Deployment(job, most[each], beyond=math.inf).explored()
        for point in job.points:
            Overload(job).reslotted(point)
        found += [replace(point, n_gpus=point.plan.n_gpus) for point in job.points if not point.starving]
    return found
