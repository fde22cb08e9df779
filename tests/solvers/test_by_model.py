"""Several base models and several kinds of server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packer import registry
from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError, VerificationError
from packer.evaluation import Evaluation
from packer.gpu import GpuKind, base_model
from packer.objectives.gpus import Gpus
from packer.plan import Moves, Plan, Status
from packer.planning.solve import solve
from packer.planning.verify import check as verify
from packer.profile import Profile
from packer.solvers.base import Problem, Solution, used_gpus
from packer.solvers.baselines.spread import Spread
from packer.solvers.by_model import _kinds, _of_kinds, _shares
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.solver import Greedy
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.workload import Workload


def kind(name: str, model: str, price: float, tensor: int = 1) -> Profile:
    """A small server of this GPU and model."""
    base = small_profile()
    return replace(
        base,
        name=f"{name}/{model}",
        model=replace(base.model, name=model),
        gpu=replace(base.gpu, name=name, price_per_hour=price),
        engine=replace(base.engine, tensor_parallel_size=tensor),
    )


def fleet(n: int = 30, models: tuple[str, ...] = ("llama", "qwen")) -> Workload:
    """`n` adapters, the models in turn."""
    rng, adapters = np.random.default_rng(3), list[Adapter]()
    for i in range(n):
        rank, rate = int(rng.choice([8, 16])), float(rng.choice([0.4, 0.2]))
        adapters.append(Adapter(f"a{i}", rank, rate, model=models[i % len(models)]))
    return Workload(adapters)


KINDS = [kind("big", "llama", 3.0), kind("small", "llama", 2.0), kind("big", "qwen", 3.0)]


class Patient(Greedy):
    """Greedy for one kind of server, which stores the time that it is given."""

    def __init__(self) -> None:
        self.given_s: list[float] = []

    def supports(self, problem: Problem) -> str | None:
        """One kind of server."""
        return "one kind" if len(problem.profiles) > 1 else None

    def solve(self, problem: Problem) -> Solution:
        """Greedy's plan."""
        self.given_s.append(problem.remaining_s())
        return super().solve(problem)


def test_each_model_and_each_kind_gets_its_share_of_the_time() -> None:
    """A search that uses all of its time leaves as much for the next model and the next kind of server: half of it
    goes to the model on one kind, half of the rest to the first kind of the other model."""
    solver = Patient()
    plan_of(fleet(), KINDS, solver=solver, time_limit_s=1000.0)
    assert [round(each / 1000.0, 1) for each in solver.given_s] == [0.5, 0.5, 1.0]


def plan_of(workload: Workload, kinds: Any, **changes: Any) -> Plan:
    """A plan by the analytic predictor, without margin and verification."""
    settings: dict[str, Any] = {"predictor": AnalyticPredictor(), "verify": False, "margin": 0.0, **changes}
    return solve(workload, kinds, **settings)


def check(plan: Plan) -> None:
    """No server holds an adapter of another model."""
    for item in plan.bins:
        for i in item.adapters:
            model = plan.workload.adapters[i].model
            assert model is not None
            assert base_model(model) == item.profile.model.name


@pytest.mark.parametrize("solver", sorted(set(registry.names("solver")) - {"replan"}))
def test_every_solver_takes_models_and_kinds(solver: str) -> None:
    """Solvers that know one model and one kind of GPU plan fleets of several."""
    given: dict[str, Any] = {"solver": solver, "time_limit_s": 5.0}
    if solver in ("spread", "spread-refined"):
        given |= {"objective": "latency", "max_gpus": 4}
    plan = plan_of(fleet(16), KINDS, **given)
    check(plan)
    assert sorted(i for item in plan.bins for i in item.adapters) + sorted(plan.unplaced) == list(range(16))
    assert {item.profile.model.name for item in plan.bins} == {"llama", "qwen"}


def test_models_need_what_they_need_alone() -> None:
    """The plan of a fleet of two models is that of each one beside the other."""
    whole = plan_of(fleet(), KINDS[1:])
    alone = [plan_of(fleet().of_model(model)[1], KINDS[1:]) for model in ("llama", "qwen")]
    assert whole.n_gpus == sum(plan.n_gpus for plan in alone)
    assert whole.lower_bound is not None
    assert whole.lower_bound == sum(plan.lower_bound or 0.0 for plan in alone)


def test_gpus_at_hand_are_shared_and_kept() -> None:
    """A kind of which there are few is used up to that, and the rest goes to another kind or has no place."""
    hot = fleet(80).scaled(3.0)
    few = plan_of(hot, [GpuKind(KINDS[0], available=1), KINDS[1], KINDS[2]])
    assert used_gpus(few.bins)["big"] == 1
    assert few.status is Status.INFEASIBLE
    assert all(few.workload.adapters[i].model == "qwen" for i in few.unplaced)
    assert any("1 big can't hold" in reason and "more GPUs at hand" in reason for reason in few.reasons)
    enough = plan_of(hot, KINDS)
    assert enough.status is not Status.INFEASIBLE
    exact = plan_of(hot, [GpuKind(KINDS[0], available=used_gpus(enough.bins)["big"]), *KINDS[1:]])
    assert exact.n_gpus == enough.n_gpus


