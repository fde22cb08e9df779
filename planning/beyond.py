"""Plans for a fleet with adapters that keep the goal on no number of GPUs: these are apart, and all others keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

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
    of `max_gpus`; and these others. Nothing if all adapters keep the goal on some number of GPUs, or none does, if GPUs
    or time do not suffice, or if a GPU may be lost."""
    fleet = job.workload
    light = {int(each.argmin()) for each in (fleet.offered_tok_s_by_adapter, fleet.mean_input_tokens)}
    look = not job.spare and not job.over() and any(job.kept.holds_one(part(fleet, job.profile, i, 1)) for i in light)
    found = needed(job.kept, job.profile, job.max_replicas, every=True) if look else {}
    late = {i for i, parts in found.items() if parts is None}
    while 0 < len(late) < len(fleet) and not job.over() and (max_gpus is None or max_gpus >= 2 * job.size):
        rest = [i for i in range(len(fleet)) if i not in late]
        slo = replace(fleet.slo, adapter_share=min(1.0, job.kept.required / len(rest)))
        task = _task(job, rest, slo, None if max_gpus is None else max_gpus - job.size)
        if task.job.hopeless:  # an adapter that holds whole does not speak for all that come later in the order
            late |= {rest[i] for i in task.job.parts.too_hot}
            continue
        if (plan := judged(task)) is None:
            break
        others = tuple(sorted(late))
        own = _served(job, others, None if max_gpus is None else max_gpus - plan.n_gpus)
        return [item.under(rest) for item in plan.bins] + [item.under(others) for item in own], others
    return [], ()


def _served(job: Frontier, late: Sequence[int], max_gpus: int | None) -> Sequence[Bin]:
    """The fewest servers that serve these adapters, however late; if none do, the best plan on all of `max_gpus`."""
    task = _task(job, late, "none", max_gpus)
    plan = judged(task)
    return Overload(task.job).at(task.job.most(max_gpus)).plan.bins if plan is None else plan.bins


def _task(job: Frontier, own: Sequence[int], slo: GoalLike | None, max_gpus: int | None) -> Deployment:
    """The search for the fewest servers for a part of the fleet, on at most `max_gpus`."""
    from packer.planning.recommend import Deployment

    fleet = job.workload.subset(own).held_to(slo)
    return Deployment(replace(job, workload=fleet, log_hour=None, time_limit_s=limit_of(job.remaining_s())), max_gpus)
