"""Plans close to the running servers: place new adapters on them, repair those that do not hold, or close some."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import nsmallest
from itertools import product
from types import MappingProxyType
from typing import TypeAlias

from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.errors import IncompatibleError
from packer.moves import as_running, going_on, match, moves_of, restarted
from packer.plan import Plan, Status
from packer.planning.kept import KeptHours
from packer.planning.replicas import MOST_REPLICAS
from packer.planning.settle import with_best_slots
from packer.room import holding
from packer.search import fewest, reach
from packer.solvers.candidates import candidates_of
from packer.solvers.nearest import Nearest, lightest
from packer.twin.arrivals import cut_shares
from packer.words import counted, money
from packer.workload import Workload

MANY_CUT = 0.05  # Share of requests beyond `max_model_len` from which the first line of a decision names it.
REPAIRS = 3  # Maximum rounds of moving adapters from servers that do not hold to servers that do.
HOMEWARD = 6  # Maximum number of times that some of the moved adapters are tried where they ran.
EXCHANGES = 24  # Number of exchanges of two adapters that are tried for a server that does not hold.
COARSE = 40  # With more adapters per server than this, no adapters are exchanged: servers give light ones away instead.
Held: TypeAlias = Mapping[int, float]  # Adapters of a server, with the share of their requests that it gets.


def running(old: Plan, workload: Workload) -> tuple[Bin, ...]:
    """The old plan's servers, with adapters as indices of the new workload; adapters that are gone are left out."""
    if not old.bins:
        raise IncompatibleError("The running plan has no GPUs, so that there is nothing to keep: plan without it.")
    return tuple(going_on(old, workload).values())


def numbered(plan: Plan, old: Plan | None) -> Plan:
    """The plan with `moves.servers` renumbered from `running` to the old plan's server numbers. A feasible plan of a
    solver that does not look at the running servers gets its moves here."""
    if old is None or (plan.moves is None and plan.status is Status.INFEASIBLE):
        return plan
    left = going_on(old, plan.workload)
    moves, numbers = plan.moves or moves_of(tuple(left.values()), plan.bins), tuple(left)
    servers = tuple(None if k is None else numbers[k] for k in moves.servers)
    return replace(plan, moves=replace(moves, servers=servers))


def gpus_words(plan: Plan, old: Plan | None = None) -> str:
    """How many GPUs the plan has, and how many adapters it moves, in words; and how many servers of `old`, the running
    plan, start again with other settings, if any do. GPUs hold that keep limits; others serve their load. Without
    running servers: which servers it has, and whether they keep a goal, up to what load, or serve theirs."""
    if plan.moves is None:
        said = f"the goal {holding(plan.rooms)}" if plan.limits else "the load is served"
        price = "" if plan.price_per_hour is None else f", {money(plan.price_per_hour)} per hour"
        return f"{plan.hardware}: {said}{many_cut(plan)}{price}"
    one, more = ("holds", "hold") if plan.limits else ("serves the load", "serve the load")
    holds = "" if plan.status is Status.INFEASIBLE else f" {one if plan.n_gpus == 1 else more}"
    moved = 0 if plan.moves is None else len(plan.moves.adapters)
    again = 0 if old is None or plan.moves is None else len(restarted(old, plan.moves, plan.bins))
    return f"{counted(plan.n_gpus, 'GPU')}{holds}, {moved} moved" + (f", {again} restarted" if again else "")


def many_cut(plan: Plan) -> str:
    """How many requests count as cut to the `max_model_len` of the plan's servers, in words; "" for few."""
    shares = cut_shares(plan.workload, {item.profile.engine.max_model_len for item in plan.bins})
    share, most = max(((share, most) for most, share in shares.items()), default=(0.0, 0))
    return f" with {share:.0%} of the requests cut to {most:,} tokens" if share > MANY_CUT else ""


def refitted(kept: KeptHours, old: Sequence[Bin], bins: Sequence[Bin], over: Callable[[], bool]) -> Iterator[list[Bin]]:
    """Yield the servers with the settings of the running ones wherever these keep the limits in the kept hours, and
    with their best slots elsewhere; then all with their best slots."""
    becomes = match(old, bins)
    made = as_running(old, bins, becomes)
    used = kept.used(made, most=[1.0] * len(made)) if kept.all_count else [0.0] * len(made)
    stay = [k in becomes and made[k].settings == old[becomes[k]].settings for k in range(len(made))]
    again = [k for k, share in enumerate(used) if share > 1.0 or not stay[k]]
    if again:
        best = with_best_slots(kept, [bins[k] for k in again], kept.hours, over)
        made = [best[again.index(k)] if k in again else item for k, item in enumerate(made)]
    yield made
    if len(again) < len(made):
        yield with_best_slots(kept, bins, kept.hours, over)


