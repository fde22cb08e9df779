"""`mixed`: the cheapest mix of kinds of server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.gpu import GpuKind
from packer.io.profiles import load_profile
from packer.objectives.cost import Cost
from packer.objectives.gpus import Gpus
from packer.plan import Status
from packer.planning.assemble import assemble
from packer.planning.solve import solve
from packer.planning.verify import check
from packer.profile import Profile
from packer.solvers.base import Problem, Solution, used_gpus
from packer.solvers.by_model import solved
from packer.solvers.columns.exact import Exact
from packer.solvers.columns.mixed import Mixed
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.solver import Greedy
from packer.solvers.slots import real_bins
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload


def kind(name: str, price: float, peak_tok_s: float, model: str = "test-model") -> tuple[Profile, AnalyticPredictor]:
    """A server of this price, and what it serves."""
    base = small_profile(f"{name}/{model}")
    terms = {"base_ms": 1e4 / peak_tok_s}
    profile = replace(
        base.with_coefficients(**terms),
        gpu=replace(base.gpu, name=name, price_per_hour=price),
        model=replace(base.model, name=model),
    )
    return profile, AnalyticPredictor(peak_tok_s)


KINDS = [kind("large", 3.0, 4000.0), kind("small", 1.2, 1500.0)]


def problem(fleet: Workload, kinds: list[tuple[Profile, AnalyticPredictor]], **given: object) -> Problem:
    """A problem of the lowest price; the searches end by themselves."""
    evaluator = Evaluator(dict(kinds), Cost())
    settings: dict[str, object] = {"time_limit_s": 120.0, **given}
    return Problem(fleet, tuple(profile for profile, _ in kinds), Cost(), evaluator, **settings)  # type: ignore[arg-type]


def fleet(n: int, seed: int, models: tuple[str | None, ...] = (None,)) -> Workload:
    """`n` adapters with a few rates and ranks."""
    rng = np.random.default_rng(seed)
    return Workload(
        [
            Adapter(
                f"a{i}", int(rng.choice([8, 32])), float(rng.choice([0.5, 1.0, 2.0])), model=models[i % len(models)]
            )
            for i in range(n)
        ]
    )


def price(found: Solution) -> float:
    """Price per hour of all servers."""
    return sum(item.profile.gpu.price_per_hour or 0.0 for item in found.bins)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into sets."""
    if not items:
        yield []
        return
    first, *rest = items
    for found in partitions(rest):
        yield [[first], *found]
        for k in range(len(found)):
            yield [*found[:k], [first, *found[k]], *found[k + 1 :]]


def cheapest(given: Problem) -> float:
    """The lowest price of any plan, by trying every set of adapters on every kind."""
    n = len(given.workload)
    known: dict[tuple[int, ...], float] = {}
    for bits in range(1, 2**n):
        members = tuple(i for i in range(n) if bits >> i & 1)
        prices = [
            profile.gpu.price_per_hour or 0.0
            for profile in given.profiles
            if real_bins(replace(given, profiles=(profile,)), [members])[0] is not None
        ]
        known[members] = min(prices, default=np.inf)
    return min(sum(known[tuple(sorted(part))] for part in found) for found in partitions(list(range(n))))


@pytest.mark.parametrize("seed", range(3))
def test_small_fleets_get_the_cheapest_plan(seed: int) -> None:
    """Against every plan there is: its price, and as high a bound."""
    given = problem(fleet(6, seed), KINDS)
    found = Mixed().solve(given)
    check(given, found)
    best = cheapest(given)
    assert price(found) == pytest.approx(best)
    assert found.lower_bound == pytest.approx(best)


@pytest.mark.parametrize("seed", range(3))
def test_small_fleets_of_several_kinds_are_proven(seed: int) -> None:
    """Where every possible server can be evaluated, the lowest price is proven for any predictor."""
    given = problem(fleet(6, seed), KINDS)
    found = Mixed().solve(given)
    assert found.proven
    assert found.lower_bound == pytest.approx(price(found)) == pytest.approx(cheapest(given))
    made = assemble(given, found, "mixed", 0.0)
    assert made.status is Status.OPTIMAL


