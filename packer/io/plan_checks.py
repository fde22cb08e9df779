"""What a plan file says must agree with itself: a plan is acted on, and files are changed by hand."""

from __future__ import annotations

from collections.abc import Iterator

from packer.fingerprint import fingerprint
from packer.plan import Plan, Status
from packer.twin.memory.policy import memory_error


def content(plan: Plan) -> str:
    """Fingerprint of what the evaluations are of: the workload and the servers."""
    bins = [(item.adapters, item.settings, item.shares, item.profile.fingerprint) for item in plan.bins]
    return fingerprint(workload=plan.workload.fingerprint, bins=bins)


def disagreements(plan: Plan) -> Iterator[tuple[str, str]]:
    """Where a plan contradicts itself: (key, sentence)."""
    for k, item in enumerate(plan.bins):
        error = memory_error(item.profile, item.settings)
        if error is not None and not plan.evaluations[k].memory_error:
            yield f"gpus.{k}", f"its evaluation says that it starts, but {error}"
    for key in ("headroom", "moves.servers"):
        found = plan.headroom if key == "headroom" else plan.moves.servers if plan.moves else ()
        if found and len(found) != len(plan.bins):
            yield key, f"expected an entry for each of the {len(plan.bins)} servers, got {len(found)}"
    yield from _status(plan)
    for profile in dict.fromkeys(item.profile for item in plan.bins):
        noted = plan.versions.get(f"profile {profile.name}", profile.fingerprint)
        if noted != profile.fingerprint:
            rule = f"expected the profile {profile.name!r} that the plan was made for, {noted}"
            yield "profiles", f"{rule}, got {profile.fingerprint}"


def _status(plan: Plan) -> Iterator[tuple[str, str]]:
    """Whether the status is that of the evaluations, and the bound below the value."""
    failing = [k for k, row in enumerate(plan.evaluations) if not row.feasible]
    infeasible = plan.status is Status.INFEASIBLE
    if infeasible and not (failing or plan.unplaced or plan.reasons):
        yield "status", "an infeasible plan has a server that fails, an unplaced adapter or a reason"
    if not infeasible and failing:
        yield "status", f"expected 'infeasible', as GPU {failing[0]} fails, got {plan.status.value!r}"
    if not infeasible and plan.unplaced:
        yield "status", f"expected 'infeasible' with unplaced adapters, got {plan.status.value!r}"
    if plan.status is Status.OPTIMAL and not (plan.bound_proven and plan.gap is not None and plan.gap < 1e-6):
        yield "status", "an optimal plan attains a proven lower bound"
    if plan.bound_proven and plan.lower_bound is None:
        yield "bound_proven", "there is no lower bound"
    value, bound = next(iter(plan.objective_value), None), plan.lower_bound
    if (
        plan.bound_proven
        and not infeasible
        and value is not None
        and bound is not None
        and value < bound - 1e-6
    ):
        yield "lower_bound", f"expected at most {value:g}, the value, got {bound:g}"
