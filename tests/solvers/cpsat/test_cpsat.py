"""The refinement by CP-SAT keeps what it starts from, and improves it where a repacking exists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from monotone import MonotonePredictor, problem

from packer.bin import Bin
from packer.moves import moved
from packer.objectives.gpus import Gpus
from packer.objectives.latency import Latency
from packer.objectives.moves import FewestMoves
from packer.planning.solve import solve
from packer.planning.verify import check
from packer.solvers.base import Problem, Solution, start
from packer.solvers.cpsat.model import Aim, Refused, Repacking, ServerOption
from packer.solvers.cpsat.search import NeighbourhoodSearch
from packer.solvers.cpsat.solver import CpSat
from packer.solvers.cpsat.surrogate import fitted_limits
from packer.solvers.slots import real_bins
from packer.testing.analytic import random_fleet, small_profile


def repacking(aim: Aim, demand: list[int], start: list[list[int]], **changes: object) -> Repacking:
    """Two classes that take a quarter and a third of a server each, on servers of one kind."""
    counts, wanted = np.array(start), np.array(demand)
    kind = ServerOption(np.array([0.25, 1 / 3]), 0.0, 1.001, np.ones(2, dtype=bool), 1.0, "gpu", 1)
    none = np.zeros_like(counts)
    known = Repacking(aim, wanted, none, [kind], [[0]] * len(start), counts, [0] * len(start))
    return replace(known, **changes)  # type: ignore[arg-type]


def solved(task: Repacking) -> tuple[np.ndarray, list[int]] | None:
    """Counts and options."""
    found = task.solve(seed=0, work=1.0, seconds=10.0)
    return None if found is None else found[:2]


def test_a_server_is_emptied_where_the_others_have_room() -> None:
    """Four quarters and three thirds on three servers fill two."""
    found = solved(repacking(Aim.EMPTY, [4, 3], [[1, 0], [2, 1], [1, 2]]))
    assert found is not None
    assert found[1].count(-1) == 1
    assert found[0].sum(axis=0).tolist() == [4, 3]
    assert solved(repacking(Aim.EMPTY, [4, 4], [[0, 3], [4, 0], [0, 1]], emptied=2)) is None


def test_a_refused_server_does_not_come_back() -> None:
    """The only way to fill two servers is forbidden, or all that hold it are."""
    for heavier in (False, True):
        cut = Refused(np.array([4, 0]), 0, heavier)
        again = repacking(Aim.EMPTY, [4, 3], [[1, 0], [2, 1], [1, 2]], refused=[cut])
        found = solved(again)
        assert found is None or not (found[0] == [4, 0]).all(axis=1).any()


def test_adapters_stay_where_they_ran() -> None:
    """Two adapters that were exchanged for no reason go back."""
    task = repacking(Aim.STAY, [2, 2], [[1, 1], [1, 1]], running=np.array([[2, 0], [0, 2]]))
    found = solved(task)
    assert found is not None
    assert found[0].tolist() == [[2, 0], [0, 2]]


def test_the_fullest_server_gives_way() -> None:
    """Six quarters are split three and three."""
    found = solved(repacking(Aim.WORST, [6, 0], [[4, 0], [2, 0]], fixed=True))
    assert found is not None
    assert found[0][:, 0].tolist() == [3, 3]


def test_a_server_that_is_fuller_than_its_limit_may_stay_so() -> None:
    """The rounding of the shares of thirty adapters does not refuse the server that holds them."""
    kind = ServerOption(np.array([1 / 30, 1.0]), 0.0, 0.9, np.ones(2, dtype=bool), 1.0, "gpu", 1)
    found = solved(repacking(Aim.WORST, [30, 0], [[30, 0]], fixed=True, kinds=[kind]))
    assert found is not None
    assert found[0].tolist() == [[30, 0]]


def test_the_estimate_of_a_full_server_is_near() -> None:
    """Of servers that the predictor just admits, the fitted shares add up to about 1."""
    task = problem(random_fleet(80, seed=3, rates=(0.9, 0.4, 0.2), ranks=(1, 16, 32)))
    kinds = fitted_limits(task, np.random.default_rng(0))
    assert [kind.slot_rank for kind in kinds] == [8, 16, 32]
    rng = np.random.default_rng(1)
    order = rng.permutation(80).tolist()
    sets = [tuple(sorted(order[:n])) for n in range(1, 81)]
    holds = [item is not None for item in real_bins(task, sets)]
    last = holds.index(False)
    assert float(kinds[-1].shares[list(sets[last])].sum()) == pytest.approx(1.0, abs=0.12)


def wasteful(task: Problem) -> Solution:
    """A plan with more servers than needed: the first that hold four adapters each."""
    n = len(task.workload)
    bins = real_bins(task, [tuple(range(k, min(n, k + 4))) for k in range(0, n, 4)])
    return Solution(tuple(item for item in bins if item is not None))


def test_servers_of_a_wasteful_plan_are_saved() -> None:
    """From a plan with twice the servers that greedy takes, the search comes near greedy's number."""
    task = replace(problem(random_fleet(40, seed=5, rates=(1.6, 0.9))), time_limit_s=60.0)
    first, best = wasteful(task), len(start(task).bins)
    assert len(first.bins) > 1.4 * best
    search = NeighbourhoodSearch(task, first.bins)
    found = search.run(1.0)
    check(task, Solution(found))
    assert len(found) <= best + 1


