"""The improved greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monotone import problem

from packer.adapter import Adapter
from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.objectives.gpus import Gpus
from packer.planning.verify import check
from packer.settings import Settings
from packer.solvers.base import Problem, Solution
from packer.solvers.baselines.greedy_paper import GreedyPaper
from packer.solvers.bounds import Bounds
from packer.solvers.columns.exact import Exact
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.largest import largest
from packer.solvers.greedy.solver import Greedy
from packer.solvers.greedy.top_up import _first_fitting
from packer.solvers.slots import SlotSearch
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.workload import Workload

PROFILE = small_profile()
FLEETS = st.lists(st.tuples(st.sampled_from([4, 8, 16, 32, 64]), st.floats(0.01, 3.0)), min_size=1, max_size=60).map(
    lambda rows: Workload([Adapter(f"a{i}", rank, rate) for i, (rank, rate) in enumerate(rows)])
)


def solved(workload: Workload, peak: float = 4000.0, **changes: object) -> tuple[Problem, Solution]:
    """The problem and greedy's solution, checked."""
    known = problem(workload, predictor=AnalyticPredictor(peak))
    posed = replace(known, **changes)  # type: ignore[arg-type]
    found = Greedy().solve(posed)
    check(posed, found)
    return posed, found


@given(FLEETS)
@settings(max_examples=60, deadline=None)
def test_never_more_gpus_than_the_paper(workload: Workload) -> None:
    """Where the paper's greedy finds a plan, this one finds one with as few GPUs or fewer, all holding."""
    posed, found = solved(workload)
    paper = GreedyPaper().solve(posed)
    rows = posed.evaluator.evaluate(workload, found.bins)
    assert bool(rows.feasible.all())
    if not paper.unplaced:
        assert found.unplaced == ()
        assert len(found.bins) <= len(paper.bins)


@pytest.mark.parametrize("seed", range(6))
def test_bound_exact_greedy_paper_stand_in_order(seed: int) -> None:
    """A lower bound is at most the exact plan, that at most greedy's, and that at most the paper's."""
    posed = problem(random_fleet(24, seed=seed, rates=(1.6, 0.8, 0.2)), time_limit_s=20.0)
    bound = Bounds().solve(posed).lower_bound
    exact, own, paper = (solver.solve(posed) for solver in (Exact(), Greedy(), GreedyPaper()))
    assert bound is not None
    assert bound <= len(exact.bins) <= len(own.bins)
    assert paper.unplaced or len(own.bins) <= len(paper.bins)


def test_fewer_gpus_where_the_paper_stops_at_testing_points() -> None:
    """Between two testing points there is room that bisection finds."""
    posed, found = solved(random_fleet(256, seed=0, rates=(0.1, 0.05, 0.025)))
    assert len(found.bins) < len(GreedyPaper().solve(posed).bins)


def test_a_failing_rest_goes_to_a_fresh_gpu() -> None:
    """Where the paper's method gives up on the first 8 adapters, smaller sets are tried."""
    workload = random_fleet(12, seed=1, rates=(2.0,))
    posed, found = solved(workload)
    assert GreedyPaper().solve(posed).unplaced
    assert found.unplaced == ()


class Scripted:
    """Serves the sets of adapters that a function names, with more throughput the more slots there are."""

    name = "scripted"

    def __init__(self, serves: Callable[[tuple[int, ...]], bool]) -> None:
        self.serves = serves

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """As the function says."""
        found = AnalyticPredictor(1e9).evaluate(workload, bins)
        return replace(
            found,
            total_token_throughput=np.array([float(b.max_loras) for b in bins]),
            starved=np.array([not self.serves(b.adapters) for b in bins]),
        )


def test_it_goes_on_where_the_last_test_of_the_paper_fails() -> None:
    """Of 20 adapters the paper puts 16 on a GPU and gives up; the last 4 get a fresh one, which beats five GPUs."""
    workload = random_fleet(20, seed=0, rates=(0.1,), ranks=(8,))
    predictor = Scripted(lambda held: len(held) in (8, 16) or len(held) <= 4)
    paper = GreedyPaper().solve(problem(workload, predictor=predictor))
    assert len(paper.unplaced) == 4
    posed = problem(workload, predictor=predictor)
    found = Greedy().solve(posed)
    check(posed, found)
    assert [len(b.adapters) for b in found.bins] == [16, 4]
    assert Greedy().solve(replace(posed, max_gpus=1)).unplaced == tuple(sorted(paper.unplaced))


