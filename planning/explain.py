"""Explain a plan to deploy: what its servers give, what fewer would give, and what would help if it breaks the goal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from packer.arrays import FloatArray
from packer.evaluation import WHOLE_GOAL
from packer.goal import Goal
from packer.plan import Plan, Status
from packer.planning.chance import chance_words
from packer.planning.explore import Frontier
from packer.planning.follow import many_cut
from packer.planning.frontier import FrontierPoint
from packer.planning.kept import Hour
from packer.planning.lone import needs
from packer.planning.overload import Overload
from packer.planning.replicas import part
from packer.planning.shortfall import (
    LONGER,
    by_splits,
    context_words,
    late_words,
    latency,
    start_words,
    version_words,
    weaker_goals,
    weaker_words,
)
from packer.planning.unkept import NEAR, apart_words, cannot_words, more_parts, not_found_words, unreachable_words
from packer.profile import Profile
from packer.room import LEVELS, Room, holding, levels_of, reached
from packer.solvers.candidates import beyond_measured
from packer.times import HOUR_S
from packer.words import counted, listed, money

REPLAYED = (
    "Requests are replayed as they were: no rate is raised, and there is no other hour. packer workload from-log "
    "without --replay measures rates and bursts, of which other hours can be drawn"
)
HARDLY_MORE = 0.05  # Share of the adapters that may break a goal in addition to those that break it in every plan.
BEYOND = 64  # How many GPUs more than those at hand are tried, to say how many would suffice.
TRADED = 0.05  # Share of the requests within limits from which on a plan says that it gave them up.


def breaks_later(job: Frontier, plan: Plan) -> str:
    """Which adapter breaks its limits most in the fresh hours that break the plan, and what would help."""
    hours = [job.kept.adapters(plan.bins, hour) for hour in job.broken]
    used = np.max([np.nan_to_num(each.slo_used, nan=np.inf, posinf=np.inf) for each in hours], axis=0)
    worst = int(used.argmax())
    share = "--slo adapter_share=0.99, " if job.workload.slo.adapter_share > 0.99 else ""
    wider = f"What would help: {share}a wider --slo, a larger --margin."
    if used[worst] <= 1.0:
        return f"In another hour an adapter with few requests may wait for more than twice its limit. {wider}"
    how = (
        f"uses {used[worst]:.0%} of its limits" if np.isfinite(used[worst]) else "is on a server that queues or starves"
    )
    alone = float(job.kept.lone(part(job.workload, job.profile, worst, 1)).slo_used)
    chance = f" One at a time its requests use {alone:.0%} on an idle server: more GPUs help little."
    said = f"In another hour adapter {job.workload.names[worst]!r} {how}, and {int((used > 1.0).sum())} of {len(used)}"
    return f"{said} adapters break theirs.{chance if alone >= NEAR else ''} {wider}"


def by_luck(job: Frontier, plan: Plan) -> tuple[str, ...]:
    """A sentence if chance breaks the limits of a plan in some fresh hours."""
    found, _ = job.kept.by_luck(plan.bins)
    return (chance_words(found, len(plan.workload)),) if found else ()


def fewer_than_asked(job: Frontier, plan: Plan, servers: int) -> tuple[str, ...]:
    """A sentence if a plan has fewer servers than `servers`, the least that was asked for, and what keeps it so."""
    if len(plan.bins) >= servers or job.over():
        return ()
    why = "a replayed trace splits none" if job.replayed else f"--max-replicas {job.copies}"
    return (f"--min-gpus asks for more GPUs. The adapters take at most {counted(plan.n_gpus, 'GPU')}: {why}.",)


def short_of_margin(plan: Plan, margins: Mapping[Profile, float]) -> tuple[str, ...]:
    """A sentence if further hours break the goal at less than the margin, with which the plan's hour keeps it.
    `margins`: those of kinds of server that differ from the plan's. If some adapters may be late, the room of a server,
    on which each counts, says nothing about further hours."""
    short, levels = list[tuple[float, float]](), levels_of(plan.margin)
    for item, room in zip(plan.bins, plan.rooms, strict=bool(plan.rooms)):
        margin = margins.get(item.profile, plan.margin or 0.0)
        least = max(level for level in levels if level <= 1.0 + margin)
        if 1.0 + margin > LEVELS[1] and (room.headroom or 0.0) < least:
            short.append((room.headroom or 0.0, margin))
    if not plan.verified or not short or plan.workload.slo.adapter_share < 1.0:
        return ()
    holds, margin = min(short)
    said = f"Rates raised by {margin:.0%}, the margin, keep the goal in the hour that the plan was made for."
    return (f"{said} In further hours it holds to {reached(holds)}.",)


def of_log(job: Frontier, plan: Plan) -> tuple[str, ...]:
    """A sentence on whether a verified plan keeps the goal when a log is replayed, as it must if any number of GPUs
    does."""
    if not job.log_hour or not plan.verified:
        return ()
    from packer.traces.pattern import WHOLE_FROM

    used = job.kept.adapters(plan.bins, Hour(job.workload.replaying(job.log_hour), job.seed)).slo_used
    shown_s = float(np.ptp(job.log_hour.time_s))
    which = "the log's hour" if shown_s >= WHOLE_FROM * HOUR_S else f"{shown_s / 60.0:.2g} min of the log"
    said = f"The requests of {which}, replayed as they were,"
    if not (beyond := int((used > 1.0).sum())):
        return (f"{said} keep the goal.",)
    said += f" break the goal of {beyond:,} of"
    return (f"{said} {counted(len(used), 'adapter')}, and so they do on more GPUs.",)


def nearly_idle(job: Frontier, plan: Plan) -> tuple[str, ...]:
    """A sentence if the goal is so close to what an idle server gives that a plan's servers can carry little load."""
    if max(job.kept.used(plan.bins, [job.kept.given])) < NEAR:
        return ()
    fleet = job.workload
    most = max(range(len(fleet)), key=lambda i: (fleet.ranks[i], fleet.offered_tok_s_by_adapter[i]))
    alone = job.kept.lone(part(fleet, job.profile, most, 1))
    return tuple(
        f"{limit} leaves servers nearly idle: {needed} for adapter {fleet.names[most]!r}, one request at a time. What "
        "would help: a faster GPU, or a wider --slo."
        for limit, needed in list(needs(alone, NEAR))[:1]
    )


