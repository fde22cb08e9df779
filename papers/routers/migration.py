"""dLoRA's reactive program: which requests and adapters move between two engines.

Wu et al., dLoRA (OSDI 2024, section 5), by its artifact: github.com/LLMServe/dLoRA-artifact,
vllm/engine/migration_ilp.py and engine_manager.py (`migration_schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOVE_S = 0.05
"""What a moved request counts, s."""
FULL = 0.9
"""Share of an engine's KV cache from which on it is full."""
FEWEST_TOO_MANY = 16
"""An engine has too many requests with so many more than the mean."""
NODES = 200
"""Of the search, whose best solution counts: a limit of time would make two runs differ."""


@dataclass(frozen=True)
class Task:
    """Requests as (engine, adapter, blocks); by engine KV blocks and places for adapters; s by adapter and block."""

    requests: Sequence[tuple[int, int, int]]
    blocks: Sequence[int]
    places: Sequence[int]
    service_s: dict[int, float]
    block_s: float


def engines_to_balance(blocks: Sequence[int], room: Sequence[int], requests: Sequence[int]) -> list[int]:
    """The full engine and the emptiest, by blocks of `room`, or that with too many requests and that with fewest.

    None if no engine is full or has too many.
    """
    order = sorted(range(len(blocks)), key=lambda e: (blocks[e], e))
    least, most = order[0], order[-1]
    if blocks[most] >= FULL * room[most] and blocks[least] < FULL * room[least]:
        return sorted([most, least])
    order = sorted(range(len(requests)), key=lambda e: (requests[e], e))
    average = sum(requests) / len(requests)
    few, many = order[0], order[-1]
    if few == many or requests[many] - average < FEWEST_TOO_MANY or requests[few] >= average:
        return []
    return sorted([many, few])


def balance(task: Task) -> tuple[list[int], list[set[int]]]:
    """The engine of each request, and the adapters that each engine holds for them.

    Minimises the longest engine's time: the requests' service, 0.05 s for each that moves, and the transfer of blocks
    that do not fit. As in the artifact a request may be split in the solution, and goes where its largest part is.
    """
    import pulp

    engines, adapters = range(len(task.blocks)), sorted({a for _, a, _ in task.requests})
    model = pulp.LpProblem("migration", pulp.LpMinimize)
    longest = model.add_variable("longest", lowBound=0)
    x = [[model.add_variable(f"x{i}_{e}", lowBound=0) for e in engines] for i in range(len(task.requests))]
    y = {a: [model.add_variable(f"y{a}_{e}", cat=pulp.LpBinary) for e in engines] for a in adapters}
    model.setObjective(longest)
    for parts in x:
        model.addConstraint(pulp.lpSum(parts) >= 1)
    for a in adapters:
        own = [i for i, (_, b, _) in enumerate(task.requests) if b == a]
        for e in engines:
            model.addConstraint(len(own) * y[a][e] >= pulp.lpSum(x[i][e] for i in own))
    for e in engines:
        model.addConstraint(pulp.lpSum(y[a][e] for a in adapters) <= task.places[e])
        over = model.add_variable(f"over{e}", lowBound=0)
        held = pulp.lpSum(n * x[i][e] for i, (_, _, n) in enumerate(task.requests))
        model.addConstraint(over >= task.block_s * (held - task.blocks[e]))
        time_s = pulp.lpSum(
            (task.service_s[a] + (MOVE_S if at != e else 0.0)) * x[i][e]
            for i, (at, a, _) in enumerate(task.requests)
        )
        model.addConstraint(longest >= time_s + over)
    model.solve(pulp.HiGHS(msg=False, gapRel=0.0, threads=1, mip_max_nodes=NODES))
    if x[0][0].value() is None:
        return [at for at, _, _ in task.requests], []
    chosen = [max(engines, key=lambda e: (parts[e].value(), -e)) for parts in x]
    return chosen, [{a for a in adapters if y[a][e].value() > 0.5} for e in engines]
