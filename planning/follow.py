"""Plans that stay close to running servers: as they run with newcomers placed, repaired, or with some closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from packer import checks
from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.errors import IncompatibleError
from packer.plan import Plan, Status
from packer.profile import Profile
from packer.search import fewest
from packer.solvers.candidates import candidates_of
from packer.words import counted
from packer.workload import Workload


def running(old: Plan, workload: Workload) -> tuple[Bin, ...]:
    """The old plan's servers in indices of the new workload; adapters that are gone are left out."""
    checks.instance("old_plan", old, Plan, "packer.load_plan(FILE)")
    if not old.bins:
        raise IncompatibleError(
            "The running plan has no GPUs, so that there is nothing to keep: plan without it."
        )
    number = {name: i for i, name in enumerate(workload.names)}
    now = {i: number[name] for i, name in enumerate(old.workload.names) if name in number}
    return tuple(kept for item in old.bins if (kept := item.renumbered(now)) is not None)


def gpus_words(plan: Plan) -> str:
    """How many GPUs the plan has, and how many adapters it moves on running ones."""
    holds = "" if plan.status is Status.INFEASIBLE else " holds" if plan.n_gpus == 1 else " hold"
    moved = 0 if plan.moves is None else len(plan.moves.adapters)
    return f"{counted(plan.n_gpus, 'GPU')}{holds}, {moved} moved"


def nearby(
    fleet: Workload, old: Sequence[Bin], servers: int, holds: Callable[[Bin], bool]
) -> Iterator[list[Bin]]:
    """The running servers with newcomers placed; then without the fewest adapters that make each one hold.

    On at most so many servers: those with the least load are closed, and further ones are opened for what has no place.
    Nothing where a closed one has a share of an adapter.
    """
    falling = sorted(old, key=lambda item: -item.offered_tok_s(fleet))
    kept = [item for item in old if any(item is each for each in falling[:servers])]
    if len(kept) < len(old) and any(item.is_split for item in old):
        return
    yield (full := _placed(fleet, kept, len(kept)))
    lighter = [_lighter(fleet, item, holds) for item in (full if len(kept) == servers else kept)]
    yield _placed(fleet, lighter, servers)


def _lighter(fleet: Workload, item: Bin, holds: Callable[[Bin], bool]) -> Bin:
    """A server without the fewest adapters, the heaviest first, with which it does not hold; as it is if none helps."""
    falling = sorted(item.adapters, key=lambda i: -fleet.offered_tok_s_by_adapter[i])

    def without(n: int) -> Bin:
        return item.renumbered(dict(zip(falling[n:], falling[n:], strict=True))) or item

    most = 0 if item.is_split else len(falling) - 1
    return without(fewest(lambda n: holds(without(n)), 0, most) or 0)


def _placed(fleet: Workload, bins: Sequence[Bin], servers: int) -> list[Bin]:
    """The servers with all adapters that none of them has, the heaviest first, each on the one with the least load."""
    loads = [item.offered_tok_s(fleet) for item in bins] + [0.0] * (servers - len(bins))
    more: list[list[int]] = [[] for _ in loads]
    here = {i for item in bins for i in item.adapters}
    own = fleet.offered_tok_s_by_adapter
    for i in sorted({*range(len(fleet))} - here, key=lambda i: (-own[i], i)):
        k = loads.index(min(loads))
        more[k].append(i)
        loads[k] += float(own[i])
    profile = bins[0].profile
    made = [_with(fleet, item, some) for item, some in zip(bins, more, strict=False)]
    return made + [_with(fleet, None, some, profile) for some in more[len(bins) :] if some]


def _with(fleet: Workload, item: Bin | None, more: Sequence[int], profile: Profile | None = None) -> Bin:
    """A server, or a new one of the profile, with more adapters; with slots for all if it had them for all."""
    if item is None:
        assert profile is not None
        item = Bin((more[0],), profile.settings(1, slot_rank_for(fleet.adapters[more[0]].rank)), profile)
        more = more[1:]
    rank = max(
        item.max_lora_rank, *(slot_rank_for(fleet.adapters[i].rank) for i in (*more, item.adapters[0]))
    )
    adapters = (*item.adapters, *more)
    made = Bin(adapters, item.profile.settings(1, rank), item.profile, item.shares + (1.0,) * len(more))
    slots = len(adapters) if item.max_loras >= len(item.adapters) else item.max_loras
    return made.with_slots(min(slots, candidates_of(made)[-1]))