def caveats(job: Frontier, plan: Plan, servers: int, margins: Mapping[Profile, float]) -> tuple[str, ...]:
    """What a plan of which at least so many servers were asked for does not give, and why; and what a log gets.
    `margins`: see `short_of_margin`."""
    own = fewer_than_asked(job, plan, servers)
    return (*own, *short_of_margin(plan, margins), *of_log(job, plan), *nearly_idle(job, plan))


def missed(job: Frontier, max_gpus: int | None, late: Sequence[int] = ()) -> tuple[Plan, str]:
    """The plan that is nearest to the goal, with what would keep it: the one with the fewest GPUs on which hardly more
    adapters break it than on any, and no queue grows. If the GPUs at hand are too few, the number of GPUs with the most
    requests within their limits, and a plan on it on which every adapter gets answers (`Overload`). `late`: adapters
    that cannot keep the goal, on servers of their own in the plan."""

    def used(point: FrontierPoint) -> FloatArray:
        of_adapters = np.ones(1) if point.plan.adapters is None else point.plan.adapters.slo_used
        return np.nan_to_num(of_adapters, nan=np.inf, posinf=np.inf)

    limited, traded = max_gpus is not None and not job.hopeless, list[str]()
    points = job.points
    if max_gpus is None and len(points) > 1 and points[-1].n_gpus > 2 * points[-2].n_gpus:
        points = points[:-1]  # a number far above the others was only tried to tell whether any is enough
    over = {point.n_gpus: int((used(point) > 1.0).sum()) for point in points}
    fewest = min(over.values())
    # If most adapters break the goal on any number of GPUs, these are for the load, and for a weaker goal.
    most = fewest + HARDLY_MORE * len(job.workload) if 2 * fewest <= len(job.workload) else math.inf
    near = [point for point in points if over[point.n_gpus] <= most]
    # Queues that grow are worse than limits that no server keeps.
    served = [point for point in near if np.isfinite(used(point)).all()] or near[:1]
    nearest = next((point for point in served if used(point).max() <= max(LONGER)), served[0])
    if job.hopeless:  # on so many GPUs that a weaker goal is kept
        enough = weaker_goals(job, nearest).values()
        nearest = next((each for each in served if each.n_gpus >= nearest.n_gpus and each.n_gpus in enough), nearest)
    if limited:
        best = max(job.points, key=lambda each: (not each.starving, np.nan_to_num(each.slo_attainment), each.n_gpus))
        nearest = _at_given_rates(job, max_gpus) or Overload(job).at(best.n_gpus)
        traded = _traded(job, nearest)
    reasons: tuple[str, ...] = ()
    if job.hopeless:
        reasons = (unreachable_words(job), *apart_words(job, nearest.plan, late, max_gpus))
    elif job.over():
        gpus = job.fewest * job.size
        few = max_gpus is not None and max_gpus < gpus
        needed = f"more GPUs, {gpus} by an estimate of the load" if few else "a longer --time-limit"
        reasons = (f"The search ended before a plan was found that keeps the goal: {needed}.",)
    elif max_gpus is not None and job.points[-1].n_gpus == (servers := max_gpus // job.size):
        more = job.first_that_holds(servers + 1, servers + BEYOND)
        reasons = () if more is None else (_enough(job, more),)
        for point in job.points:
            if point.n_gpus != nearest.n_gpus:
                Overload(job).reslotted(point)
    elif max_gpus is None and not job.spare:
        reasons = (not_found_words(job),)
    if job.spare and not reasons and not nearest.queueing and not nearest.starving:
        reasons = ("The goal breaks when a GPU is lost. What would help: a wider --slo, or --spare 0.",)
    return finished(job, replace(nearest.plan, reasons=(*reasons, *traded)), nearest, holds=False)


def _at_given_rates(job: Frontier, max_gpus: int | None) -> FrontierPoint | None:
    """The point on all GPUs at hand whose plan keeps the goal at the rates as given, without the margin; None if a plan
    of the search does, or none is found."""
    kept, tried = job.kept, bool(job.margin) and not (job.replayed or job.over())
    if not tried or any(kept.holds_in(each.plan.bins, kept.given) for each in job.points):
        return None
    plain = replace(job, margin=0.0, known=job.hours, stop=job.over, time_limit_s=None)
    found = plain.at(plain.most(max_gpus))
    return job.put(found.plan.bins) if found.holds else None


def _traded(job: Frontier, point: FrontierPoint) -> list[str]:
    """A sentence on the requests within limits that a plan gives up for answers to more adapters; [] for few."""
    share, silent = Overload(job).with_few_slots(point)
    own, more = point.slo_attainment, silent - len(_silent(point))
    if more <= 0 or not share - own > TRADED:
        return []
    would = f"with fewer slots {share:.1%} would be, and these adapters would get none"
    return [f"Answers to {counted(more, 'adapter')} cost requests within limits: {own:.1%} are, {would}."]


def _enough(job: Frontier, servers: int) -> str:
    """How many GPUs suffice, or that fresh hours break the goal on them, in words."""
    gpus = servers * job.size
    if not job.replayed and job.kept.broken_later(job.at(servers).plan.bins):
        said = f"{gpus} GPUs keep the goal in one hour and break it in another, so that more may be needed"
        return f"{said}: without --gpus and --available the search goes on."
    return f"{gpus} GPUs keep the goal: --gpus {gpus}, or --available {gpus}."


def finished(job: Frontier, plan: Plan, point: FrontierPoint, *, holds: bool) -> tuple[Plan, str]:
    """The plan with its status, reasons and frontier, and the text of the decision that follows the servers."""
    which = (
        ("starve", "or do not start", point.starving),
        ("break", f"the goal{_raised(point, job.workload.slo)}", () if holds else point.queueing),
    )
    broken = [_listed([k + job.before for k in gpus], verb, rest) for verb, rest, gpus in which if gpus]
    points = [replace(each, n_gpus=each.plan.n_gpus) for each in job.points]
    later = job.broken if plan.verified is False else ()
    servers = weaker_goals(job, point)
    weaker = {goal: count * job.size for goal, count in servers.items()}
    told = outcome(
        replace(point, n_gpus=point.plan.n_gpus), points, plan.rooms, job.workload.slo,
        breaking=None if holds else job.kept.breaking(point.plan.bins, later), reachable=not job.hopeless,
        limited=job.hopeless and not cannot_words(job) and bool(more_parts(job)), spare=job.spare,
        needed=(plan.lower_bound or 0.0) - job.spare * job.size if plan.bound_proven else 0.0,
        why=lambda fewer: "" if job.over() else late_words(job.kept, fewer), cut=many_cut(point.plan),
    )  # fmt: skip
    shown = tuple(each.to_dict() for each in points if not each.starving)
    plan = replace(
        plan,
        status=plan.status if holds else Status.INFEASIBLE,
        objective="recommend",
        reasons=(
            *plan.reasons,
            *beyond_measured(plan.workload, plan.bins, job.before)[:8],
            *broken,
            *([f"Adapters without an answer: {listed(silent)}"] if (silent := _silent(point)) and not holds else []),
            *(start_words(job.kept, point.plan.bins, job.number) if holds and not job.over() else ()),
            *((REPLAYED,) if job.replayed else ()),
        ),
        runtime_s=job.elapsed_s(),
        interrupted=job.stop(),
        time_limit_reached=job.over() and not job.stop(),
        limits=WHOLE_GOAL,
        frontier=shown,
        statistics={**plan.statistics, "weaker_goals": weaker},
    )
    more = (
        weaker_words(weaker, job.size, by_splits(job, servers)), version_words(weaker, job.profile),
        context_words(job.workload, job.profile, plan.bins),
    )  # fmt: skip
    return plan, "\n".join([told, *filter(None, more)])


def outcome(
    best: FrontierPoint, points: Sequence[FrontierPoint], rooms: Sequence[Room], slo: Goal, *,
    breaking: int | None, reachable: bool = True, limited: bool = False, spare: int = 0, needed: float = 0.0,
    why: Callable[[FrontierPoint], str] = lambda _point: "", cut: str = "",
) -> str:  # fmt: skip
    """The text of a decision: a line that follows the servers' names and says whether the goal holds, then what they
    give.

    `breaking`: adapters beyond their limits, None if the goal is kept; `reachable`: whether some number of GPUs keeps
    it; `limited`: whether it would with more parts of an adapter; `spare`: GPUs that may be lost; `needed`: proven
    lower bound on GPUs; `why`: says what breaks a point's goal; `cut`: that many requests are too long, in words.
    """
    price = "" if best.price_per_hour is None else f", {money(best.price_per_hour)} per hour"
    raised = _raised(best, slo)
    said = holding(rooms) if breaking is None else _breaking(best, breaking, spare, raised, why)
    lines = [f"the goal {said}{cut}{price}."]
    if math.isnan(best.p95_ttft_ms):
        lines.append("No request completed in the simulated hour.")
    else:
        worst, rows = f", worst adapter {_worst(best)}", best.plan.evaluations
        worst = worst if len(best.plan.workload) > 1 else ""
        served = rows.total_token_throughput.sum() / rows.offered_tok_s.sum()
        text = f"{f'{served:.0%} of the load is served: ' if best.starving else ''}TTFT p95"
        itl = "" if math.isnan(best.mean_itl_ms) else f", ITL {best.mean_itl_ms:.0f} ms"
        lines.append(f"{text} {latency(best.p95_ttft_ms)}{worst}{itl}.")
    if breaking is not None:
        parts = " with so few parts of an adapter" if limited else ""
        goal = "every server serves its load, with no latency limits" if slo.is_none else slo
        lines.append(f"The goal: {goal}.{'' if reachable else f' No number of GPUs keeps it{parts}.'}")
    elif spare:
        lines.append("When any GPU is lost, the goal is kept at the rates as given.")
    fewer = [point for point in points if point.n_gpus < best.n_gpus]
    if serving := [point for point in fewer if not point.starving and point.p95_ttft_ms >= 0.0]:
        lines.append(f"{_shortcoming(serving[-1], slo, spare, why)}.")
    if starving := [point.n_gpus for point in fewer if point.starving]:
        most = starving[-1]
        gpus = counted(most, "GPU")
        starves = f"{gpus} starve{'s' if most == 1 else ''}."
        does = "serves the load" if breaking is not None or serving else "keeps the goal"
        lines.append(starves if most < needed else f"On {gpus} no plan was found that {does}.")
    return "\n".join(lines)


def _raised(point: FrontierPoint, slo: Goal) -> str:
    """Words that follow "breaks the goal" if it is kept at the rates as given and the margin breaks it; else ""."""
    if point.holds or point.broken_later or point.plan.adapters is None or not slo.of_adapters:
        return ""
    within = float((point.plan.adapters.slo_used <= 1.0).mean())
    return " with rates raised by the margin" if within >= slo.adapter_share - 1e-9 else ""


def _breaking(point: FrontierPoint, breaking: int, spare: int, raised: str, why: Callable[[FrontierPoint], str]) -> str:
    """How many adapters break the goal, or when it breaks, in words; and why, if only the margin or a further hour
    breaks it. `raised`: see `_raised`."""
    none = len(_silent(point))
    silent = f" ({counted(none, 'adapter')} without an answer)" if none else ""
    if breaking and not point.plan.workload.slo.is_none:
        when = " in another hour" if point.broken_later else raised
        reason = why(point) if when else ""
        return f"breaks for {breaking:,} of {counted(len(point.plan.workload), 'adapter')}{when}{reason}{silent}"
    slo = point.plan.workload.slo
    failing = point.queueing if slo.keys("server") else (*point.starving, *point.queueing) if slo.is_none else ()
    servers = f" on {counted(len(failing), 'server')}" if failing else ""
    what = _requests(point, slo) or servers or (" when a GPU is lost" if spare else " in some hours")
    return f"breaks{what}{silent}"


def _silent(point: FrontierPoint) -> list[str]:
    """Names of the adapters that sent requests and got no answer."""
    found = point.plan.adapters
    return [] if found is None else [point.plan.workload.names[i] for i in np.flatnonzero(found.silent)]


def _worst(point: FrontierPoint) -> str:
    """The highest p95 TTFT of an adapter; in words, if an adapter gets no answer or too few for one."""
    found = point.plan.adapters
    unknown = np.zeros(0, dtype=np.bool_) if found is None else np.isnan(found.p95_ttft_ms)
    few = math.isnan(point.worst_adapter_ttft_ms) and unknown.any() and not _silent(point)
    return "with too few answers" if few else latency(point.worst_adapter_ttft_ms)


def _shortcoming(point: FrontierPoint, slo: Goal, spare: int, why: Callable[[FrontierPoint], str]) -> str:
    """Why a number of GPUs on which nothing starves is not enough, in a sentence."""
    adapters = point.plan.adapters
    ttft_ms, itl_ms = slo.columns(point.plan.workload)
    worst = point.plan.workload.names.index(point.worst_adapter)
    gpus, one = counted(point.n_gpus, "GPU"), point.n_gpus == 1
    breaks = f"{gpus} break{'s' if one else ''} the goal"
    ttft = f"p95 TTFT {latency(point.worst_adapter_ttft_ms)}"
    if adapters is not None and (few := int(np.isnan(adapters.p95_ttft_ms).sum())):
        ttft = f"{few:,} of {counted(len(adapters.p95_ttft_ms), 'adapter')} get{'s' * (few == 1)} no or too few answers"
    most_ms = max(slo.limits.p95_ttft_ms, ttft_ms[worst])
    if not point.worst_adapter_ttft_ms <= most_ms:  # NaN without an answer
        return f"{breaks}: {ttft}"
    if point.holds or adapters is None:
        return f"{gpus} serve{'s' if one else ''} it with {ttft}"
    if point.broken_later:
        return f"{breaks} in another hour{why(point)}"
    if spare and not point.queueing:
        return f"{breaks} when a GPU is lost"
    late, slow = adapters.p95_ttft_ms > ttft_ms, adapters.mean_itl_ms > itl_ms
    if slow.any() and not late.any():
        return f"{breaks}: ITL up to {adapters.mean_itl_ms[slow].max():.0f} ms"
    of_limits = late | slow if slo.of_adapters else np.zeros(len(late), dtype=np.bool_)
    if beyond := int((of_limits | (adapters.slo_used > 1.0)).sum()):
        return f"{breaks} of {beyond:,} of {len(late):,} adapters{why(point)}"
    if requests := _requests(point, slo):
        return f"{breaks}{requests}"
    return f"{breaks}{_raised(point, slo)}{why(point)}"


def _requests(point: FrontierPoint, slo: Goal) -> str:
    """Words that follow "breaks the goal" if too many requests are beyond limits of requests; else ""."""
    late = 1.0 - point.slo_attainment
    return f" for {late:.1%} of the requests" if slo.keys("request") and late > 1.0 - slo.request_share else ""


def _listed(gpus: Sequence[int], verb: str, rest: str) -> str:
    """Which servers `verb` `rest`, in one line."""
    if len(gpus) == 1:
        return f"server {gpus[0]} {verb}s {rest.replace('do not', 'does not')}"
    return f"servers {listed(gpus)} {verb} {rest}"
