"""The loop that makes every plan: propose, judge, repair, prove, explain.

`solve` (`SolverTask`), `recommend` (`Deployment`) and mixes of kinds (`Mix`) are its tasks. A task has these stages:

`propose`: return the plan that a search finds; None if none serves the fleet.
`rounds`: the maximum number of times that a plan is judged.
`judge`: return the plan, `verified` by the n-th set of fresh hours; not called once the time is over.
`repair`: return another plan to replace one that fresh hours broke; None if there is none.
`near`: return the plan, or another with no more GPUs that is closer to running servers.
`missed`: return the plan to show if none was found, with what would help.
`rooms`: return how far the rates of each server may grow. `holds`: whether a server may be part of the plan.
`widens`: servers whose rates may grow by less than this factor get more slots if that helps.
`changed`: return the plan with other servers; None if it breaks its limits with them.
`prove`: return the plan with a lower bound. `look_around`: compute what else its explanation needs, mostly other plans.
`hardened`: return the plan, or another in its place if busy hours break it too often.
`at_rates`: return the plan of the same task at other rates; None if there is none.
`explain`: return the plan with its status, its reasons and its explanation.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from packer.bin import Bin
from packer.plan import Plan
from packer.planning.band import with_band
from packer.planning.rooms import with_slots
from packer.room import Room

if TYPE_CHECKING:
    from packer.planning.recommend import Deployment
    from packer.planning.solve import SolverTask

    Task: TypeAlias = SolverTask | Deployment
    Rooms: TypeAlias = tuple[Room, ...]


LITTLE = 1.25  # A server that its slots limit gets more of them if its rates may grow by less than this factor.


def judged(task: Task, broken: Plan | None = None) -> Plan | None:
    """The plan that fresh hours confirm, or the last one that they broke; None if no plan was found. `broken`: a plan
    that is repaired first."""
    plan = task.propose() if broken is None else task.repair(broken, 0)
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
    """The plan, or another that is harder to break, with its bound, its room to grow and its explanation."""
    plan = _with_room(task, plan)
    if (other := task.hardened(plan)) is not plan:
        plan = _with_room(task, other)
    return task.explain(with_band(plan, task.at_rates) if task.banded and not task.over() else plan)


def _with_room(task: Task, plan: Plan) -> Plan:
    """The plan with its bound and its room to grow."""
    with ThreadPoolExecutor(2) as pool:
        proof = pool.submit(task.prove, plan)
        grown = pool.submit(_grown, task, plan, proof)
        task.look_around(plan)
        (rooms, bins, more), proven = grown.result(), proof.result()
    plan = replace(proven, rooms=rooms)
    other = None if bins == plan.bins else task.changed(plan, bins)
    return plan if other is None else replace(other, rooms=more)


def _grown(task: Task, plan: Plan, proof: Future[Plan]) -> tuple[Rooms, Sequence[Bin], Rooms]:
    """The room of each server; then the servers, with more slots if they have little room, and the rooms of these.
    Servers with more slots are judged after the proof, which may use the same predictor."""
    rooms = task.rooms(plan)
    bins, more = plan.bins, rooms
    if rooms and task.widens and not task.over():
        proof.result()
        bins, more = with_slots(task.hours, plan.workload, plan.bins, rooms, task.holds, task.widens)
    checked = task.hours.checked(rooms, plan.bins, plan.workload)
    more = checked if bins == plan.bins else task.hours.checked(more, bins, plan.workload)
    return checked, bins, more
