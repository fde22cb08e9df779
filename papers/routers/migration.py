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
NODES, GAP = 200, 1e-3
"""Where the search ends, with the best solution so far: a limit of time would make two runs differ."""


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
    that do not fit. The artifact's program may split a request, and sends it where its largest part is. Here one
    variable counts the requests of an adapter on an engine that go to an engine, each with their mean blocks, so that
    thousands of them are as quick as few; the last of them go.
    """
    import pulp

    engines, adapters = range(len(task.blocks)), sorted({a for _, a, _ in task.requests})
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (at, a, _) in enumerate(task.requests):
        groups.setdefault((at, a), []).append(i)
    blocks = {key: sum(task.requests[i][2] for i in own) / len(own) for key, own in groups.items()}
    model = pulp.LpProblem("migration", pulp.LpMinimize)
    longest = model.add_variable("longest", lowBound=0)
    x = {key: [model.add_variable(f"x{key[0]}_{key[1]}_{e}", lowBound=0) for e in engines] for key in groups}
    y = {a: [model.add_variable(f"y{a}_{e}", cat=pulp.LpBinary) for e in engines] for a in adapters}
    model.setObjective(longest)
    for key, own in groups.items():
        model.addConstraint(pulp.lpSum(x[key]) >= len(own))
        for e in engines:
            model.addConstraint(x[key][e] <= len(own) * y[key[1]][e])
    for e in engines:
        model.addConstraint(pulp.lpSum(y[a][e] for a in adapters) <= task.places[e])
        over = model.add_variable(f"over{e}", lowBound=0)
        held = pulp.lpSum(blocks[key] * x[key][e] for key in groups)
        model.addConstraint(over >= task.block_s * (held - task.blocks[e]))
        time_s = pulp.lpSum(
            (task.service_s[a] + (MOVE_S if at != e else 0.0)) * x[at, a][e] for at, a in groups
        )
        model.addConstraint(longest >= time_s + over)
    model.solve(pulp.HiGHS(msg=False, gapRel=GAP, threads=1, mip_max_nodes=NODES))
    chosen = [at for at, _, _ in task.requests]
    if longest.value() is None:
        return chosen, []
    for (at, a), own in groups.items():
        left = len(own)
        for e in sorted(engines, key=lambda e: e == at):  # those that stay, last
            count = min(left, round(x[at, a][e].value() or 0.0)) if e != at else 0
            for i in own[left - count : left]:
                chosen[i] = e
            left -= count
        if left and y[a][at].value() < 0.5:  # rounded down
            for i in own[:left]:
                chosen[i] = next(e for e in engines if y[a][e].value() > 0.5)
    return chosen, [{a for a in adapters if y[a][e].value() > 0.5} for e in engines]
