"""Consistency checks of plan files, because plans are deployed and files may be edited by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from packer.errors import shown
from packer.evaluation import FIGURES, FLAGS
from packer.fingerprint import fingerprint
from packer.plan import Plan, Status
from packer.twin.memory.policy import memory_error
from packer.words import listed


def content(plan: Plan) -> str:
    """Fingerprint of what the evaluations refer to: the workload and the servers."""
    bins = [(item.adapters, item.settings, item.shares, item.profile.fingerprint) for item in plan.bins]
    return fingerprint(workload=plan.workload.fingerprint, bins=bins)


def disagreements(plan: Plan) -> Iterator[tuple[str, str]]:
    """Contradictions in a plan, as (key, sentence)."""
    for k, item in enumerate(plan.bins):
        error = memory_error(item.profile, item.settings)
        if error is not None and not plan.evaluations[k].memory_error:
            yield f"gpus.{k}", f"its evaluation says that it starts, but {error}"
    for key in ("headroom", "moves.servers"):
        found = plan.headroom if key == "headroom" else plan.moves.servers if plan.moves else ()
        if found and len(found) != len(plan.bins):
            yield key, f"expected an entry for each of the {len(plan.bins)} servers, got {len(found)}"
    yield from _status(plan)
    yield from _negative(plan)
    known = [key for key in plan.versions if key.startswith("profile ")]
    for profile in dict.fromkeys(item.profile for item in plan.bins):
        own = f"profile {profile.name}"  # several profiles of one name have numbers behind it
        noted = [plan.versions[key] for key in known if key == own or key.startswith(f"{own} (")]
        if known and not noted:
            rule = f"expected one that the plan was made for ({listed(known)})"
            yield "profiles", f"{rule}, got {shown(profile.name)}"
        elif known and profile.fingerprint not in noted:
            rule = f"expected the profile {profile.name!r} that the plan was made for, {listed(noted)}"
            yield "profiles", f"{rule}, got {profile.fingerprint}"


def _negative(plan: Plan) -> Iterator[tuple[str, str]]:
    """Figures below 0, which are invalid; but a server that does not start lacks memory for its KV cache."""
    for name in FIGURES:
        column = getattr(plan.evaluations, name)
        starts = ~plan.evaluations.memory_error if name == "kv_cache_tokens" else True
        for k in np.flatnonzero((column < 0) & starts).tolist() if name not in FLAGS else ():
            yield f"gpus.{k}.evaluation.{name}", f"expected a figure >= 0, got {column[k]:g}"
    for name, column in (plan.adapters._asdict() if plan.adapters else {}).items():
        for i in np.flatnonzero(column < 0).tolist():
            yield f"adapters.{name}", f"expected figures >= 0, got {column[i]:g}"


def _status(plan: Plan) -> Iterator[tuple[str, str]]:
    """Contradictions between status, evaluations and bound."""
    failing = [k for k, row in enumerate(plan.evaluations) if not row.feasible]
    infeasible = plan.status is Status.INFEASIBLE
    if infeasible and not (failing or plan.unplaced or plan.reasons):
        yield "status", "an infeasible plan has a server that fails, an unplaced adapter or a reason"
    if not infeasible and failing:
        yield "status", f"expected 'infeasible', as server {failing[0]} fails, got {plan.status.value!r}"
    if not infeasible and plan.unplaced:
        yield "status", f"expected 'infeasible' with unplaced adapters, got {plan.status.value!r}"
    if plan.status is Status.OPTIMAL and not (plan.bound_proven and plan.gap is not None and plan.gap < 1e-6):
        yield "status", "an optimal plan attains a proven lower bound"
    if plan.bound_proven and plan.lower_bound is None:
        yield "bound_proven", "there is no lower bound"
    value, bound = next(iter(plan.objective_value), math.inf), plan.lower_bound
    if plan.bound_proven and not infeasible and bound is not None and value < bound - 1e-6:
        yield "lower_bound", f"expected at most {value:g}, the value, got {bound:g}"
