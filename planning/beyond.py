"""Plans for a fleet with adapters that keep the goal on no number of GPUs: these are apart, and all others keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from packer.bin import Bin
from packer.goal import GoalLike
from packer.planning.loop import judged
from packer.planning.overload import Overload
from packer.planning.replicas import needed, part
from packer.solvers.base import limit_of

if TYPE_CHECKING:
    from packer.planning.explore import Frontier
    from packer.planning.recommend import Deployment


def others_kept(job: Frontier, max_gpus: int | None) -> tuple[list[Bin], tuple[int, ...]]:
    """Servers on which enough of the adapters that keep the goal on some number of GPUs keep it, or all of them if that
    is too few, followed by the fewest further servers that serve the other adapters, without a goal, or by those left
    of `max_gpus`; and these others. If GPUs are too few, the former have all but a server. Nothing if all adapters keep
    the goal on some number of GPUs, or none does, or if the time does not suffice."""
    fleet, light = job.workload, set[int]()
    for each in (fleet.offered_tok_s_by_adapter, fleet.mean_input_tokens):
        order = np.argsort(each, kind="stable")[::-1].tolist()
        light |= set({fleet.adapters[i].slo_class: i for i in order}.values())  # the last of each class
    look = not job.over() and any(job.kept.holds_one(part(fleet, job.profile, i, 1)) for i in sorted(light))
    found = needed(job.kept, job.profile, job.max_replicas, every=True) if look else {}
    late = {i for i, parts in found.items() if parts is None}
    while 0 < len(late) < len(fleet) and not job.over() and (max_gpus is None or max_gpus >= 2 * job.size):
        rest = [i for i in range(len(fleet)) if i not in late]
        slo = replace(fleet.slo, adapter_share=min(1.0, job.kept.required / len(rest)))
        task = _task(job, rest, slo, None if max_gpus is None else max_gpus - job.size, late=False)
        if task.job.hopeless:  # an adapter that holds whole does not speak for all that come later in the order
            late |= {rest[i] for i in task.job.parts.too_hot}
            continue
        if (plan := judged(task)) is None and (max_gpus is None or job.over()):
            break
        others = tuple(sorted(late))
        kept = _on_all(task) if plan is None else plan.bins
        own = _served(job, others, None if max_gpus is None else max_gpus - sum(item.gpus for item in kept))
        return [item.under(rest) for item in kept] + [item.under(others) for item in own], others
    return [], ()


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