def test_one_kind_is_counted_as_exact_counts() -> None:
    """With one kind of server the price is that of the fewest servers, with their bound."""
    given = problem(fleet(9, 3), KINDS[:1])
    found, counted = Mixed().solve(given), Exact().solve(replace(given, objective=Gpus()))
    assert price(found) == pytest.approx(3.0 * len(counted.bins))
    assert found.lower_bound == pytest.approx(3.0 * (counted.lower_bound or 0.0))


def test_never_dearer_than_greedy() -> None:
    """Two models and two kinds each: at most what greedy costs, each model on its own servers."""
    kinds = [
        kind(name, cost, peak, model)
        for model in ("llama", "qwen")
        for name, cost, peak in (("large", 3.0, 4000.0), ("small", 1.2, 1500.0))
    ]
    given = problem(fleet(24, 1, ("llama", "qwen")), kinds)
    found = Mixed().solve(given)
    check(given, found)
    assert price(found) <= price(solved(given, Greedy())) + 1e-9
    assert found.lower_bound is not None
    assert found.lower_bound <= price(found) + 1e-9


def test_gpus_at_hand_are_kept() -> None:
    """With two of the small kind, the rest is on large ones."""
    given = problem(fleet(20, 1), KINDS, stock={"small": 2})
    found = Mixed().solve(given)
    check(given, found)
    assert not found.unplaced
    assert used_gpus(found.bins)["small"] <= 2


def test_gpus_at_hand_go_to_the_model_that_saves_most() -> None:
    """Two small servers for two models: as cheap as the best division of them, each model planned alone."""
    kinds = [
        kind(name, cost, peak, model)
        for model in ("llama", "qwen")
        for name, cost, peak in (("large", 3.0, 4000.0), ("small", 1.2, 1500.0))
    ]
    whole = fleet(24, 0, ("llama", "qwen"))
    given = problem(whole, kinds, stock={"small": 2})
    found = Mixed().solve(given)
    check(given, found)
    prices = {}
    for model in ("llama", "qwen"):
        own = whole.of_model(model)[1]
        offered = [each for each in kinds if each[0].model.name == model]
        for count in range(3):
            prices[model, count] = price(Mixed().solve(problem(own, offered, stock={"small": count})))
    best = min(prices["llama", count] + prices["qwen", 2 - count] for count in range(3))
    assert price(found) == pytest.approx(best)


@pytest.mark.parametrize(("rate", "cheapest_price"), [(0.65, 5.4), (1.0, 8.4)])
def test_bound_counts_whole_servers_of_each_kind(rate: float, cheapest_price: float) -> None:
    """Four small servers cost 4.8 and six 7.2, as much as the relaxation, and hold too little: so says the bound."""
    given = problem(Workload([Adapter(f"a{i}", 8, rate) for i in range(24)]), KINDS)
    found = Mixed().solve(given)
    assert price(found) == pytest.approx(cheapest_price)
    assert found.lower_bound == pytest.approx(cheapest_price)


def test_trees_that_lead_the_search_prove_nothing() -> None:
    """The twin evaluates the plan, and may admit what trees exclude: the bound of such a search is an estimate."""
    fast = load_profile("h100-64gb/llama-3.1-8b-instruct")
    slow = fast.with_coefficients(**{term: 2.0 * ms for term, ms in fast.latency.coefficients.items()})
    slow = replace(slow, name="other", gpu=replace(slow.gpu, name="other"))
    kinds = [GpuKind(fast, 3.0), GpuKind(slow, 1.4)]
    whole = Workload([Adapter(f"a{i}", 8, 3.0) for i in range(10)])
    found = solve(whole, kinds, "cost", solver="mixed", margin=0.05, verify=False, with_headroom=False)
    assert found.lower_bound == pytest.approx(2.8)
    assert not found.bound_proven
    assert found.bound_source.startswith("estimate: ")