class _Four(AnalyticPredictor):
    """A server on "four" serves as much as four others."""

    def _evaluation(self, workload: Workload, bin_: Bin) -> Evaluation:
        four = bin_.profile.gpu.name == "four"
        return AnalyticPredictor(16000.0 if four else 4000.0)._evaluation(workload, bin_)


@pytest.mark.parametrize(("solver", "limit_s"), [("greedy", None), ("mixed", 0.8), ("cpsat", 0.8)])
@pytest.mark.parametrize("models", [("llama",), ("llama", "qwen")])
def test_a_dearer_kind_is_taken_where_the_cheapest_needs_too_many_gpus(
    solver: str, limit_s: float | None, models: tuple[str, ...]
) -> None:
    """A limit on the GPUs makes a plan infeasible only if the kind that needs the fewest does not do either."""
    kinds = [kind(gpu, each, price) for each in models for gpu, price in (("one", 1.0), ("four", 9.0))]
    posed = {"solver": solver, "objective": "cost", "predictor": _Four(), "time_limit_s": limit_s}
    workload = fleet(60 * len(models), models)
    free = plan_of(workload, kinds, **posed)
    assert {item.profile.gpu.name for item in free.bins} == {"one"}
    few = plan_of(workload, kinds, **posed, max_gpus=len(models))
    assert few.status is not Status.INFEASIBLE
    assert {item.profile.gpu.name for item in few.bins} == {"four"}
    assert few.n_gpus == len(models) < free.n_gpus


def test_the_verifier_counts_gpus_at_hand() -> None:
    """A solver that takes more of a kind than there are is refused."""

    class Greedier:
        name = "greedier"

        def supports(self, _problem: object) -> None:
            return None

        def solve(self, problem: Any) -> Solution:
            server = problem.profile
            return Solution(tuple(Bin((i,), server.settings(1, 16), server) for i in range(len(problem.workload))))

    plan = plan_of(fleet(4, ("llama",)), GpuKind(KINDS[0], available=2), solver=Greedier())
    assert plan.n_gpus == 2  # cut down, and the rest has no place
    evaluator = Evaluator(AnalyticPredictor())
    problem = Problem(fleet(4, ("llama",)), (KINDS[0],), Gpus(), evaluator, stock={"big": 1})
    with pytest.raises(VerificationError, match="more than the 1 at hand"):
        verify(problem, Greedier().solve(problem))


def test_a_tensor_parallel_group_counts_its_gpus() -> None:
    """A server on two GPUs is two GPUs, in the plan, its objective, its bound and under a limit."""
    single = plan_of(fleet(20, ("llama",)), kind("big", "llama", 3.0))
    double = plan_of(fleet(20, ("llama",)), kind("big", "llama", 3.0, tensor=2))
    assert len(double.bins) == len(single.bins)
    assert double.n_gpus == double.objective_value[0] == 2 * single.n_gpus
    assert double.lower_bound is not None
    assert double.lower_bound % 2 == 0
    limited = plan_of(fleet(20, ("llama",)), kind("big", "llama", 3.0, tensor=2), max_gpus=3)
    assert limited.n_gpus == 2
    spread = plan_of(
        fleet(20, ("llama",)), kind("big", "llama", 3.0, tensor=2), objective="latency", max_gpus=8, solver="spread"
    )
    assert (len(spread.bins), spread.n_gpus) == (4, 8)
    with pytest.raises(IncompatibleError, match="can't take 1 GPUs for servers on more of them"):
        plan_of(
            fleet(20, ("llama",)), kind("big", "llama", 3.0, tensor=2), objective="latency", max_gpus=1, solver="spread"
        )


@pytest.mark.parametrize("gpus", [4, 9, 30])
def test_given_gpus_are_divided_among_the_models(gpus: int) -> None:
    """All GPUs are used, each model has some, and no division with one GPU moved is better."""
    uneven = Workload([replace(a, rate=a.rate * (3.0 if a.model == "llama" else 1.0)) for a in fleet(24).adapters])
    plan = plan_of(uneven, KINDS[1:], objective="latency", max_gpus=gpus, solver="spread")
    check(plan)
    counts = {m: sum(item.profile.model.name == m for item in plan.bins) for m in ("llama", "qwen")}
    assert sum(counts.values()) <= gpus
    if gpus < 24:
        assert sum(counts.values()) == gpus
        assert counts["llama"] > counts["qwen"]


