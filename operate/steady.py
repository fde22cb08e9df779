"""Settings of the servers of a day: a server that keeps its settings goes on, another one takes its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import product

from packer.bin import Bin
from packer.operate.day import Period
from packer.settings import Settings


def with_steady_settings(
    periods: Sequence[Period], holds: Callable[[Period, Sequence[Bin]], Sequence[bool]]
) -> list[Period]:
    """Periods of a day that repeats, with as few changes of a server's settings as possible; servers are renumbered.

    Of each place (`Period.servers`) every pair of its slots and ranks is tried. Where none holds in two successive
    periods, a new server takes the place.

    `holds`: which of these servers hold in a period.
    """
    bins = [list(each.plan.bins) for each in periods]
    at: dict[int, dict[int, int]] = {}
    for t, each in enumerate(periods):
        for j, place in enumerate(each.servers):
            at.setdefault(place, {})[t] = j
    for rows in at.values():
        own = {t: bins[t][j].settings for t, j in rows.items()}
        pairs = set(product({s.max_loras for s in own.values()}, {s.max_lora_rank for s in own.values()}))
        options: dict[int, Set[Settings]] = {}
        for t, j in rows.items():
            item, ranks = bins[t][j], periods[t].plan.workload.ranks
            least = int(ranks[list(item.adapters)].max())
            made = [
                replace(item, settings=item.profile.settings(*pair)) for pair in pairs if pair[1] >= least
            ]
            kept = holds(periods[t], made) if len(pairs) > 1 else []
            options[t] = {own[t]} | {
                each.settings for each, fits in zip(made, kept, strict=bool(kept)) if fits
            }
        for t, settings in _chosen(own, options, len(periods)).items():
            bins[t][rows[t]] = replace(bins[t][rows[t]], settings=settings)
    servers = sorted(
        {key for each, made in zip(periods, bins, strict=True) for key in _keys(each, made)},
        key=lambda key: (key[0], key[1].max_loras, key[1].max_lora_rank),
    )
    number = {key: k for k, key in enumerate(servers)}
    return [
        replace(
            each,
            plan=replace(each.plan, bins=tuple(made)),
            servers=tuple(number[key] for key in _keys(each, made)),
        )
        for each, made in zip(periods, bins, strict=True)
    ]


def _keys(each: Period, bins: Sequence[Bin]) -> list[tuple[int, Settings]]:
    return [(place, item.settings) for place, item in zip(each.servers, bins, strict=True)]


def _chosen(
    own: Mapping[int, Settings], options: Mapping[int, Set[Settings]], periods: int
) -> dict[int, Settings]:
    """The settings of each period in which a server runs: successive periods share them while any of `options` is left.

    Of those that are left, what most of the periods had is taken.
    """
    nothing: Set[Settings] = frozenset()
    first = next((t for t in options if not options[t] & options.get((t - 1) % periods, nothing)), 0)
    runs: list[tuple[list[int], Set[Settings]]] = []
    for t in (*range(first, periods), *range(first)):
        goes_on = runs and runs[-1][0][-1] == (t - 1) % periods
        if t in options and goes_on and (both := runs[-1][1] & options[t]):
            runs[-1] = ([*runs[-1][0], t], both)
        elif t in options:
            runs.append(([t], options[t]))
    found: dict[int, Settings] = {}
    for members, common in runs:
        had = Counter(own[t] for t in members)
        best = max(common, key=lambda each: (had[each], each.max_loras, each.max_lora_rank))
        found |= dict.fromkeys(members, best)
    return found