def test_slots_never_exceed_adapters() -> None:
    """Where the plan of the paper wins, slots that no adapter can take are taken away."""
    workload = Workload([Adapter(f"a{i}", 8, 0.1 - 1e-6 * i) for i in range(36)])
    predictor = Scripted(lambda held: len(held) in (8, 16) or len(held) <= 4 or (len(held) == 20 and 0 not in held))
    posed = problem(workload, predictor=predictor)
    paper = GreedyPaper().solve(posed)
    assert [(len(b.adapters), b.max_loras) for b in paper.bins] == [(16, 16), (20, 32)]
    found = Greedy().solve(posed)
    check(posed, found)
    assert [(len(b.adapters), b.max_loras <= len(b.adapters)) for b in found.bins] == [(16, True), (20, True)]


def test_a_hot_adapter_is_named_with_the_rate_it_may_have() -> None:
    """An adapter that starves an empty GPU stays unplaced alone, with its rate and what would help."""
    workload = Workload([Adapter("hot", 8, 30.0), *(Adapter(f"a{i}", 8, 0.1) for i in range(5))])
    posed, found = solved(workload)
    assert [workload.adapters[i].name for i in found.unplaced] == ["hot"]
    assert "'hot'" in found.reasons[0]
    rate = float(found.reasons[0].partition("about ")[2].partition(" req/s")[0])
    alone = [Bin((0,), Settings(1, 8), PROFILE, (rate * factor / 30.0,)) for factor in (0.99, 1.02)]
    assert posed.evaluator.evaluate(workload, alone).feasible.tolist() == [True, False]
    assert "--max-replicas" in found.reasons[0]


def test_a_hot_adapter_is_split_where_allowed() -> None:
    """With replicas allowed, the hot adapter's shares sum to 1 over as few GPUs as hold them."""
    workload = Workload([Adapter("hot", 8, 25.0), *(Adapter(f"a{i}", 8, 0.1) for i in range(5))])
    needed = int(solved(workload)[1].reasons[0].partition("--max-replicas ")[2].partition(",")[0])
    _, found = solved(workload, max_replicas=needed)
    assert found.unplaced == ()
    shares = [share for b in found.bins for i, share in zip(b.adapters, b.shares, strict=True) if i == 0]
    assert shares == pytest.approx([1 / needed] * needed, rel=0.1)
    assert solved(workload, max_replicas=needed - 1)[1].unplaced == (0,)


def test_an_adapter_that_does_not_fit_in_memory_says_so() -> None:
    """A rank whose single slot leaves no KV cache is reported as a memory problem."""
    tiny = replace(PROFILE, memory=replace(PROFILE.memory, kv_budget_bytes=3e8))
    workload = Workload([Adapter("wide", 512, 0.1), Adapter("slim", 8, 0.1)])
    _, found = solved(workload, profiles=(tiny,))
    assert found.unplaced == (0,)
    assert "does not fit an empty GPU" in found.reasons[0]


def test_too_few_gpus_say_how_many_are_needed() -> None:
    """With a limit that is too low, the reasons name adapters and the number of GPUs that would do."""
    workload = random_fleet(60, seed=3, rates=(0.6, 0.3))
    whole = len(solved(workload)[1].bins)
    _, found = solved(workload, max_gpus=whole - 1)
    assert len(found.bins) == whole - 1
    assert found.unplaced
    assert f"--gpus {whole}" in found.reasons[0]
    assert workload.adapters[found.unplaced[0]].name in found.reasons[0]


def test_top_up_uses_room_that_the_next_in_line_does_not_fit() -> None:
    """Light adapters from the back of the queue fill what a heavy one leaves open."""
    rates = [7.0] * 4 + [0.5] * 8
    workload = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)])
    _, found = solved(workload)
    assert len(found.bins) == 4


def test_out_of_time_still_places_every_adapter() -> None:
    """Stopped at once, every bin still holds and nothing is left out."""
    posed, found = solved(random_fleet(80, seed=5, rates=(0.4, 0.2)), stop=lambda: True)
    assert found.unplaced == ()
    assert posed.evaluator.evaluate(posed.workload, found.bins).feasible.all()


