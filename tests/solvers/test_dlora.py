"""dLoRA's placement against the plain loop of its description."""

from __future__ import annotations

import numpy as np
import pytest
from monotone import problem

from packer.planning.verify import check
from packer.solvers.baselines.dlora import DLora, Engines, burst_tolerance, place
from packer.testing.analytic import random_fleet


def plain_loop(task: Engines) -> list[list[int]]:
    """The loop as the paper tells it, with every tolerance computed anew at every trial."""
    n = len(task.sizes)
    placed: list[list[int]] = [[] for _ in range(task.engines)]

    def tolerance() -> float:
        worst = float("inf")
        for a in range(n):
            free = sum(task.capacity - sum(task.sizes[x] for x in held) for held in placed if a in held)
            worst = min(worst, free / task.shares[a])
        return float(worst)

    failed: set[int] = set()
    while True:
        copies = [sum(a in held for held in placed) for a in range(n)]
        limit = min(task.max_replicas, task.engines)
        open_ = [a for a in range(n) if a not in failed and copies[a] < limit]
        if not open_:
            return placed
        without = [a for a in open_ if copies[a] == 0]
        if without:
            adapter = max(without, key=lambda a: (task.shares[a], -a))
        else:
            total = sum(copies)
            adapter = max(open_, key=lambda a: (task.shares[a] - copies[a] / total, -a))
        before = tolerance()
        for engine in sorted(range(task.engines), key=lambda e: (len(placed[e]), e)):
            if adapter in placed[engine]:
                continue
            if sum(task.sizes[x] for x in placed[engine]) + task.sizes[adapter] > task.capacity * (1 + 1e-9):
                continue
            placed[engine].append(adapter)
            if tolerance() >= before - 1e-9 * max(1.0, before):
                failed.clear()
                break
            placed[engine].remove(adapter)
        else:
            failed.add(adapter)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("max_replicas", [1, 3])
def test_same_as_the_plain_loop(seed: int, max_replicas: int) -> None:
    """The fast placement keeps exactly the replicas that the plain loop keeps."""
    rng = np.random.default_rng(seed)
    n, engines = int(rng.integers(3, 14)), int(rng.integers(1, 5))
    shares = rng.dirichlet(np.full(n, 0.7))
    sizes = rng.choice([8.0, 16.0, 32.0], n)
    capacity = float(rng.choice([60.0, 200.0, 1000.0]))
    task = Engines(sizes, shares, capacity, engines, max_replicas)
    holds = place(task)
    assert [np.flatnonzero(holds[:, e]).tolist() for e in range(engines)] == [sorted(held) for held in plain_loop(task)]


@pytest.mark.parametrize("seed", range(4))
def test_the_unit_of_memory_does_not_matter(seed: int) -> None:
    """Bytes or terabytes: sizes and memory that are a power of two smaller hold the same adapters."""
    rng = np.random.default_rng(seed)
    shares, sizes = rng.dirichlet(np.full(10, 0.7)), rng.choice([8.0, 16.0, 32.0], 10)
    task = Engines(sizes, shares, 200.0, 3, 3)
    small = Engines(sizes / 2**20, shares, 200.0 / 2**20, 3, 3)
    assert place(small).tolist() == place(task).tolist()


def test_replicas_raise_the_smallest_tolerance() -> None:
    """With replicas allowed the burst tolerance is at least that of single copies."""
    rng = np.random.default_rng(3)
    sizes, shares = rng.choice([8.0, 16.0], 20), rng.dirichlet(np.full(20, 0.5))
    found = []
    for copies in (1, 4):
        task = Engines(sizes, shares, 1e4, 4, copies)
        holds = place(task)
        found.append(float(burst_tolerance(task, holds, task.capacity - sizes @ holds).min()))
    assert found[1] > found[0]


def test_traffic_splits_evenly_over_replicas() -> None:
    """Shares of a replicated adapter are equal and sum to 1, as the checker requires."""
    from dataclasses import replace

    posed = replace(problem(random_fleet(20, seed=1), max_gpus=4), max_replicas=4)
    found = DLora().solve(posed)
    check(posed, found)
    assert any(b.is_split for b in found.bins)


def test_full_memory_leaves_adapters_unplaced() -> None:
    """Adapters that fit no engine's memory are unplaced, with a reason."""
    from dataclasses import replace

    posed = problem(random_fleet(30, seed=1, ranks=(512,)), max_gpus=1)
    tiny = replace(posed.profile, memory=replace(posed.profile.memory, kv_budget_bytes=4e9))
    found = DLora().solve(replace(posed, profiles=(tiny,)))
    assert found.unplaced
    assert "memory is full" in found.reasons[0]