def test_no_more_gpus_are_divided_than_there_are_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit far above the number of adapters costs no more plans: each adapter has a server long before."""
    calls: list[Problem] = []
    monkeypatch.setattr(
        Spread, "solve", lambda self, problem, once=Spread.solve: calls.append(problem) or once(self, problem)
    )
    plan = plan_of(fleet(20), [KINDS[0], KINDS[2]], objective="latency", solver="spread", max_gpus=500)
    assert plan.n_gpus == 20
    assert len(calls) < 40


def test_divisions_share_the_time_and_use_all_gpus_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search of a division gets an equal part of the time; once it is over, the load divides the GPUs that are
    left instead of leaving them idle."""
    shares: list[float] = []
    monkeypatch.setattr(Spread, "supports", lambda _, posed: shares.append(posed.remaining_s() / 900.0))
    posed = {"objective": "latency", "solver": "spread"}
    for adapters, gpus in ((20, 4), (40, 30)):  # few divisions, and many
        plan_of(fleet(adapters), [KINDS[0], KINDS[2]], **posed, max_gpus=gpus, time_limit_s=900.0)
        assert shares[-6:] == pytest.approx([1.0 / left for left in range(6, 0, -1)], rel=0.1)
    late = plan_of(fleet(40), [KINDS[0], KINDS[2]], **posed, max_gpus=30, time_limit_s=1e-6)
    assert late.n_gpus == 30


def test_divisions_are_complete() -> None:
    """Every way to give k GPUs to m models, each once."""
    assert sorted(_shares(2, 3)) == sorted([a, b, 2 - a - b] for a in range(3) for b in range(3 - a))
    assert _shares(0, 2) == [[0, 0]]


def test_the_price_has_a_proven_bound() -> None:
    """No plan costs less than the bound, which the cheapest kind for each adapter gives."""
    plan = plan_of(fleet(40), KINDS, objective="cost", predictor="twin", margin=0.0)
    assert plan.lower_bound is not None
    assert plan.bound_proven
    assert 0.0 < plan.lower_bound <= plan.objective_value[0]
    assert plan.objective_value[0] == sum(item.profile.gpu.price_per_hour or 0.0 for item in plan.bins)


def test_a_running_plan_of_two_models_is_followed() -> None:
    """Servers keep their numbers, adapters their servers, and a model that is new starts its own."""
    old = plan_of(fleet(20), KINDS[1:])
    more = Workload([*fleet(20).adapters, Adapter("new", 8, 0.2, model="qwen")])
    plan = plan_of(more, KINDS[1:], objective="moves", solver="replan", old_plan=old)
    check(plan)
    assert plan.moves is not None
    assert plan.moves.servers[: len(old.bins)] == tuple(range(len(old.bins)))
    assert len(plan.moves.adapters) <= 1
    third = Workload([*fleet(20).adapters, Adapter("first", 8, 0.2, model="third")])
    plan = plan_of(third, [*KINDS[1:], kind("big", "third", 3.0)], objective="moves", solver="replan", old_plan=old)
    check(plan)
    assert plan.moves is not None
    assert plan.moves.servers.count(None) == 1


def test_a_model_without_a_server_is_refused() -> None:
    """The message names the model, and what is offered."""
    with pytest.raises(IncompatibleError, match="the base model 'qwen', got profiles of llama"):
        plan_of(fleet(), KINDS[:2])


def test_the_twin_simulates_one_model_at_a_time() -> None:
    """Adapters of two models that are equal otherwise are not taken for each other."""
    alike = Workload([Adapter(f"a{i}", 8, 0.2, model=("llama", "qwen")[i % 2]) for i in range(6)])
    plan = plan_of(alike, [KINDS[0], KINDS[2]], predictor="twin", verify=True)
    check(plan)
    assert plan.verified


class OneKind(Greedy):
    """Greedy, with a bound, for one kind of server that is not small."""

    name = "one-kind"

    def supports(self, problem: Problem) -> str | None:
        """Whether there is one kind, and a large one."""
        names = [profile.gpu.name for profile in problem.profiles]
        return None if len(names) == 1 and names != ["small"] else "one large kind only"

    def solve(self, problem: Problem) -> Solution:
        """Greedy's plan, with its own size as the bound."""
        found = super().solve(problem)
        return replace(found, lower_bound=float(len(found.bins)), bound_source="one kind", proven=True)


LARGER = kind("larger", "llama", 4.0)


@pytest.mark.parametrize(
    ("kinds", "bounded"), [(KINDS[:1], True), ([KINDS[0], LARGER], False), ([KINDS[0], KINDS[1]], False)]
)
def test_the_best_of_kinds_proves_nothing_about_mixes(kinds: list[Profile], bounded: bool) -> None:
    """A solver for one kind bounds that kind alone; with others at hand, also such as it refuses, less might do."""
    own = fleet(16, ("llama",))
    posed = Problem(own, tuple(kinds), Gpus(), Evaluator(AnalyticPredictor()))
    found = _of_kinds(posed, posed, OneKind())
    assert (found.lower_bound is not None, found.proven) == (bounded, bounded)


