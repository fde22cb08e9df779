"""How the error of estimated profiles changes the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from packer.plan import Plan, Status
from packer.profile import Profile
from packer.twin.margin import BAND_KEYS
from packer.workload import Workload


def capacity_band(profiles: Sequence[Profile]) -> tuple[float, float] | None:
    """The range of real / estimated capacity that covers all estimated profiles; None without such a profile."""
    low, high = BAND_KEYS
    known = [
        (each.errors[low], each.errors[high])
        for each in profiles
        if not each.calibrated and low in each.errors and high in each.errors
    ]
    return (min(a for a, _ in known), max(b for _, b in known)) if known else None


def with_band(plan: Plan, again: Callable[[Workload], Plan | None]) -> Plan:
    """The plan with its `estimate_band`: GPUs and objective at both ends of the capacities that are likely. A server of
    c times the estimated capacity serves what an estimated one serves at 1 / c of the rates. `again` makes the plan at
    such rates, None if there is none. The given plan also counts if its margin covers the rates. If these are no lower
    than its own, none other is made: its rates would be raised by the margin a second time."""
    band = capacity_band([item.profile for item in plan.bins])
    broken = plan.status is Status.INFEASIBLE or plan.verified is False
    if band is None or plan.workload.arrivals.trace is not None or broken:
        return plan
    ends = {}
    for name, capacity in zip(("most", "fewest"), band, strict=True):
        held = [plan] if (1.0 + (plan.margin or 0.0)) * capacity >= 0.99 else []  # both are rounded
        found = None if held and capacity <= 1.0 else again(plan.workload.scaled(1.0 / capacity))
        held += [] if found is None or found.status is Status.INFEASIBLE else [found]
        whole = min(held, key=lambda each: (each.objective_value[:1], each.n_gpus), default=None)
        ends[name] = {
            "capacity": capacity,
            "gpus": None if whole is None else whole.n_gpus,
            "objective_value": whole.objective_value[0] if whole and whole.objective_value else None,
        }
    return replace(plan, estimate_band=ends)