def nearby(
    fleet: Workload, old: Sequence[Bin], servers: int, holds: Callable[[Bin], bool],
    parts: Mapping[int, int] = MappingProxyType({}), most: int = MOST_REPLICAS,
) -> Iterator[list[Bin]]:  # fmt: skip
    """Yield plans on at most `servers` servers: the running ones with new adapters placed; then with the fewest
    adapters moved off servers that do not hold; then with one adapter of each such server exchanged for a lighter one;
    then, `REPAIRS` times, with adapters moved from servers that still do not hold to servers that do.

    Running servers with the least load are closed if there are too many; new ones are opened for adapters without a
    place. A closed server's share of an adapter goes to the servers that have the rest of it. Adapters on fewer servers
    than they have `parts` are spread anew, over up to `most` servers; then all that have parts are.
    """
    falling = sorted(old, key=lambda item: -item.offered_tok_s(fleet))
    kept = [item for item in old if any(item is each for each in falling[:servers])]
    copies = Counter(i for item in kept for i in item.adapters)
    short = {i: n for i, n in parts.items() if copies[i] < n}
    for split in [short] if short == parts else [short, parts]:
        yield from _repaired(fleet, kept, servers, holds, split, most)


def _repaired(
    fleet: Workload, kept: Sequence[Bin], servers: int, holds: Callable[[Bin], bool],
    split: Mapping[int, int], most: int,
) -> Iterator[list[Bin]]:  # fmt: skip
    """Yield the plans of `nearby` on servers of which none is closed, with the adapters of `split` spread anew."""
    spread = partial(_spread, fleet, holds, split, most)
    yield (full := _placed(fleet, kept, len(kept), spread=spread))
    own = full if len(kept) == servers and not split else [_with_ranks(fleet, item) for item in kept]
    lighter = [_lighter(fleet, item, holds) for item in own]
    yield (tried := _placed(fleet, lighter, servers, spread=spread))
    if (exchanged := _exchanged(fleet, full, holds)) is not None:
        yield exchanged
    for _ in range(REPAIRS):
        lighter = [_lighter(fleet, item, holds, split) for item in tried]
        given = {k for k, item in enumerate(lighter) if len(item.adapters) < len(tried[k].adapters)}
        if not 0 < len(given) < len(tried):
            return
        yield (tried := _placed(fleet, lighter, len(lighter), given))


def homeward(
    fleet: Workload, old: Sequence[Bin], bins: Sequence[Bin], holds: Callable[[Bin], bool]
) -> list[Bin]:  # fmt: skip
    """The servers with as many of their moved adapters as they hold, the lightest first, back where they ran: the moves
    of light adapters change the load little. Split adapters stay, and those whose ranks do not fit."""
    copies = Counter(i for item in (*old, *bins) for i in item.adapters)
    home = {i: k for k, j in match(old, bins).items() for i in old[j].adapters if copies[i] == 2}
    now, loads = {i: k for k, item in enumerate(bins) for i in item.adapters}, fleet.offered_tok_s_by_adapter
    fits = [i for i, k in home.items() if k != now[i] and fleet.adapters[i].rank <= bins[k].max_lora_rank]
    away, found = sorted(fits, key=lambda i: loads[i]), {0: list(bins)}

    def kept(n: int) -> bool:
        held = [dict(zip(item.adapters, item.shares, strict=True)) for item in bins]
        for i in away[:n]:
            held[home[i]][i] = held[now[i]].pop(i)
        if not all(held):
            return False
        found[n] = [_with(fleet, item, own, new=False) for item, own in zip(bins, held, strict=True)]
        return all(map(holds, sorted(found[n], key=lambda item: -item.offered_tok_s(fleet))))

    tries = iter(range(1, HOMEWARD))
    return found[reach(kept, 1, len(away), len(away), 0, stop=lambda: next(tries, None) is None)[0]]


def _with_ranks(fleet: Workload, item: Bin) -> Bin:
    """A running server with slots that fit its adapters' current ranks."""
    rank = max((slot_rank_for(fleet.adapters[i].rank) for i in item.adapters), default=0)
    held = dict(zip(item.adapters, item.shares, strict=True))
    return item if rank <= item.max_lora_rank else _with(fleet, item, held, new=False)


def _lighter(fleet: Workload, item: Bin, holds: Callable[[Bin], bool], last: Collection[int] = ()) -> Bin:
    """The server with the fewest adapters removed, heaviest first, so that it holds; unchanged if nothing helps.
    `last`: adapters that are removed only after all others."""
    here = dict(zip(item.adapters, item.rates(fleet) * fleet.mean_tokens[list(item.adapters)], strict=True))
    # `lightest` removes the heaviest first.
    here |= dict.fromkeys(last, -1.0)

    def made(kept: list[int]) -> Bin | None:
        lighter = item.renumbered(dict(zip(kept, kept, strict=True)))
        return lighter if lighter is not None and holds(lighter) else None

    return lightest(item, here, made) or item