@pytest.mark.parametrize("objective", ["gpus", "latency"])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_never_worse_than_its_start(objective: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it starts from, the key of the plan is no larger; the same seed gives the same plan."""
    monkeypatch.setattr("packer.solvers.cpsat.search._PATIENCE", 5)
    goal = Latency(statistic="worst") if objective == "latency" else Gpus()
    # Small enough that the searches end before their time, which depends on the machine.
    fleet = random_fleet(8 if goal.fixed_gpus else 24, seed=seed, rates=(1.6, 0.8))
    task = problem(fleet, objective=goal, max_gpus=3 if goal.fixed_gpus else None, time_limit_s=80.0)
    solver = CpSat("spread" if goal.fixed_gpus else "greedy")
    search, other = (NeighbourhoodSearch(task, start(task, solver.first).bins) for _ in range(2))
    assert search.run(0.2) == other.run(0.2)
    found, before = solver.solve(task), start(task, solver.first)
    keys = [goal.key(fleet, each.bins, task.evaluator.evaluate(fleet, each.bins)) for each in (found, before)]
    assert keys[0] <= keys[1]
    check(task, found)


def test_a_running_plan_is_followed_with_fewer_moves() -> None:
    """A plan whose adapters were exchanged at random is followed with hardly any of them."""
    fleet = random_fleet(24, seed=1, rates=(1.6, 0.8), ranks=(8,))
    old = start(problem(fleet)).bins
    task = problem(fleet, objective=FewestMoves(tuple(old)), time_limit_s=20.0)
    task = replace(task, old_bins=tuple(old))
    rng = np.random.default_rng(0)
    order = rng.permutation(24).tolist()
    sizes = np.cumsum([len(item.adapters) for item in old])[:-1]
    mixed = [item for item in real_bins(task, [tuple(sorted(p.tolist())) for p in np.split(order, sizes)]) if item]
    assert len(mixed) == len(old)
    before = len(moved(old, mixed))
    search = NeighbourhoodSearch(task, mixed)
    assert len(moved(old, search.run(0.6))) <= before // 2


def test_it_says_what_it_cannot_take() -> None:
    """Objectives without a price of servers or a latency, and split adapters, are refused in words."""
    task = problem(random_fleet(4, seed=0))
    assert CpSat().supports(task) is None
    assert "replica" in (CpSat().supports(replace(task, max_replicas=2)) or "")


def test_the_public_call_takes_it() -> None:
    """`packer.solve(…, solver="cpsat")` gives a plan that names its solver and its start."""
    fleet = random_fleet(12, seed=2, rates=(1.6, 0.8))
    plan = solve(
        fleet, small_profile(), solver="cpsat", predictor=MonotonePredictor(), time_limit_s=3.0, margin=0.0,
        verify=False,
    )  # fmt: skip
    assert (plan.solver, plan.statistics["first"]) == ("cpsat", "greedy")
    assert sorted(i for item in plan.bins for i in item.adapters) == list(range(12))
    assert all(isinstance(item, Bin) for item in plan.bins)


def test_steps_that_only_move_adapters_are_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search whose steps find plans that are no better ends as one whose steps find none."""
    steps: list[int] = []

    def step(search: NeighbourhoodSearch, idle: int) -> None:
        search.state = replace(search.state)
        steps.append(idle)
        assert steps == list(range(len(steps)))

    monkeypatch.setattr(NeighbourhoodSearch, "_step", step)
    monkeypatch.setattr(NeighbourhoodSearch, "_full", lambda _search: False)
    posed = problem(random_fleet(40, seed=5, rates=(1.6, 0.9)))
    NeighbourhoodSearch(posed, start(posed, "greedy").bins).run(1.0)
    assert steps