def test_a_mix_of_kinds_is_compared_where_the_solver_asks_for_it() -> None:
    """A solver that inherits from greedy under another name declares `compared` with it."""
    kinds, evaluator = (KINDS[0], LARGER), Evaluator(AnalyticPredictor())
    posed = Problem(fleet(8, ("llama",)), kinds, Gpus(), evaluator, max_replicas=2)
    for name, compared, tried in (("greedy", True, 3), ("other", True, 3), ("other", False, 1)):
        solver = type("Like", (Greedy,), {"name": name, "compared": compared})
        assert len(_kinds(posed, solver())) == tried


@pytest.mark.parametrize("solver", ["spread", "dlora", "spread-refined"])
@pytest.mark.parametrize("objective", ["gpus", "latency"])
@pytest.mark.parametrize(
    ("given", "models", "gpus"),
    [
        ([kind("big", "llama", 3.0, tensor=2)], ("llama",), 8),
        ([GpuKind(kind("big", "llama", 3.0), available=6)], ("llama",), 4),
        ([GpuKind(kind("big", "llama", 3.0, tensor=2), available=6)], ("llama",), 4),
        (KINDS[1:], ("llama", "qwen"), 6),
        ([kind("big", "llama", 3.0, tensor=2), KINDS[2]], ("llama", "qwen"), 5),
        ([GpuKind(KINDS[0], available=6), GpuKind(KINDS[2], available=6)], ("llama", "qwen"), 6),
    ],
)
def test_solvers_that_spread_use_all_gpus_whatever_is_minimised(
    solver: str, objective: str, given: list[Profile], models: tuple[str, ...], gpus: int
) -> None:
    """Several GPUs a server, GPUs at hand and several models change nothing: each GPU of the limit is used."""
    plan = plan_of(fleet(16, models), given, solver=solver, objective=objective, max_gpus=gpus, time_limit_s=5.0)
    check(plan)
    assert not plan.unplaced
    assert plan.n_gpus == gpus


def test_models_that_spread_share_the_gpus_by_what_is_gained() -> None:
    """Where an objective counts GPUs, the model with more load still gets more of those given."""
    uneven = [replace(a, rate=a.rate * (3.0 if a.model == "llama" else 1.0)) for a in fleet(24).adapters]
    plan = plan_of(Workload(uneven), KINDS[1:], solver="spread", max_gpus=9)
    models = [item.profile.model.name for item in plan.bins]
    assert len(models) == 9
    assert models.count("llama") > models.count("qwen")


@pytest.mark.parametrize("objective", ["gpus", "latency"])
def test_solvers_that_spread_use_the_gpus_at_hand_if_these_are_fewer(objective: str) -> None:
    """Of one kind of GPU no more are used than there are, by one model or two, and every adapter has a place."""
    for kinds, models in ((KINDS[:1], ("llama",)), ([KINDS[0], KINDS[2]], ("llama", "qwen"))):
        given = [GpuKind(each, available=4) for each in kinds]
        plan = plan_of(fleet(16, models), given, solver="spread", objective=objective, max_gpus=6)
        assert not plan.unplaced
        assert used_gpus(plan.bins) == {"big": 4}


def test_a_running_dear_server_stays_where_the_cheapest_kind_needs_too_many_gpus() -> None:
    """Replanning for the price within a limit on the GPUs keeps what runs if nothing cheaper fits."""
    kinds = [kind("one", "llama", 1.0), kind("four", "llama", 9.0)]
    workload = fleet(60, ("llama",))
    running = plan_of(workload, kinds[1:], predictor=_Four())
    plan = plan_of(workload, kinds, objective="cost", predictor=_Four(), max_gpus=1, old_plan=running, time_limit_s=0.8)
    assert plan.status is Status.FEASIBLE
    assert plan.moves == Moves((), (0,))
    assert [each.settings for each in plan.bins] == [each.settings for each in running.bins]


def test_a_running_plan_that_goes_to_a_dearer_kind_says_what_moves() -> None:
    """If a limit on the GPUs takes a dearer kind than the running one, the decision counts what moves."""
    kinds = [kind("one", "llama", 1.0), kind("four", "llama", 9.0)]
    running = plan_of(fleet(20, ("llama",)), kinds[:1], predictor=_Four())
    given = {"predictor": _Four(), "max_gpus": 1, "time_limit_s": 0.8}
    plan = plan_of(fleet(60, ("llama",)), kinds, objective="cost", old_plan=running, **given)
    assert [item.profile for item in plan.bins] == kinds[1:]
    assert plan.decision == "1 GPU serves the load, 20 moved."
