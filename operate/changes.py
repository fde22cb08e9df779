"""A running plan under a changed fleet, without a new plan: other rates, adapters gone or added, servers lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import InfeasibleError, UnknownNameError, ValidationError, shown
from packer.failover import placed, without_server
from packer.goal import Goal
from packer.moves import going_on, moves_of
from packer.plan import Moves, Plan
from packer.words import counted
from packer.workload import Workload


@dataclass(frozen=True)
class Changed:
    """The running servers with the changed fleet; `gpus`: each bin's index in the plan; `unplaced`: by name."""

    workload: Workload
    bins: tuple[Bin, ...]
    gpus: tuple[int, ...]
    unplaced: tuple[str, ...]


def changed_plan(
    plan: Plan, *, rate_factor: float = 1.0, add: Sequence[Adapter] = (), remove: Collection[str] = (),
    lose: Collection[int] = (),
) -> Changed:  # fmt: skip
    """The plan's servers after rates change, adapters are added or removed, and servers are lost.

    Servers keep their `max_loras` and `max_lora_rank`. A new adapter, or one whose only server is lost, goes where
    `packer.failover.placed` says. The other replicas of an adapter take over what a lost replica served.

    Raises `ValidationError`: a lost server is not one of the plan's; `InfeasibleError`: none is left; others as
    `changed_fleet`.
    """
    fleet, add, remove, lose = plan.workload, tuple(add), tuple(remove), tuple(lose)
    bins, numbers, lost = _surviving(plan, lose)
    workload, kept = changed_fleet(fleet, rate_factor=rate_factor, add=add, remove=remove)
    position = {old: new for new, old in enumerate(kept)}
    left = [(gpu, item.renumbered(position)) for gpu, item in enumerate(bins)]
    kept_bins = [(gpu, item) for gpu, item in left if item is not None]
    newcomers = range(len(kept), len(workload))
    found, unplaced = placed(workload, [item for _, item in kept_bins], newcomers)
    names = (*(fleet.names[i] for i in lost if i in position), *(workload.names[i] for i in unplaced))
    return Changed(workload, found, tuple(numbers[gpu] for gpu, _ in kept_bins), names)


def changed_fleet(
    fleet: Workload, *, rate_factor: float = 1.0, add: Sequence[Adapter] = (), remove: Collection[str] = ()
) -> tuple[Workload, list[int]]:
    """The fleet with other rates, without some adapters and with new ones, and the indices of the adapters that stay.

    `rate_factor`: factor for every rate, also for those of new adapters; idle ones stay idle.

    Raises `UnknownNameError`: an adapter to remove is not in the fleet; `ValidationError`: an adapter to add is there
    already, none is left, or adapters are added to a replayed trace.
    """
    known, gone = set(fleet.names), set(remove)
    for name in remove:
        if name not in known:
            raise UnknownNameError("adapter", name, fleet.names)
    for adapter in add:
        if adapter.name in known and adapter.name not in gone:
            raise ValidationError(f"Expected new adapters, got {shown(adapter.name)}, which the fleet has already.")
    kept = [i for i, name in enumerate(fleet.names) if name not in gone]
    adapters = [*(fleet.adapters[i] for i in kept), *add]
    if not adapters:
        raise ValidationError("Expected at least one adapter to be left.")
    if fleet.arrivals.trace is not None and add:
        rule = f"Expected no adapters to add, got {len(add)}: the requests of a trace are replayed,"
        raise ValidationError(f"{rule} and it has none of theirs.")
    if len(kept) < len(fleet):
        fleet = fleet.subset(kept) if kept else fleet
    found = replace(fleet, adapters=tuple(adapters)) if add else fleet
    return found if rate_factor == 1.0 else found.scaled(rate_factor), kept


def with_goal(fleet: Workload, running: Plan) -> Workload:
    """The fleet, with the goal of the running plan unless it has one of its own."""
    return fleet if fleet.slo != Goal() else replace(fleet, slo=running.workload.slo)


def _surviving(plan: Plan, lose: Collection[int]) -> tuple[tuple[Bin, ...], list[int], list[int]]:
    """The bins that are left, their numbers in the plan, and the adapters that none of them can hold."""
    bins, numbers = plan.bins, list(range(len(plan.bins)))
    unplaced: list[int] = []
    if wrong := sorted(server for server in lose if not 0 <= server < len(bins)):
        raise ValidationError(f"Expected lost servers among 0 to {len(bins) - 1}, got server {wrong[0]}.")
    if lose and len(set(lose)) == len(bins):
        raise InfeasibleError(f"The plan does not hold without its {counted(len(bins), 'server')}: none is left.")
    for server in sorted(set(lose), reverse=True):
        bins, more = without_server(plan.workload, bins, server)
        numbers.remove(server)
        unplaced += more
    return bins, numbers, unplaced


def between(old: Plan, new: Plan) -> Moves:
    """Moves from one plan to another on running servers, matched by adapters' names to move few, and by model, GPU and
    engine: a server goes on under another name of its profile, and after a calibration."""
    profiles = dict.fromkeys(item.profile for item in new.bins)

    def as_now(item: Bin) -> Bin:
        own = item.profile
        alike = [each for each in profiles if (each.model.name, each.gpu.name) == (own.model.name, own.gpu.name)]
        now = next((each for each in alike if each.engine == own.engine), own)
        return item if own in profiles else replace(item, profile=now)

    left = going_on(old, new.workload)
    found, numbers = moves_of([*map(as_now, left.values())], new.bins), tuple(left)
    return replace(found, servers=tuple(None if k is None else numbers[k] for k in found.servers))
