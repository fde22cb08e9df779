"""The loop that makes every plan: propose, judge, repair, prove, explain.

`solve` (`SolverTask`), `recommend` (`Deployment`) and mixes of kinds (`Mix`) are its tasks. A task has these stages:

`propose`: return the plan that a search finds; None if none serves the fleet.
`rounds`: the maximum number of times that a plan is judged.
`judge`: return the plan, `verified` by the n-th set of fresh hours; not called once the time is over.
`repair`: return another plan to replace one that fresh hours broke; None if there is none.
`near`: return the plan, or another with no more GPUs that is closer to running servers.
`missed`: return the plan to show if none was found, with what would help.
`rooms`: return how far the rates of each server may grow. `holds`: whether a server may be part of the plan.
`changed`: return the plan with other servers; None if it breaks its limits with them.
`prove`: return the plan with a lower bound. `look_around`: compute what else its explanation needs, mostly other plans.
`at_rates`: return the plan of the same task at other rates; None if there is none.
`explain`: return the plan with its status, its reasons and its explanation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from packer.bin import Bin
from packer.plan import Plan, Status
from packer.planning.rooms import with_slots
from packer.profile import Profile
from packer.room import Room
from packer.twin.margin import BAND_KEYS
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.planning.recommend import Deployment
    from packer.planning.solve import SolverTask

    Task: TypeAlias = SolverTask | Deployment
    Rooms: TypeAlias = tuple[Room, ...]


def judged(task: Task) -> Plan | None:
    """The plan that fresh hours confirm, or the last one that they broke; None if no plan was found."""
    plan = task.propose()
    for number in range(task.rounds):
        if plan is None or plan.verified is not None or task.over():
            break
        plan = task.judge(plan, number)
        if plan.verified is False and number + 1 < task.rounds:
            plan = task.repair(plan, number + 1)
    return plan


def planned(task: Task) -> Plan:
    """The plan of a task, judged, completed and explained."""
    try:
        plan = task.near(judged(task))
        return task.missed() if plan is None else completed(task, plan)
    finally:
        task.hours.forget()


def completed(task: Task, plan: Plan) -> Plan:
    """The plan with its bound, its room to grow and its explanation."""
    with ThreadPoolExecutor(2) as pool:
        proof = pool.submit(task.prove, plan)
        grown = pool.submit(_grown, task, plan, proof)
        task.look_around(plan)
        (rooms, bins, more), proven = grown.result(), proof.result()
    plan = replace(proven, rooms=rooms)
    other = None if bins == plan.bins else task.changed(plan, bins)
    plan = plan if other is None else replace(other, rooms=more)
    return task.explain(with_band(plan, task.at_rates) if task.banded and not task.over() else plan)


def _grown(task: Task, plan: Plan, proof: Future[Plan]) -> tuple[Rooms, Sequence[Bin], Rooms]:
    """The room of each server; then the servers, with more slots if they have little room, and the rooms of these.
    Servers with more slots are judged after the proof, which may use the same predictor."""
    rooms = task.rooms(plan)
    bins, more = plan.bins, rooms
    if rooms and task.widens and not task.over():
        proof.result()
        bins, more = with_slots(task.hours, plan.workload, plan.bins, rooms, task.holds)
    checked = task.hours.checked(rooms, plan.bins, plan.workload)
    more = checked if bins == plan.bins else task.hours.checked(more, bins, plan.workload)
    return checked, bins, more


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
    such rates, None if there is none. The given plan also counts if its margin covers the rates."""
    band = capacity_band([item.profile for item in plan.bins])
    broken = plan.status is Status.INFEASIBLE or plan.verified is False
    if band is None or plan.workload.arrivals.trace is not None or broken:
        return plan
    ends = {}
    for name, capacity in zip(("most", "fewest"), band, strict=True):
        found = again(plan.workload.scaled(1.0 / capacity))
        held = [plan] if (1.0 + (plan.margin or 0.0)) * capacity >= 0.99 else []  # both are rounded
        held += [] if found is None or found.status is Status.INFEASIBLE else [found]
        whole = min(held, key=lambda each: (each.objective_value[:1], each.n_gpus), default=None)
        ends[name] = {
            "capacity": capacity,
            "gpus": None if whole is None else whole.n_gpus,
            "objective_value": whole.objective_value[0] if whole and whole.objective_value else None,
        }
    return replace(plan, estimate_band=ends)
