"""Why a fleet can't be placed, in words, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence

from packer import words
from packer.checks import slot_rank_for
from packer.profile import Profile
from packer.search import reach
from packer.solvers.base import Problem
from packer.solvers.slots import SlotSearch
from packer.workload import Workload

_SHOWN = 5
_PARTS = 256


def listed(workload: Workload, adapters: Sequence[int]) -> str:
    """Names of adapters, the first few of many."""
    names = words.listed((repr(workload.adapters[i].name) for i in adapters), _SHOWN)
    return f"{words.plural(len(adapters), 'adapter')} {names}"


def out_of_gpus(problem: Problem, left: Sequence[int], needed: int | None = None) -> tuple[str, ...]:
    """Say that the GPUs can't hold the load; `needed`: number of GPUs of a plan without the limit."""
    load = float(problem.workload.offered_tok_s_by_adapter[list(left)].sum())
    share = load / problem.workload.offered_tok_s
    help_ = f"--gpus {needed}" if needed is not None else "more --gpus"
    given = f"{problem.max_gpus} {words.plural(problem.max_gpus or 0, 'GPU')}"
    if problem.max_gpus is None:
        given = ", ".join(f"{count} {gpu}" for gpu, count in problem.stock.items())
        help_ = "more GPUs at hand"
    return (
        f"{given} can't hold {listed(problem.workload, left)} ({load:,.0f} tok/s, {share:.0%} of the load). "
        f"What would help: {help_}, or rates lower by about {share:.0%}",
    )


def too_hot(slots: SlotSearch, adapter: int, share: float) -> str:
    """Clause on why an adapter can't have a GPU of its own; `share` of its rate would be served."""
    problem = slots.problem
    item = problem.workload.adapters[adapter]
    if share > 0.0:
        said = f"too much for a GPU of its own; alone it may have about {item.rate * share:.3g} req/s. What would help:"
        return f"{said} --max-replicas {math.ceil(1.0 / share)}, a lower rate, or a faster GPU"
    alone = [slots.make([adapter], 1, profile) for profile in problem.profiles]
    if problem.evaluator.evaluate(problem.workload, alone).memory_error.all():
        said = f"does not fit an empty GPU: a slot of rank {slot_rank_for(item.rank)} leaves too little KV cache."
        return f"{said} What would help: a GPU with more memory, or a lower rank"
    limited = bool(problem.objective.limits)
    said = f"{'the limits break' if limited else 'it starves'} even alone at a hundredth of the rate. What would help:"
    return f"{said} {'looser limits' if limited else 'more --max-replicas, a lower rate'}, or a faster GPU"


def merged(workload: Workload, reasons: Sequence[tuple[int, str]]) -> list[str]:
    """One sentence for each different reason, with its adapters; `reasons`: pairs of an adapter and its reason."""
    who: dict[str, list[int]] = {}
    for adapter, why in reasons:
        who.setdefault(why, []).append(adapter)
    found = []
    for why, adapters in who.items():
        item = workload.adapters[adapters[0]]
        detail = f" (rank {item.rank}, {item.rate:g} req/s)" if len(adapters) == 1 else ""
        found.append(f"{listed(workload, adapters)}{detail}: {why}")
    return found


def largest_share(slots: SlotSearch, adapter: int, profile: Profile) -> float:
    """Largest part of an adapter's rate that a GPU of its own serves, within 1/256; 0 if not even 1 %."""

    def ok(share: float) -> bool:
        return slots.holds([slots.make([adapter], 1, profile, [share])])[0]

    most, _ = reach(lambda n: ok(n / _PARTS), 1, _PARTS, _PARTS, 0)
    return most / _PARTS or 0.01 * ok(0.01)