def test_the_load_is_evened_out() -> None:
    """With the number of GPUs settled, none is left nearly full beside a nearly empty one."""
    posed, found = solved(random_fleet(130, seed=7, rates=(0.2,), ranks=(8,)))
    loads = [b.offered_tok_s(posed.workload) for b in found.bins]
    assert len(loads) > 1
    assert max(loads) < 1.1 * min(loads)


def test_thousands_of_adapters_take_few_evaluations() -> None:
    """Bins of equal content are evaluated once: 4,096 adapters in a few classes take under 2,000 evaluations."""
    evaluated: list[Bin] = []

    class Counting(AnalyticPredictor):
        def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
            evaluated.extend(bins)
            return super().evaluate(workload, bins)

    known = problem(random_fleet(4096, seed=2, rates=(0.1, 0.05, 0.025)), predictor=Counting())
    Greedy().solve(known)
    assert len(evaluated) < 2000


@given(*(st.integers(low, 200) for low in (0, 0, 1, 1)), st.integers(1, 20), st.sampled_from([1, 4, 15]))
@settings(max_examples=300, deadline=None)
def test_search_finds_the_largest(true_size: int, low: int, guess: int, limit: int, step: int, batch: int) -> None:
    """Whatever the guess, the search ends at the largest feasible size, having evaluated the next one, in few calls."""
    low = min(low, true_size, limit)
    calls: list[list[int]] = []

    def fits(sizes: Sequence[int]) -> list[bool]:
        assert list(sizes) == sorted({*sizes})
        assert all(low < n <= limit for n in sizes)
        assert len(calls) < 24  # a search that gets nowhere fails, it does not go on for ever
        calls.append(list(sizes))
        return [n <= true_size for n in sizes]

    found = largest(fits, guess, limit, lambda: False, step, low=low, batch=batch)
    assert found == min(true_size, limit)
    assert len(calls) <= (24 if batch == 1 else 12)
    assert all(len(sizes) <= max(batch, 7) for sizes in calls)
    if found < limit:
        assert found + 1 in [n for sizes in calls for n in sizes]


@pytest.mark.parametrize(
    ("failing", "expected"), [({20, 40}, 39), ({30, 40}, 39), ({32, 40, 41}, 31), (set(range(33, 90)) - {56, 88}, 32)]
)
def test_the_search_goes_from_the_guess_to_the_first_that_fails(failing: set[int], expected: int) -> None:
    """Predictors are not monotone: sizes that hold beyond one that fails are not taken, one below does not count."""

    def fits(sizes: Sequence[int]) -> list[bool]:
        return [n not in failing and n < 90 for n in sizes]

    assert largest(fits, 32, 100, lambda: False, 8, batch=15) == expected


def test_out_of_time_the_search_settles_for_the_first_size_that_holds() -> None:
    """The guess falls by an eighth at a time, and nothing larger is tried."""
    calls: list[int] = []

    def fits(sizes: Sequence[int]) -> list[bool]:
        calls.extend(sizes)
        return [n <= 50 for n in sizes]

    assert largest(fits, 64, 200, lambda: True, 4, batch=15) == 49
    assert calls == [64, 56, 49]


def test_top_up_of_a_split_server_counts_the_part_that_it_serves() -> None:
    """The heaviest adapter that fits beside half of another is found, as by trying each in turn."""
    rates = [8.0, 1.0, 7.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.5]
    workload = Workload([Adapter(f"a{i}", 8, rate) for i, rate in enumerate(rates)])
    posed = Problem(workload, (small_profile(),), Gpus(), Evaluator(AnalyticPredictor()), max_replicas=2)
    slots = SlotSearch(posed)
    kinds = np.arange(2, len(rates))
    found = {}
    for share in (0.5, 0.99):
        half = slots.make([0, 1], 3, shares=(share, 1.0))
        each = [slots.make([0, 1, k], 3, shares=(share, 1.0, 1.0)) for k in kinds.tolist()]
        fits = posed.evaluator.evaluate(workload, each).feasible
        found[share] = _first_fitting(slots, half, kinds)
        assert found[share] == (int(np.argmax(fits)) if fits.any() else None)
    assert found[0.5] != found[0.99]
