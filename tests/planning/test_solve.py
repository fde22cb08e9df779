"""`solve`: from names to a verified plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.errors import IncompatibleError, PluginError, UnknownNameError, ValidationError, VerificationError
from packer.evaluation import Evaluations
from packer.gpu import GpuKind
from packer.moves import moves_of
from packer.objectives.base import Objective
from packer.plan import Moves, Plan, Status
from packer.planning.solve import UNVERIFIED, solve
from packer.planning.verify import verified
from packer.profile import Profile
from packer.solvers.base import Problem, Solution
from packer.solvers.greedy.solver import Greedy
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.twin.margin import HARDENING_STEP, UNCALIBRATED_MARGIN, error_key
from packer.workload import Workload

PROFILE = small_profile()
FLEET = random_fleet(60, seed=4, rates=(0.4, 0.2))


def plan_of(workload: Workload = FLEET, **changes: Any) -> Plan:
    """A plan by the analytic predictor, without margin and verification by default."""
    settings: dict[str, Any] = {"predictor": AnalyticPredictor(), "verify": False, "margin": 0.0, **changes}
    return solve(workload, settings.pop("profile", PROFILE), **settings)


def test_a_plan_says_where_it_comes_from() -> None:
    """Names, seed, versions, run time, objective value and bound are in the plan."""
    plan = plan_of(seed=5)
    assert (plan.objective, plan.solver, plan.predictor, plan.seed) == ("gpus", "greedy", "analytic", 5)
    assert plan.objective_value == (float(plan.n_gpus),)
    assert plan.versions["profile test-gpu/test-model"] == PROFILE.fingerprint
    assert plan.runtime_s > 0
    assert plan.lower_bound is not None
    assert plan.lower_bound <= plan.n_gpus


def test_same_seed_same_plan() -> None:
    """Nothing but the run time differs between two runs."""
    one, other = plan_of(), plan_of()
    assert (one.bins, one.objective_value, one.status) == (other.bins, other.objective_value, other.status)


def test_a_single_gpu_is_optimal() -> None:
    """One GPU can't be beaten: the plan says so."""
    plan = plan_of(random_fleet(3, seed=1, rates=(0.1,)))
    assert (plan.status, plan.lower_bound, plan.gap) == (Status.OPTIMAL, 1.0, 0.0)


def test_a_margin_leaves_room_and_reports_nominal_figures() -> None:
    """With a margin of 80 % plans stand 1.8 times the load, and figures are those at the rates as given."""
    careful = plan_of(margin=0.8)
    assert careful.n_gpus > plan_of().n_gpus
    raised = AnalyticPredictor().evaluate(FLEET.scaled(1.8), careful.bins)
    assert raised.feasible.all()
    assert careful.evaluations.offered_tok_s.sum() == pytest.approx(FLEET.offered_tok_s)
    assert careful.margin == 0.8


def _kind(name: str, price: float, margin: float) -> Profile:
    """A kind of server whose held-out errors give this margin at 95 % confidence."""
    errors = {error_key(0.5): 0.0, error_key(0.95): margin}
    profile = small_profile(name, price)
    return replace(profile, errors=errors, gpu=replace(profile.gpu, name=name))


@pytest.mark.parametrize("solver", ["greedy", "mixed"])
def test_another_kind_with_a_larger_margin_changes_no_plan_without_it(solver: str) -> None:
    """Each kind of server has its own margin: a dear kind with a larger one leaves the plan as it was."""
    exact, rough = _kind("exact/m", 1.0, 0.04), _kind("rough/m", 9.0, 0.3)
    some = FLEET.subset(range(30))
    plan = plan_of(some, objective="cost", profile=[exact, rough], solver=solver, margin=None)
    alone = plan_of(some, objective="cost", profile=exact, solver=solver, margin=None)
    assert (len(plan.bins), plan.margin, plan.reasons) == (len(alone.bins), 0.04, alone.reasons)
    assert AnalyticPredictor().evaluate(some.scaled(1.04), plan.bins).feasible.all()


