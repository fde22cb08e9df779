"""Reassignment of adapters when a server is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from packer.bin import Bin
from packer.gpu import serves
from packer.workload import Workload


def without_server(workload: Workload, bins: Sequence[Bin], lost: int) -> tuple[tuple[Bin, ...], tuple[int, ...]]:
    """The remaining bins, in order, with the adapters of the lost bin; and the adapters that fit on none of them. The
    share of a lost replica is divided among the adapter's other replicas in proportion to their shares. An adapter
    without another replica is placed anew (`placed`)."""
    left = [item for k, item in enumerate(bins) if k != lost]
    shares = [dict(zip(item.adapters, item.shares, strict=True)) for item in left]
    whole: list[int] = []
    for i, share in zip(bins[lost].adapters, bins[lost].shares, strict=True):
        holding = [own for own in shares if i in own]
        if not holding:
            whole.append(i)
        for own in holding:
            own[i] = min(1.0, own[i] / (1.0 - share))
    moved = [
        item if dict(zip(item.adapters, item.shares, strict=True)) == own else _with(item, own)
        for item, own in zip(left, shares, strict=True)
    ]
    return placed(workload, moved, whole)


def placed(workload: Workload, bins: Sequence[Bin], adapters: Sequence[int]) -> tuple[tuple[Bin, ...], tuple[int, ...]]:
    """The bins with `adapters` added, and the adapters that fit on none of them. Each adapter goes to the server of its
    base model with the least offered load whose slots are large enough and whose tightest limits are nearest to its own
    (`nearness`); adapters with the largest load are placed first."""
    found = list(bins)
    loads = [item.offered_tok_s(workload) for item in found]
    order = workload.slo.order(workload).tolist()
    kinds = [{order[i] for i in item.adapters} for item in found]
    added: list[dict[int, float]] = [{} for _ in found]
    unplaced = []
    for i in sorted(adapters, key=lambda i: (-float(workload.offered_tok_s_by_adapter[i]), i)):
        adapter = workload.adapters[i]
        large = [k for k, item in enumerate(found) if item.max_lora_rank >= adapter.rank]
        model = adapter.model
        hosts = [k for k in large if model is None or serves(found[k].profile.model, model)]
        if not hosts:
            unplaced.append(i)
            continue
        best = min(hosts, key=lambda k: (*nearness(order[i], kinds[k]), loads[k]))
        loads[best] += float(workload.offered_tok_s_by_adapter[i])
        added[best][i] = 1.0
    for k, more in enumerate(added):
        if more:
            found[k] = _with(found[k], dict(zip(found[k].adapters, found[k].shares, strict=True)) | more)
    return tuple(found), tuple(unplaced)


def nearness(own: int, kinds: Set[int]) -> tuple[bool, int]:
    """Sort key of servers for an adapter, the best first: with limits like its own or the next tighter ones, so that
    its limits are kept and those of others stay as wide; then the next wider ones.

    `own`, `kinds`: places of the adapter's limits, and of those on the server before any adapter is placed, in the
    order `packer.Goal.order`; the first one placed does not attract the others.
    """
    tightest = min(kinds, default=own)
    return tightest > own, abs(tightest - own)


def _with(item: Bin, shares: dict[int, float]) -> Bin:
    return replace(item, adapters=tuple(shares), shares=tuple(shares.values()))


def with_slots_for_loss(
    workload: Workload, bins: Sequence[Bin], slotted: Callable[[Sequence[Bin]], Sequence[Bin] | None]
) -> list[Bin] | None:
    """The bins with enough slots for the loss of any other bin; None if an adapter then fits nowhere. `slotted`: gives
    the remaining bins the slots that they need; None if no number of slots is enough."""
    slots = [item.max_loras for item in bins]
    # The loss of the most loaded server is the first that is too much for the others.
    for lost in sorted(range(len(bins)), key=lambda k: -bins[k].offered_tok_s(workload)):
        left, unplaced = without_server(workload, bins, lost)
        made = None if unplaced else slotted(left)
        if made is None:
            return None
        for k, item in zip((k for k in range(len(bins)) if k != lost), made, strict=True):
            slots[k] = max(slots[k], item.max_loras)
    return [item.with_slots(most) for item, most in zip(bins, slots, strict=True)]
