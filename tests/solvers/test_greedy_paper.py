"""The paper's greedy, against an example worked by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from monotone import problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.solvers.base import Problem
from packer.solvers.baselines.greedy_paper import GreedyPaper
from packer.solvers.order import paper_order
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload


class Scripted:
    """A predictor defined by a function of (adapters, max_loras): None fails, a number is the throughput."""

    name = "scripted"

    def __init__(self, says: Callable[[int, int], float | None]) -> None:
        self.says = says
        self.queried: list[list[tuple[int, int]]] = []

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """As the function says."""
        self.queried.append([(len(b.adapters), b.max_loras) for b in bins])
        found = AnalyticPredictor(1e9).evaluate(workload, bins)
        values = [self.says(len(b.adapters), b.max_loras) for b in bins]
        return replace(
            found,
            total_token_throughput=np.array([value or 0.0 for value in values]),
            starved=np.array([value is None for value in values]),
            memory_error=np.zeros(len(bins), dtype=bool),
        )


def fleet(n: int) -> Workload:
    """`n` adapters whose rates differ so little that only their sets differ."""
    return Workload([Adapter(f"a{i:03d}", 8, 0.1 - 1e-9 * i) for i in range(n)])


def with_script(n: int, script: Scripted, max_gpus: int | None = None) -> Problem:
    """A problem of `n` adapters evaluated by a script."""
    return problem(fleet(n), predictor=script, max_gpus=max_gpus)


def test_order_is_rank_then_zigzag_of_rates() -> None:
    """Largest rank first; within a rank highest, lowest, second highest, second lowest rate, …"""
    rows = [(8, 1.0), (16, 5.0), (8, 3.0), (8, 2.0), (8, 4.0), (16, 6.0), (8, 5.0)]
    workload = Workload([Adapter(f"a{i}", rank, rate) for i, (rank, rate) in enumerate(rows)])
    #  rank 16: 6.0 (a5), 5.0 (a1); rank 8: 5.0 (a6), 1.0 (a0), 4.0 (a4), 2.0 (a3), 3.0 (a2)
    assert paper_order(workload).tolist() == [5, 1, 6, 0, 4, 3, 2]


def test_worked_example() -> None:
    """36 adapters; a server holds at most 20 of them, the better the more slots it has.

    GPU 0: at 8 only p = 8 is tried: commit. At 16 p = 8 and 16 are tried, 16 is better: commit. At 32 p = 16
    and 32 fail: roll back 16 adapters, close. GPU 1: the same from adapter 16, up to 16 adapters. The queue ends
    with 20: p = 16 and 32 are tried, 32 is better, though there are not as many adapters.
    """
    script = Scripted(lambda n, p: float(n * 10 + p) if n <= 20 else None)
    found = GreedyPaper().solve(with_script(36, script))
    line = [i for k in range(18) for i in (k, 35 - k)]  # equal rates in zigzag: first, last, second, …
    assert [(list(b.adapters), b.max_loras) for b in found.bins] == [(line[:16], 16), (line[16:], 32)]
    assert script.queried == [
        [(8, 8)],
        [(16, 8), (16, 16)],
        [(32, 16), (32, 32)],
        [(8, 8)],
        [(16, 8), (16, 16)],
        [(20, 16), (20, 32)],
    ]
    assert found.unplaced == ()


def test_fewer_adapters_than_a_testing_point_are_tested_at_the_end() -> None:
    """Before 8 adapters nothing is tested, and at the end with the first candidate of `max_loras`."""
    script = Scripted(lambda n, p: 1.0)
    found = GreedyPaper().solve(with_script(5, script))
    assert script.queried == [[(5, 8)]]
    assert [b.max_loras for b in found.bins] == [8]


def test_a_set_that_fails_at_a_testing_point_goes_to_the_next_gpu() -> None:
    """Rolled back, adapters are offered to the next GPU, also where they are the last of the queue."""
    found = GreedyPaper().solve(with_script(16, Scripted(lambda n, p: 1.0 if n <= 12 else None)))
    assert [len(b.adapters) for b in found.bins] == [8, 8]
    assert found.unplaced == ()


def test_slots_follow_the_higher_throughput() -> None:
    """Of the current and the next `max_loras` the one with more throughput is kept, the old one included."""
    script = Scripted(lambda n, p: 1000.0 - p)
    found = GreedyPaper().solve(with_script(32, script))
    assert [b.max_loras for b in found.bins] == [8]


@pytest.mark.parametrize("max_gpus", [None, 3, 1])
def test_a_last_test_that_fails_is_infeasible(max_gpus: int | None) -> None:
    """The rest that no testing point saw is tested at the end; if it fails, no further GPU is opened for it."""
    script = Scripted(lambda n, p: 1.0 if n <= 8 else None)
    found = GreedyPaper().solve(with_script(12, script, max_gpus=max_gpus))
    assert [len(b.adapters) for b in found.bins] == [8]
    assert found.unplaced == (4, 7, 5, 6)  # the end of 0, 11, 1, 10, 2, 9, 3, 8, 4, 7, 5, 6
    assert "the last test, of 12 adapters on one GPU, failed" in found.reasons[0]
    assert "--solver greedy" in found.reasons[0]


def test_too_few_gpus_say_so() -> None:
    """Where GPUs run out before the queue does, what would help is more of them."""
    script = Scripted(lambda n, p: 1.0 if n <= 8 else None)
    found = GreedyPaper().solve(with_script(24, script, max_gpus=2))
    assert [len(b.adapters) for b in found.bins] == [8, 8]
    assert len(found.unplaced) == 8
    assert "--gpus" in found.reasons[0]


def test_a_first_test_that_fails_ends_the_search() -> None:
    """If 8 adapters fail on an empty GPU they fail on every one: the paper's method gives up, and says so."""
    script = Scripted(lambda n, p: 1.0 if n < 8 else None)
    found = GreedyPaper().solve(with_script(9, script))
    assert found.bins == ()
    assert len(found.unplaced) == 9
    assert "8 adapters on an empty GPU failed" in found.reasons[0]
    assert "--solver greedy" in found.reasons[0]
    assert len(script.queried) == 1


