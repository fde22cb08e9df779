"""Searches with trained trees: the whole predictor has to admit the bins that were found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from few_adapters import trained_up_to

from packer import seeds
from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts
from packer.bin import Bin
from packer.cli import run
from packer.io.workloads import read_workload
from packer.objectives.gpus import Gpus
from packer.plan import Status
from packer.planning.solve import SolverTask, solve
from packer.predictors.auto import AutoPredictor
from packer.predictors.learned import LearnedPredictor
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.report.context import queueing
from packer.solvers.base import Problem, Solution
from packer.solvers.confirm import all_hold
from packer.solvers.evaluator import Evaluator
from packer.solvers.greedy.solver import Greedy
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.workload import Workload

FLEET = random_fleet(110, seed=2, rates=(1.6, 0.4, 0.1), ranks=(8, 16))


def test_the_search_is_left_to_the_trees(profile: Profile) -> None:
    """Only bins of the finished plan are simulated: few of all that a search evaluates."""
    auto = AutoPredictor.for_profile(profile)
    plan = solve(FLEET, profile, predictor=auto, verify=False)
    assert plan.status is not Status.INFEASIBLE
    assert auto.twin.simulated <= 2 * plan.n_gpus


def test_servers_of_which_the_trees_are_sure_are_not_simulated(profile: Profile) -> None:
    """A careful search finds a plan that the whole predictor admits without a simulation."""
    auto = AutoPredictor.for_profile(profile)
    task = Problem(FLEET, (profile,), Gpus(), Evaluator(auto, Gpus()))
    found = Greedy().solve(replace(task, evaluator=task.evaluator.cautious()))
    assert all_hold(task, found)
    assert auto.twin.simulated == 0
    assert not all_hold(task, Solution(found.bins, (0,)))


@pytest.mark.parametrize(("hot", "cold_rate", "beyond"), [(24, 0.05, False), (0, 0.002, True), (15, 0.002, True)])
def test_servers_beyond_the_training_data_only_where_that_takes_fewer(
    hot: int, cold_rate: float, beyond: bool, profile: Profile
) -> None:
    """Greedy keeps to numbers of adapters that the trees know, and simulates larger servers where load is low."""
    fleet = Workload([Adapter(f"a{i}", 8, 2.5 if i < hot else cold_rate) for i in range(1300)])
    auto = trained_up_to(512, profile)
    found = Greedy().solve(Problem(fleet, (profile,), Gpus(), Evaluator(auto, Gpus())))
    most = Evaluator(auto, Gpus()).most_learned
    assert most == 512
    assert (max(len(item.adapters) for item in found.bins) > most) is beyond
    assert (auto.twin.simulated > 0) is beyond
    assert not beyond or len(found.bins) < len(fleet) / most


@pytest.mark.usefixtures("whole_hours")
def test_large_servers_are_left_to_trees_that_know_them(profile: Profile) -> None:
    """The shipped trees were trained on servers of thousands of adapters: a search for such a fleet simulates none."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.004) for i in range(1300)])
    auto = AutoPredictor.for_profile(profile)
    found = Greedy().solve(Problem(fleet, (profile,), Gpus(), Evaluator(auto, Gpus())))
    assert auto.twin.simulated == 0
    assert max(len(item.adapters) for item in found.bins) > 512
    assert TwinPredictor().evaluate(fleet, found.bins).feasible.all()


