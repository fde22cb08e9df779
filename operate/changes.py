"""A running plan under a changed fleet, without a new plan: other rates, adapters gone, adapters added."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import UnknownNameError, ValidationError, shown
from packer.plan import Plan
from packer.workload import Workload


@dataclass(frozen=True)
class Changed:
    """The servers as they run, with the changed fleet.

    `gpus`: the plan's index of each bin (a server without adapters is left out); `unplaced`: names of added
    adapters that no running server can hold.
    """

    workload: Workload
    bins: tuple[Bin, ...]
    gpus: tuple[int, ...]
    unplaced: tuple[str, ...]


def changed_plan(
    plan: Plan, *, rate_factor: float = 1.0, add: Sequence[Adapter] = (), remove: Collection[str] = ()
) -> Changed:
    """The plan's servers when rates change, adapters go and others come.

    Servers keep their `max_loras` and `max_lora_rank`. A new adapter goes to the server with the least
    offered load whose slots are large enough, the busiest adapter first.

    Raises
    ------
    UnknownNameError
        An adapter to remove is not in the plan.
    ValidationError
        An adapter to add is there already, or none is left.
    """
    fleet = plan.workload
    for name in remove:
        if name not in fleet.names:
            raise UnknownNameError("adapter", name, fleet.names)
    for adapter in add:
        if adapter.name in fleet.names and adapter.name not in remove:
            raise ValidationError(
                f"Expected new adapters, got {shown(adapter.name)}, which the plan has already."
            )
    kept = [i for i, name in enumerate(fleet.names) if name not in remove]
    adapters = [*(fleet.adapters[i] for i in kept), *add]
    if not adapters:
        raise ValidationError("Expected at least one adapter to be left.")
    if fleet.arrivals.trace is not None and add:
        raise ValidationError(
            f"Expected no adapters to add, got {len(add)}: the plan replays a trace, which has no requests of theirs."
        )
    workload = replace(fleet.subset(kept) if kept else fleet, adapters=tuple(adapters))
    if rate_factor != 1.0:
        workload = workload.scaled(rate_factor)
    position = {old: new for new, old in enumerate(kept)}
    bins = [
        (gpu, left) for gpu, item in enumerate(plan.bins) if (left := _without(item, position)) is not None
    ]
    unplaced = []
    newcomers = range(len(kept), len(adapters))
    for i in sorted(newcomers, key=lambda i: (-float(workload.offered_tok_s_by_adapter[i]), i)):
        hosts = [k for k, (_, item) in enumerate(bins) if item.max_lora_rank >= workload.adapters[i].rank]
        if not hosts:
            unplaced.append(workload.names[i])
            continue
        best = min(hosts, key=lambda k: bins[k][1].offered_tok_s(workload))
        gpu, item = bins[best]
        bins[best] = (gpu, _with(item, i))
    return Changed(workload, tuple(item for _, item in bins), tuple(gpu for gpu, _ in bins), tuple(unplaced))


def _without(item: Bin, position: dict[int, int]) -> Bin | None:
    """The bin with its adapters under their new indices; None if none is left."""
    left = [
        (position[i], share) for i, share in zip(item.adapters, item.shares, strict=True) if i in position
    ]
    if not left:
        return None
    adapters, shares = zip(*left, strict=True)
    return replace(item, adapters=adapters, shares=shares)


def _with(item: Bin, adapter: int) -> Bin:
    return replace(item, adapters=(*item.adapters, adapter), shares=(*item.shares, 1.0))
