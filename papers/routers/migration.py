"""dLoRA's reactive program: which requests and adapters move between two engines.

Wu et al., dLoRA (OSDI 2024, section 5), by its artifact: github.com/LLMServe/dLoRA-artifact,
vllm/engine/migration_ilp.py and engine_manager.py (`migration_schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOVE_S = 0.05  # Cost of moving a request, s.
FULL = 0.9  # Used share of the KV cache from which on an engine is full.
FEWEST_TOO_MANY = 16  # An engine has too many requests if it has at least this number more than the mean.
EFFORT, GAP = 0.5, 1e-3  # Deterministic time and gap at which CP-SAT stops: by wall time, two runs would differ.


@dataclass(frozen=True)
class Task:
    """Requests (engine, adapter, blocks); KV blocks and adapter places per engine; times per adapter and per block."""

    requests: Sequence[tuple[int, int, int]]
    blocks: Sequence[int]
    places: Sequence[int]
    service_s: dict[int, float]
    block_s: float


def engines_to_balance(blocks: Sequence[int], room: Sequence[int], requests: Sequence[int]) -> list[int]:
    """The engines with the most and fewest used blocks if the first is full and the second is not. Otherwise the
    engines with the most and fewest requests if the first has too many; otherwise []."""
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
    """The new engine of each request, and the adapters that each engine must hold for its requests.

    Minimises the largest time of an engine: service of its requests, 0.05 s for each request that moves to it, and
    transfer of blocks that do not fit. The artifact's program may split a request, and sends it to the engine of its
    largest part. Here one variable counts the requests of one adapter that go from one engine to another, each with
    their mean blocks, so the time to solve does not grow with the number of requests. The last requests move first.
    """
    from ortools.sat.python import cp_model

    engines, adapters = range(len(task.blocks)), sorted({a for _, a, _ in task.requests})
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (at, a, _) in enumerate(task.requests):
        groups.setdefault((at, a), []).append(i)
    blocks = {key: round(sum(task.requests[i][2] for i in own) / len(own)) for key, own in groups.items()}
    model = cp_model.CpModel()
    x = {key: [model.new_int_var(0, len(own), "") for _ in engines] for key, own in groups.items()}
    y = {a: [model.new_bool_var("") for _ in engines] for a in adapters}
    most_us = sum(round(1e6 * (s + MOVE_S)) for s in (task.service_s[a] for _, a, _ in task.requests))
    block_us = round(1e6 * task.block_s)
    longest = model.new_int_var(0, most_us + block_us * sum(n for _, _, n in task.requests), "")
    for key, own in groups.items():
        model.add(sum(x[key]) == len(own))
        for e in engines:
            model.add(x[key][e] <= len(own) * y[key[1]][e])
    for e in engines:
        model.add(sum(y[a][e] for a in adapters) <= task.places[e])
        held = sum(blocks[key] * x[key][e] for key in groups)
        time_us = sum(round(1e6 * (task.service_s[a] + (MOVE_S if at != e else 0.0))) * x[at, a][e] for at, a in groups)
        # Transfers only count beyond the engine's blocks: if all fit, this bound is the larger one.
        model.add(longest >= time_us)
        model.add(longest >= time_us + block_us * (held - task.blocks[e]))
    model.minimize(longest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time, solver.parameters.relative_gap_limit = EFFORT, GAP
    chosen = [at for at, _, _ in task.requests]
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return chosen, []
    for (at, a), own in groups.items():
        left = len(own)
        for e in engines:
            count = solver.value(x[at, a][e]) if e != at else 0
            for i in own[left - count : left]:
                chosen[i] = e
            left -= count
    return chosen, [{a for a in adapters if solver.value(y[a][e])} for e in engines]
