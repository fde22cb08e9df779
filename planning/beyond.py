"""Plans for a fleet with adapters that keep the goal on no number of GPUs: these are apart, and all others keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from packer.bin import Bin
from packer.goal import GoalLike
from packer.planning.chance import HOURS
from packer.planning.loop import judged
from packer.planning.overload import Overload
from packer.planning.replicas import needed, part
from packer.solvers.base import limit_of
from packer.times import HOUR_S
from packer.twin.per_adapter import FEW_REQUESTS

NEAR = 0.8  # An adapter that alone uses more than this share of its limits may break them in another hour.

if TYPE_CHECKING:
    from packer.planning.explore import Frontier
    from packer.planning.recommend import Deployment


def others_kept(job: Frontier, max_gpus: int | None) -> tuple[list[Bin], tuple[int, ...]]:
    """Servers on which enough of the adapters that keep the goal on some number of GPUs keep it, or all of them if that
    is too few, followed by the fewest further servers that serve the other adapters, without a goal, or by those left
    of `max_gpus`; and these others. If GPUs are too few, the former have all but a server. Nothing if all adapters keep
    the goal on some number of GPUs, or none does, or if the time does not suffice."""
    fleet = job.workload
    found = {} if job.over() else needed(job.kept, job.profile, job.max_replicas, every=True)
    late = {i for i, parts in found.items() if parts is None}
    if job.hopeless and not job.over():
        sent = fleet.rates * fleet.arrivals.whole_s(HOUR_S)
        # Limits of adapters with fewer requests are judged on their server: with others, they may keep them.
        many = [i for i in range(len(fleet)) if i not in late and sent[i] >= FEW_REQUESTS]
        late |= _late_alone(job, {i: found.get(i) or 1 for i in many})
    while 0 < len(late) < len(fleet) and not job.over() and (max_gpus is None or max_gpus >= 2 * job.size):
        rest = [i for i in range(len(fleet)) if i not in late]
        slo = replace(fleet.slo, adapter_share=min(1.0, job.kept.required / len(rest)))
        task = _task(job, rest, slo, None if max_gpus is None else max_gpus - job.size, late=False)
        plan = None if task.job.hopeless else judged(task)
        if plan is None and task.job.hopeless and not job.over():
            # Fresh hours break adapters that keep the goal by luck, and one that holds whole does not speak for others.
            more = needed(task.job.kept, job.profile, job.max_replicas, every=True)
            late |= {rest[i] for i, parts in more.items() if parts is None} or {rest[i] for i in task.job.parts.too_hot}
            continue
        if plan is None and (max_gpus is None or job.over()):
            break
        others = tuple(sorted(late))
        kept = _on_all(task) if plan is None else plan.bins
        own = _served(job, others, None if max_gpus is None else max_gpus - sum(item.gpus for item in kept))
        return [item.under(rest) for item in kept] + [item.under(others) for item in own], others
    return [], ()


def _late_alone(job: Frontier, parts: Mapping[int, int]) -> set[int]:
    """The adapters of these, in so many parts, that break the goal on servers of their own, if only in other hours."""
    kept, own = job.kept, [part(job.workload, job.profile, i, n) for i, n in parts.items()]
    used = dict(zip(own, kept.used(own, [kept.planned]), strict=True))
    near = [item for item in own if NEAR < used[item] <= 1.0 and not job.replayed]  # which has no other hour
    used |= zip(near, kept.used(near, [kept.fresh_hour(1 + k) for k in range(HOURS)], [1.0] * len(near)), strict=True)
    return {item.adapters[0] for item, most in used.items() if most > 1.0}


def _served(job: Frontier, late: Sequence[int], max_gpus: int | None) -> Sequence[Bin]:
    """The fewest servers that serve these adapters, however late; if none do, the best plan on all of `max_gpus`."""
    task = _task(job, late, "none", max_gpus, late=True)
    plan = judged(task)
    return _on_all(task) if plan is None else plan.bins


def _on_all(task: Deployment) -> Sequence[Bin]:
    """The best plan on all GPUs at hand, which are too few."""
    return Overload(task.job).at(task.job.most(task.max_gpus)).plan.bins


def _task(job: Frontier, own: Sequence[int], slo: GoalLike, max_gpus: int | None, *, late: bool) -> Deployment:
    """The search for the fewest servers for a part of the fleet, on at most `max_gpus`. `late`: for adapters that break
    the goal anyway: no server takes over from a lost one, and if the goal is lost, too, plans are not verified."""
    from packer.planning.recommend import Deployment

    changed = replace(
        job, workload=job.workload.subset(own).held_to(slo), log_hour=None, time_limit_s=limit_of(job.remaining_s()),
        spare=0 if late else job.spare, verify=job.verify and not (late and job.hopeless),
    )  # fmt: skip
    return Deployment(changed, max_gpus)
