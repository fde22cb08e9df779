"""CP-SAT refinement: the model says what it should, the search only ever improves."""

from __future__ import annotations

import numpy as np

from packer.objectives.latency import Latency
from packer.solvers.classes import aggregate
from packer.solvers.cpsat.model import RepackModel, Task, solve_task
from packer.solvers.cpsat.solver import CpSat, refine
from packer.solvers.cpsat.surrogate import SCALE, Option, fit_costs, fit_limits, sample
from packer.solvers.feasibility import real_bins
from packer.solvers.greedy.solver import Greedy
from packer.solvers.verify import check
from packer.testing.problems import problem, random_fleet

HALF = Option(1, 16, np.array([SCALE // 2, SCALE // 4]))
APART = np.eye(2, dtype=bool)  # neither class is heavier than the other


def test_the_model_packs_what_fits() -> None:
    """Two halves and four quarters make two full bins."""
    rows, _ = RepackModel(np.array([2, 4]), np.array([8, 16]), APART, [HALF], bins=2, most=SCALE).solve(
        time_limit_s=5.0, seed=0
    )
    assert rows is not None
    assert np.sum(rows, axis=0).tolist() == [2, 4]
    assert all(row @ HALF.weights <= SCALE for row in rows)


def test_what_cannot_fit_is_proven() -> None:
    """Three halves and three quarters don't fit into two bins, and the model says that it knows."""
    rows, proven = RepackModel(np.array([3, 3]), np.array([8, 16]), APART, [HALF], bins=2, most=SCALE).solve(
        time_limit_s=5.0, seed=0
    )
    assert rows is None
    assert proven


def test_slots_must_hold_the_ranks() -> None:
    """A bin with slots of rank 16 gets no adapter of rank 32."""
    small = Option(1, 16, np.array([1000, 1000]))
    large = Option(1, 32, np.array([SCALE, SCALE]))
    rows, _ = RepackModel(
        np.array([4, 1]), np.array([8, 32]), APART, [small, large], bins=2, most=SCALE
    ).solve(time_limit_s=5.0, seed=0)
    assert rows is not None
    assert sorted(row.tolist() for row in rows) == [[0, 1], [4, 0]]


def test_a_rejected_bin_and_all_heavier_ones_are_cut() -> None:
    """After a no-good no bin holds the rejected counts or more."""
    model = RepackModel(np.array([2, 4]), np.array([8, 16]), APART, [HALF], bins=2, most=2 * SCALE)
    model.forbid(np.array([1, 2]))
    rows, _ = model.solve(time_limit_s=5.0, seed=0)
    assert rows is not None
    assert not any(row[0] >= 1 and row[1] >= 2 for row in rows)


def test_a_cut_reaches_bins_of_heavier_adapters() -> None:
    """If three of the lighter class are too many, so are two of them with one of the heavier class."""
    heavier_first = np.array([[True, True], [False, True]])
    model = RepackModel(np.array([2, 4]), np.array([8, 8]), heavier_first, [HALF], bins=3, most=2 * SCALE)
    model.forbid(np.array([0, 3]))
    rows, _ = model.solve(time_limit_s=5.0, seed=0)
    assert rows is not None
    assert all(row.sum() <= 2 for row in rows)


def test_tasks_are_plain_data_and_solve_like_the_model() -> None:
    """Classes that are not there are left out, and cuts that can't apply are ignored."""
    option = Option(1, 32, np.array([SCALE // 2, 1, SCALE // 4]))
    task = Task(
        demand=np.array([2, 0, 4]),
        ranks=np.array([8, 8, 16]),
        dominates=np.eye(3, dtype=bool),
        options=(option,),
        bins=2,
        most=SCALE,
        start=(np.array([2, 0, 0]),),
        rejected=(np.array([0, 1, 1]),),
        time_limit_s=5.0,
    )
    rows = solve_task(task)
    assert rows is not None
    assert np.sum(rows, axis=0).tolist() == [2, 0, 4]
    assert solve_task(task.without([np.array([1, 0, 1]), np.array([2, 0, 0]), np.array([0, 0, 3])])) is None


def test_the_surrogate_learns_the_predictors_limit() -> None:
    """Fitted limits agree with the predictor on most bins around the plan."""
    fleet = random_fleet(64, seed=0)
    task = problem(fleet)
    classes = aggregate(fleet)
    plan = [classes.counts(each.adapters) for each in Greedy().solve(task).bins]
    found = sample(task, classes, plan, np.random.default_rng(0), 150)
    assert 0.1 < found.admissible.mean() < 0.95
    options = {(each.max_loras, each.slot_rank): each for each in fit_limits(classes, found)}
    assert options
    right = total = 0
    for row, p, slot, good in zip(
        found.counts, found.max_loras, found.slot_rank, found.admissible, strict=True
    ):
        option = options.get((int(p), int(slot)))
        if option is not None:
            right += bool(row @ option.weights <= 1.03 * SCALE) == bool(good)
            total += 1
    assert right >= 0.8 * total


def test_costs_grow_with_the_load() -> None:
    """The fitted latency of a bin is larger with more adapters."""
    fleet = random_fleet(48, seed=0)
    task = problem(fleet, objective=Latency(), max_gpus=6)
    classes = aggregate(fleet)
    sets = [tuple(range(i, 48, 6)) for i in range(6)]
    plan = [classes.counts(each) for each in sets]
    options = fit_costs(classes, sample(task, classes, plan, np.random.default_rng(0), 100))
    assert options
    assert all(np.all(each.weights >= 1) for each in options)


def test_a_wasteful_plan_loses_gpus() -> None:
    """From twice the GPUs that greedy needs the search comes near greedy's number."""
    fleet = random_fleet(32, seed=1)
    task = problem(fleet, time_limit_s=20.0)
    greedy = len(Greedy().solve(task).bins)
    size = max(1, 32 // (2 * greedy))
    bins = real_bins(task, [tuple(range(i, min(i + size, 32))) for i in range(0, 32, size)])
    start = [each for each in bins if each is not None]
    assert len(start) == len(bins) > greedy
    found, statistics = refine(task, start, enough=greedy)
    assert len(found) < len(start)
    assert statistics.improvements >= len(start) - len(found)
    assert sorted(i for each in found for i in each.adapters) == list(range(32))
    assert task.evaluator.evaluate(fleet, found).feasible.all()


def test_cpsat_is_never_worse_than_greedy_and_passes_the_check() -> None:
    """The refinement starts at greedy's plan and keeps it if nothing better is found."""
    task = problem(random_fleet(48, seed=6), time_limit_s=8.0)
    found = CpSat().solve(task)
    check(task, found)
    assert len(found.bins) <= len(Greedy().solve(task).bins)
    assert found.lower_bound is not None
    assert found.lower_bound <= len(found.bins)


def test_latency_on_fixed_gpus_only_improves() -> None:
    """Repacking over a fixed number of GPUs keeps the number and never raises the objective."""
    fleet = random_fleet(36, seed=0)
    task = problem(fleet, objective=Latency(), max_gpus=6, time_limit_s=3.0)
    bins = real_bins(task, [tuple(range(i, min(i + 6, 36))) for i in range(0, 36, 6)])
    start = [each for each in bins if each is not None]
    assert len(start) == 6
    found, _ = refine(task, start)
    assert len(found) == 6
    assert sorted(i for each in found for i in each.adapters) == list(range(36))

    def key(plan: object) -> tuple[float, ...]:
        return task.objective.key(fleet, plan, task.evaluator.evaluate(fleet, plan))  # type: ignore[arg-type]

    assert key(found) <= key(start)