def _exchanged(fleet: Workload, bins: Sequence[Bin], holds: Callable[[Bin], bool]) -> list[Bin] | None:
    """The servers, with an adapter of each one that does not hold exchanged for a lighter one so that both hold. Pairs
    that balance two servers best come first. None if all hold, most do not, `COARSE` applies or no pair is found."""
    made = list(bins)
    over = [k for k, item in enumerate(made) if not holds(item)]
    if not 0 < len(over) <= len(made) // 2 or len(fleet) > COARSE * len(made):
        return None
    for k in over:
        others = {j: other for j, other in enumerate(made) if j not in over}
        pairs = (pair for j, other in others.items() for pair in _exchanges(fleet, made[k], other, j))
        for _, j, a, b in nsmallest(EXCHANGES, pairs):
            names = {a: b, b: a}
            one, other = (
                replace(item, adapters=tuple(names.get(i, i) for i in item.adapters)) for item in (made[k], made[j])
            )
            if holds(one) and holds(other):
                made[k], made[j] = one, other
                break
        else:
            return None
    return made


def _exchanges(fleet: Workload, full: Bin, other: Bin, number: int) -> Iterator[tuple[float, int, int, int]]:
    """Yield (imbalance, `number`, adapter of `full`, lighter adapter of `other`) for pairs whose ranks fit both
    servers; nothing with split adapters. Imbalance: half the difference of the loads after the exchange, tok/s."""
    if full.is_split or other.is_split:
        return
    loads, slack = fleet.offered_tok_s_by_adapter, full.offered_tok_s(fleet) - other.offered_tok_s(fleet)
    rank = min(full.max_lora_rank, other.max_lora_rank)
    mine, theirs = (
        [(i, float(loads[i])) for i in item.adapters if fleet.adapters[i].rank <= rank] for item in (full, other)
    )
    for (a, heavy), (b, light) in product(mine, theirs):
        if heavy > light:
            yield abs(heavy - light - slack / 2.0), number, a, b


def _placed(
    fleet: Workload, bins: Sequence[Bin], servers: int, full: Collection[int] = (),
    spread: Callable[[list[dict[int, float]], Callable[[int, Held], Bin]], None] = lambda _held, _made: None,
) -> list[Bin]:  # fmt: skip
    """The servers, and new ones up to `servers`, with all missing adapters: the heaviest first, each on the server with
    the least load that is not `full`. `spread`: first changes what servers hold, given that and how a server is made
    from its number and what it holds."""

    def made(s: int, own: Held) -> Bin:
        # A new server is of the kind of the last running one.
        return _with(fleet, bins[min(s, len(bins) - 1)], own, new=s >= len(bins))

    held = [dict(zip(item.adapters, item.shares, strict=True)) for item in bins]
    held += [{} for _ in range(servers - len(bins))]
    spread(held, made)
    near = Nearest(fleet.offered_tok_s_by_adapter, held, range(servers), fits=lambda k, _: k not in full)
    near.place_rest()
    return [made(s, own) for s, own in enumerate(near.held) if own]


def _spread(
    fleet: Workload, holds: Callable[[Bin], bool], parts: Mapping[int, int], most: int,
    held: list[dict[int, float]], made: Callable[[int, Held], Bin],
) -> None:  # fmt: skip
    """Spread each adapter of `parts`, hottest first, over the fewest servers that hold with it, at least as many as it
    has parts; over `most` if none hold. Those that have it come first, then those with the least load."""
    tok_s, high = fleet.offered_tok_s_by_adapter, min(most, len(held))
    before = [{*own} for own in held]
    # Take all of them off first, so that no load contains what is yet to be spread.
    for own in held:
        for i in {*own} & {*parts}:
            del own[i]

    def shared(i: int, n: int) -> dict[int, float]:
        loads = [float(sum(tok_s[a] * share for a, share in own.items())) for own in held]
        order = sorted(range(len(held)), key=lambda s: (i not in before[s], loads[s]))
        return _levelled({s: loads[s] for s in order[:n]}, tok_s[i])

    def enough(i: int, n: int) -> bool:
        return all(holds(made(s, held[s] | {i: share})) for s, share in shared(i, n).items())

    for i in sorted(parts, key=lambda i: -tok_s[i]):
        n = fewest(partial(enough, i), min(parts[i], high), high)
        for s, share in shared(i, n or high).items():
            held[s][i] = share


def _levelled(loads: Mapping[int, float], more: float) -> dict[int, float]:
    """Shares, by server, of a load of `more` tok/s that fill servers with `loads` up to one level; those above get
    none."""
    rising = sorted(loads, key=lambda s: loads[s])
    total, level, used = more, math.inf, 0
    for s in rising:
        if loads[s] >= level:
            break
        used += 1
        total += loads[s]
        level = total / used
    return {s: (level - loads[s]) / more for s in rising[:used]}


def _with(fleet: Workload, item: Bin, held: Mapping[int, float], *, new: bool) -> Bin:
    """The server, or a new one of its kind, with adapters `held`; with a slot for each if it is new, had that or ran
    without LoRA."""
    ranks = [slot_rank_for(fleet.adapters[i].rank) for i in held]
    full = new or not 0 < item.max_loras < len(item.adapters)
    rank = max(ranks) if new else max(item.max_lora_rank, *ranks)
    made = Bin(tuple(held), item.profile.settings(1, rank), item.profile, tuple(held.values()))
    return made.with_slots(min(len(held) if full else item.max_loras, candidates_of(made)[-1]))