def test_refused_bins_make_the_search_more_careful(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that see a third of the load would fill servers three times over: the plan still holds in the twin."""
    whole = LearnedPredictor.evaluate_checked

    def optimistic(self: LearnedPredictor, workload: Workload, bins: list[Bin], factors: object = 1.0) -> object:
        found, outside = whole(self, workload, bins, 0.3 * np.asarray(factors, dtype=np.float64) * np.ones(len(bins)))
        return replace(found, starvation_probability=np.where(found.feasible, 0.5, 1.0)), outside

    monkeypatch.setattr(LearnedPredictor, "evaluate_checked", optimistic)
    plan = solve(FLEET, profile, predictor="auto", margin=0.0)
    assert plan.status is not Status.INFEASIBLE
    assert TwinPredictor().evaluate(FLEET, plan.bins).feasible.all()
    assert "search_raised" in plan.statistics


def test_bursty_fleets_are_guessed_by_the_trees_and_simulated_at_the_end(profile: Profile) -> None:
    """A search takes bursts for Poisson arrivals; the figures of the plan are the twin's with bursts."""
    bursty = FLEET.with_arrivals(Arrivals("bursty", common=Bursts(0.5, ((60.0, 1.0),))))
    evaluator = Evaluator.load("auto", [profile])
    bins = [Bin(tuple(range(12)), profile.settings(12, 16), profile)]
    guess = evaluator.evaluate(bursty, bins)[0]
    plain = evaluator.evaluate(FLEET, bins)[0]
    assert guess == plain
    reported = evaluator.report(bursty, bins)[0]
    assert reported.mean_ttft_ms == TwinPredictor().evaluate(bursty, bins)[0].mean_ttft_ms


def test_servers_of_large_plans_are_simulated_at_one_load_before_the_verification(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures at the rates as given are those of the verification; without it the plan's own predictor gives them."""
    monkeypatch.setattr("packer.planning.assemble.MOST_GPUS", 1)
    auto = AutoPredictor.for_profile(profile)
    auto.low, auto.high = -1.0, 2.0  # certain of no server
    plan = solve(FLEET, profile, predictor=auto, with_headroom=False)
    assert plan.n_gpus > 1
    fresh = TwinPredictor(seed=seeds.fresh(plan.seed))
    assert list(plan.evaluations) == list(fresh.evaluate(FLEET, plan.bins))
    simulated = auto.twin.simulated
    own = solve(FLEET, profile, predictor=auto, with_headroom=False, verify=False)
    assert own.bins == plan.bins
    assert auto.twin.simulated > simulated
    assert list(own.evaluations) == list(auto.evaluate(FLEET, own.bins))


def test_the_default_is_auto(profile: Profile) -> None:
    """Without a predictor the plan is one of "auto"."""
    plan = solve(Workload([Adapter(f"a{i}", 8, 0.1) for i in range(8)]), profile)
    assert (plan.predictor, plan.verified) == ("auto", True)


def test_the_command_gives_the_plan_of_the_library(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`packer solve --objective gpus` writes what `packer.solve` returns, headroom included, but for the run time."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{a.name},{a.rank},{a.rate}\n" for a in FLEET.adapters)
    (tmp_path / "fleet.csv").write_text("adapter,rank,rate\n" + rows)
    assert run(["solve", "fleet.csv", "--objective", "gpus", "-o", "command.json", "-q"]) == 0
    plan = solve(read_workload("fleet.csv"), profile, "gpus")
    plan.save("library.json")
    written = [json.loads((tmp_path / name).read_text()) for name in ("command.json", "library.json")]
    for data in written:
        del data["runtime_s"]
    assert written[0] == written[1]
    assert len(plan.headroom) == plan.n_gpus


@pytest.mark.parametrize(("options", "recommends"), [([], True), (["--predictor", "tree"], False)])
def test_without_a_strategy_the_command_recommends(
    options: list[str], recommends: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`packer solve FLEET` looks for the plan to deploy; naming a predictor plans with that."""
    path = tmp_path / "fleet.csv"
    path.write_text("adapter,rank,rate\n" + "".join(f"a{i},8,0.1\n" for i in range(4)))
    assert run(["solve", str(path), "--json", *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["objective"] == "recommend") is recommends


@pytest.mark.usefixtures("whole_hours")
def test_fewest_gpus_on_which_requests_queue_say_what_limits_take(profile: Profile) -> None:
    """Where a plan for the fewest GPUs lets requests wait, it says how many GPUs keep the limits, and they do."""
    fleet = Workload([Adapter(f"a{k}", 16 if k % 2 else 8, 0.78) for k in range(40)])
    plan = solve(fleet, profile, margin=0.0)
    assert plan.evaluations.mean_ttft_ms.max() > 2000.0
    within = plan.within_goal
    assert within["gpus"] > plan.n_gpus
    kept = solve(fleet, profile, within["objective"], margin=0.0)
    assert kept.verified
    assert kept.n_gpus <= within["gpus"]
    assert kept.evaluations.mean_ttft_ms.max() <= 2000.0
    (*_, told) = queueing(plan)
    assert told.startswith(
        f"slo:server.p99_ttft_ms=2000,server.mean_itl_ms=100 takes {within['gpus']} GPUs. Without --obj"
    )
    assert not solve(fleet, profile, margin=1.0).within_goal


@pytest.mark.parametrize("unfinished", [False, True])
def test_how_many_gpus_limits_take_is_told_by_a_finished_search_alone(unfinished: bool) -> None:
    """A search that ran out of its seconds may have found more GPUs than it takes."""
    waits = SimpleNamespace(
        workload=FLEET, status=Status.FEASIBLE, n_gpus=5, evaluations=SimpleNamespace(mean_ttft_ms=np.array([1e4])),
        time_limit_reached=unfinished,
    )  # fmt: skip
    task = SimpleNamespace(problem=SimpleNamespace(remaining_s=lambda: np.inf), again=lambda *_, **__: waits)
    plan = solve(FLEET, small_profile(), "gpus", predictor=AnalyticPredictor(), max_gpus=99)
    late = replace(plan, evaluations=replace(plan.evaluations, mean_ttft_ms=np.full(len(plan.bins), 1e4)))
    told = SolverTask._within_goal(task, late)  # type: ignore[arg-type]
    assert (not told) == unfinished