def test_memory_errors_lose_against_any_throughput() -> None:
    """Slots that fail to start are never preferred, even to a low throughput."""

    class Memory(Scripted):
        def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
            found = super().evaluate(workload, bins)
            full = np.array([b.max_loras > 8 for b in bins])
            return replace(found, memory_error=full)

    found = GreedyPaper().solve(with_script(16, Memory(lambda n, p: float(p))))
    assert [b.max_loras for b in found.bins] == [8]


def test_one_gpu_type_only() -> None:
    """Several GPU types are refused before running."""
    several = replace(with_script(8, Scripted(lambda n, p: 1.0)), profiles=(small_profile(), small_profile("b/c")))
    assert "one GPU type" in str(GreedyPaper().supports(several))


@pytest.mark.parametrize("n", [385, 800])
def test_no_gpu_goes_beyond_the_last_testing_point(n: int) -> None:
    """After 384 adapters nothing would be tested any more, so the GPU is closed."""
    found = GreedyPaper().solve(with_script(n, Scripted(lambda n, p: 1.0)))
    assert max(len(b.adapters) for b in found.bins) == 384
    assert found.unplaced == ()


def test_tests_that_are_evaluated_ahead_change_no_plan() -> None:
    """Where a call costs more than a bin, likely tests are evaluated in one call: fewer calls, the same bins."""

    def says(n: int, slots: int) -> float | None:
        return None if n > 6 * slots or n > 140 else n - slots / 100

    one_by_one, ahead = Scripted(says), Scripted(says)
    plain, quick = with_script(500, one_by_one), with_script(500, ahead)
    quick.evaluator.fast = True
    found = GreedyPaper().solve(quick)
    assert found == GreedyPaper().solve(plain)
    assert [len(item.adapters) for item in found.bins] == [128, 128, 128, 116]
    assert len(ahead.queried) < len(one_by_one.queried) / 3