def test_margins_that_differ_are_said() -> None:
    """A plan of two kinds holds with the margin of each kind, and a reason says both."""
    exact, rough = _kind("exact/m", 1.0, 0.04), _kind("rough/m", 1.1, 0.3)
    stock = [GpuKind(exact, available=1), GpuKind(rough)]
    plan = plan_of(objective="cost", profile=stock, solver="mixed", margin=None)
    assert {item.profile for item in plan.bins} == {exact, rough}
    for item in plan.bins:
        fleet = FLEET.scaled(1.3 if item.profile == rough else 1.04)
        assert AnalyticPredictor().evaluate(fleet, [item]).feasible.all()
    assert plan.margin == 0.3
    assert any(r.startswith("Rates are raised by") and "30 % on rough/m" in r for r in plan.reasons)


def test_infeasible_is_a_status_with_reasons() -> None:
    """Too little is no exception: the plan holds what fits and says what would help."""
    plan = plan_of(max_gpus=1)
    assert plan.status is Status.INFEASIBLE
    assert plan.n_gpus == 1
    assert plan.unplaced
    assert "What would help" in plan.reasons[0]
    assert plan.verified is None


def test_bins_that_starve_make_a_plan_infeasible() -> None:
    """A solver that is blind to starvation gets its plan, marked infeasible with GPU and figures."""
    plan = plan_of(random_fleet(40, seed=4, rates=(2.0,)), solver="spread", max_gpus=2)
    assert plan.status is Status.INFEASIBLE
    assert plan.evaluations.starved.all()
    assert "server 0 starves: the load of" in plan.reasons[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"objective": "headroom:factor=3.0"}, "starves at a load of the objective 'headroom': the load of"),
        ({"margin": 2.0}, "starves with rates raised by the margin: the load of"),
    ],
)
def test_a_server_that_only_starves_beyond_the_rates_as_given_says_so(changes: dict[str, Any], says: str) -> None:
    """Figures are those at the rates as given, at which such a server serves its load."""
    plan = plan_of(random_fleet(12, seed=4, rates=(0.4,)), solver="spread", max_gpus=1, **changes)
    assert plan.status is Status.INFEASIBLE
    assert f"server 0 {says}" in plan.reasons[0]
    assert "tok/s as given" in plan.reasons[0]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"objective": "gpu"}, UnknownNameError, "Did you mean 'gpus'"),
        ({"solver": "greddy"}, UnknownNameError, "Did you mean 'greedy'"),
        ({"predictor": "twinn"}, UnknownNameError, "Did you mean 'twin'"),
        (
            {"objective": "latency", "max_gpus": 2, "solver": "greedy"},
            IncompatibleError,
            "take the solver spread",
        ),
        ({"objective": "latency", "solver": "spread"}, ValidationError, "--gpus"),
        ({"objective": "moves"}, IncompatibleError, "packer solve WORKLOAD --from"),
        ({"solver": "replan"}, IncompatibleError, "packer solve WORKLOAD --from"),
        ({"objective": "cost", "profile": small_profile(price_per_hour=None)}, IncompatibleError, "price"),
        ({"max_gpus": 0}, ValidationError, "number of GPUs"),
        ({"time_limit_s": 0.0}, ValidationError, "time limit"),
    ],
)
def test_unfit_choices_fail_before_running(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    """Unknown names and combinations that can't work are refused with what is missing."""
    with pytest.raises(error, match=says):
        plan_of(**changes)


@dataclass
class Cheat:
    """A solver that loses an adapter, or with a `bound` proves that none of its own plans exists."""

    name: str = "cheat"
    bound: float | None = None

    def supports(self, problem: Problem) -> str | None:
        """Everything."""
        return None

    def solve(self, problem: Problem) -> Solution:
        """Greedy's bins, without the last one if there is no bound."""
        bins = Greedy().solve(problem).bins
        return Solution(bins[:-1] if self.bound is None else bins, lower_bound=self.bound, proven=True)


@pytest.mark.parametrize(
    ("bound", "says"), [(None, "'cheat': .*placed once"), (9.0, "'cheat' .*less than 9"), (math.nan, "nan")]
)
def test_a_solver_that_cheats_is_caught(bound: float | None, says: str) -> None:
    """No plan that loses an adapter, or that its own proven bound excludes, leaves `solve`; the solver is named."""
    with pytest.raises((VerificationError, PluginError), match=says):
        plan_of(solver=Cheat(bound=bound))


def test_cost_chooses_the_cheaper_gpu_type() -> None:
    """Of two GPU types with the same power the cheaper one is taken, even if it is not the first."""
    dear, cheap = small_profile("dear/m", 3.0), small_profile("cheap/m", 1.0)
    plan = plan_of(objective="cost", profile=[dear, cheap])
    assert {b.profile.name for b in plan.bins} == {"cheap/m"}
    assert plan.objective_value == (float(plan.n_gpus), float(plan.n_gpus))


def test_a_repair_raises_the_margins_that_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a fresh hour breaks the first plan, the reason says the margins with which the second one was found."""

    def second(plan: Plan, *_args: object, number: int, **_given: object) -> Plan:
        return replace(plan, verified=number == 1)

    monkeypatch.setattr("packer.planning.solve.verified", second)
    stock = [GpuKind(_kind("exact/m", 1.0, 0.04), available=1), GpuKind(_kind("rough/m", 1.1, 0.3))]
    plan = plan_of(objective="cost", profile=stock, solver="mixed", margin=None, verify=True)
    assert (plan.verified, plan.margin) == (True, 0.3 + HARDENING_STEP)
    assert any(f"{100 * plan.margin:.3g} % on rough/m" in reason for reason in plan.reasons)


def test_the_only_kind_of_a_model_is_not_dearer() -> None:
    """A model has no cheaper server than its only kind, whatever those of other models cost."""
    cheap, dear = small_profile("cheap/a", 1.0), small_profile("dear/b", 3.0)
    kinds = [
        replace(cheap, model=replace(cheap.model, name="a")),
        replace(dear, model=replace(dear.model, name="b")),
    ]
    both = Workload([Adapter("first", 8, 1.0, model="a"), Adapter("second", 8, 1.0, model="b")])
    plan = plan_of(both, objective="cost", profile=kinds)
    assert {item.profile for item in plan.bins} == set(kinds)
    assert not plan.reasons


@pytest.mark.parametrize(("max_replicas", "said"), [(None, True), (1, False)])
def test_an_adapter_alone_on_a_dearer_kind_may_be_split(max_replicas: int | None, said: bool) -> None:
    """Adapters have one server each by default; a reason says that splitting one that is alone may be cheaper."""
    dear, cheap = _kind("dear/m", 3.0, 0.0), _kind("cheap/m", 1.0, 0.0)
    hot = Workload([Adapter("first", 8, 6.0), Adapter("second", 8, 6.0)])
    given: dict[str, Any] = {"objective": "cost", "max_replicas": max_replicas}
    plan = plan_of(hot, profile=[GpuKind(dear), GpuKind(cheap, available=1)], **given)
    assert {item.profile for item in plan.bins} == {dear, cheap}
    found = [reason for reason in plan.reasons if "--max-replicas 2 or more splits" in reason]
    assert len(found) == said
    assert all(reason.startswith("Alone on a dearer server: ") for reason in found)


def test_stopping_gives_a_whole_plan() -> None:
    """Ctrl-C from the start still gives a plan with every adapter, marked as interrupted, that says once what is
    missing."""
    plan = plan_of(stop=lambda: True, verify=True)
    assert plan.status is not Status.INFEASIBLE
    assert plan.interrupted
    assert plan.reasons.count(UNVERIFIED) == 1


def test_the_twin_confirms_with_fresh_seeds(toy_profile: Profile) -> None:
    """`verified` is the twin's result for the finished plan."""
    workload = Workload([Adapter(f"a{i}", 8, 0.05) for i in range(6)])
    assert solve(workload, toy_profile, margin=0.1).verified is True
    blind = plan_of(Workload([Adapter("a", 8, 900.0)]), predictor=AnalyticPredictor(1e9), verify=True)
    assert blind.verified is False
    assert any("starves in the twin" in reason for reason in blind.reasons)


def test_a_plan_that_the_twin_refutes_is_planned_again(toy_profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the margin left to packer, it is raised until the twin confirms; a margin given is kept."""
    results: list[int] = []

    def twin(workload: Workload, bins: Any, *, twin: object, objective: Objective) -> dict[int, str]:
        results.append(len(bins))
        return {} if len(results) > 2 else {0: "server 0 starves"}

    monkeypatch.setattr("packer.planning.verify.twin_failures", twin)
    plan = solve(FLEET, PROFILE, predictor=AnalyticPredictor())
    assert plan.verified is True
    assert plan.statistics["margin_at_first"] == UNCALIBRATED_MARGIN
    assert plan.margin == pytest.approx(UNCALIBRATED_MARGIN + 0.06)
    assert len(results) == 4  # the hour that broke two plans, and one that no plan has seen
    results.clear()
    assert plan_of(verify=True, margin=0.1).verified is False
    assert len(results) == 1


@dataclass
class Bounded:
    """Greedy with a lower bound that equals its plan, certain or not."""

    certain: bool
    name: str = "bounded"

    def supports(self, problem: Problem) -> str | None:
        """Everything."""
        return None

    def solve(self, problem: Problem) -> Solution:
        """Greedy's bins, and their number as the bound."""
        found = Greedy().solve(problem)
        bound = float(len(found.bins))
        return replace(found, lower_bound=bound, bound_source="said so", proven=self.certain)


def test_optimal_needs_a_proven_bound() -> None:
    """A plan that meets a bound is optimal if the bound is certain; else it is feasible, with gap 0."""
    proven, searched = (plan_of(solver=Bounded(certain)) for certain in (True, False))
    assert proven.n_gpus == searched.n_gpus > 1
    assert (proven.status, proven.gap, proven.bound_proven) == (Status.OPTIMAL, 0.0, True)
    assert (searched.status, searched.gap, searched.bound_proven) == (Status.FEASIBLE, 0.0, False)


def test_one_gpu_is_optimal_whatever_arrives() -> None:
    """A replayed trace has no bound by load, but no plan has fewer than one GPU."""
    ones = np.ones(4, dtype=np.int64)
    trace = RequestTrace(np.arange(4.0), np.arange(4), 50 * ones, 20 * ones)
    plan = plan_of(random_fleet(4, seed=1, rates=(0.1,)).with_arrivals(Arrivals("trace", trace=trace)))
    assert (plan.n_gpus, plan.lower_bound, plan.status) == (1, 1.0, Status.OPTIMAL)


def test_optimal_means_every_entry_of_the_key() -> None:
    """As few GPUs as possible are not optimal for "moves" if adapters had to move."""
    fleet = random_fleet(6, seed=1, rates=(0.1,))
    one = plan_of(fleet)
    two = plan_of(fleet, solver="hrw", max_gpus=2)
    assert (one.n_gpus, two.n_gpus) == (1, 2)
    stays, moves = (plan_of(fleet, objective="moves", old_plan=old) for old in (one, two))
    assert (stays.status, stays.objective_value) == (Status.OPTIMAL, (1.0, 0.0))
    assert moves.objective_value[1] > 0
    assert (moves.status, moves.gap) == (Status.FEASIBLE, 0.0)


class Staying:
    """Keeps the running servers as they are, under the name of the solver that plans from running servers."""

    name = "replan"

    def supports(self, problem: Problem) -> str | None:
        """Everything."""
        return None

    def solve(self, problem: Problem) -> Solution:
        """The running servers."""
        return Solution(problem.old_bins, moves=moves_of(problem.old_bins, problem.old_bins))


def test_a_plan_made_without_the_running_servers_is_not_optimal_if_adapters_move() -> None:
    """A plan that is optimal for "gpus" replaces one on more GPUs, but for "moves" it is only feasible."""
    fleet = random_fleet(6, seed=1, rates=(0.1,))
    old = plan_of(fleet, solver="hrw", max_gpus=2)
    plan = plan_of(fleet, objective="moves", old_plan=old, solver=Staying())
    assert (plan.objective, plan.n_gpus, plan.lower_bound, plan.bound_proven) == ("moves", 1, 1.0, True)
    assert plan.objective_value[1] > 0
    assert plan.status is Status.FEASIBLE


def test_a_cheaper_plan_on_as_many_gpus_replaces_the_running_one() -> None:
    """If the price is minimised, what counts is the price of a plan made without the running servers."""
    fleet = random_fleet(6, seed=1, rates=(0.1,))
    dear, cheap = small_profile("dear/m", 3.0), small_profile("cheap/m", 1.0)
    old = plan_of(fleet, profile=dear)
    given = {"profile": (dear, cheap), "old_plan": old, "solver": Staying()}
    plan = plan_of(fleet, objective="cost", **given)
    assert (plan.n_gpus, plan.price_per_hour) == (old.n_gpus, 1.0)
    assert plan.moves == Moves(tuple(range(6)), (None,))
    fewest = plan_of(fleet, objective="gpus", **given)
    assert (fewest.price_per_hour, fewest.moves) == (3.0, Moves((), (0,)))


def test_a_running_plan_is_replanned_whatever_is_minimised() -> None:
    """Without a solver, an unchanged fleet stays where it runs, though a fresh plan would be another."""
    fleet = random_fleet(60, seed=3, rates=(0.8, 0.4))
    old = plan_of(fleet, solver="spread", max_gpus=plan_of(fleet).n_gpus)
    again = plan_of(fleet, old_plan=old)
    assert again.solver == "replan"
    assert again.moves is not None
    assert again.moves.adapters == ()


@pytest.mark.parametrize(
    ("objective", "says"),
    [("headroom:factor=1000", "at 1000 times the rates"), ("slo:p99_ttft_ms=1e-6", "p99_ttft_ms is")],
)
def test_the_confirmation_is_about_the_objective(objective: str, says: str, toy_profile: Profile) -> None:
    """A plan that serves its load but breaks a limit of its objective in the twin is not verified."""

    class Hopeful(AnalyticPredictor):
        def evaluate(self, workload: Workload, bins: Any) -> Evaluations:
            found = super().evaluate(workload, bins)
            return replace(found, p99_ttft_ms=np.zeros(len(found)))

    fleet = Workload([Adapter(f"a{i}", 8, 0.05) for i in range(6)])
    plan = solve(fleet, toy_profile, objective, predictor=Hopeful(1e9), margin=0.0)
    assert (plan.status is Status.INFEASIBLE) == objective.startswith("slo")  # it breaks its limits
    assert plan.verified is False
    assert any(says in reason for reason in plan.reasons)
    assert verified(replace(plan, reasons=())).verified is True


def test_a_running_plan_has_gpus(toy_profile: Profile) -> None:
    """A plan without GPUs has nothing to keep, and no profiles to plan with: both are said, not crashed into."""
    fleet = Workload([Adapter("a", 8, 1e5)])
    empty = plan_of(fleet, predictor=AnalyticPredictor(1.0))
    assert not empty.bins
    with pytest.raises(IncompatibleError, match="no GPUs"):
        plan_of(fleet, solver="replan", old_plan=empty)
    with pytest.raises(ValidationError, match="at least one profile"):
        solve(fleet, [])
