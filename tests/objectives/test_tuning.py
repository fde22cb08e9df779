"""The objective tuning maximises training over a given number of GPUs, within the limits."""

from __future__ import annotations

import pytest

from packer.adapter import Adapter
from packer.errors import IncompatibleError, ValidationError
from packer.evaluation import Evaluations
from packer.io.profiles import load_profile
from packer.job import FineTuning
from packer.objectives.base import load_objective
from packer.objectives.tuning import MostTuning
from packer.planning.solve import solve
from packer.predictors.api import evaluate_server, load_predictor
from packer.workload import Workload

PROFILE = load_profile("h100-64gb/llama-3.1-8b-instruct")
FLEET = Workload([Adapter(f"a{i}", 8, 0.5 * (i + 1)) for i in range(6)])


def test_key_is_the_sum_of_training() -> None:
    """What is minimised is minus the tokens trained per second on all GPUs."""
    fleet = MostTuning().fleet(FLEET)
    row = evaluate_server(fleet, PROFILE, max_loras=6)
    assert row.tuning_tok_s > 0.0
    assert MostTuning().key(fleet, [None, None], Evaluations.of([row, row])) == (-2 * row.tuning_tok_s,)  # type: ignore[list-item]


def test_auto_leaves_training_servers_to_the_twin() -> None:
    """The trained trees never saw a server that trains."""
    fleet = FLEET.tuned_by("chunked")
    by_auto = evaluate_server(fleet, PROFILE, max_loras=6, predictor="auto")
    assert by_auto == evaluate_server(fleet, PROFILE, max_loras=6, predictor="twin")
    with pytest.raises(IncompatibleError, match="twin"):
        evaluate_server(fleet, PROFILE, max_loras=6, predictor="boosting")


@pytest.mark.usefixtures("whole_hours")
def test_plan_trains_more_than_a_lopsided_one_and_keeps_its_limits() -> None:
    """Both GPUs get adapters, limits hold, and no split tried by hand trains more."""
    plan = solve(FLEET, PROFILE, "tuning:p99_ttft_ms=300,mean_tpot_ms=40", max_gpus=2, margin=0.0)
    assert plan.n_gpus == 2
    assert plan.workload.fine_tuning == FineTuning()
    assert (plan.evaluations.p99_ttft_ms <= 300.0).all()
    assert (plan.evaluations.mean_tpot_ms <= 40.0).all()
    twin = load_predictor("twin", PROFILE)
    found = -plan.objective_value[0]
    assert found == pytest.approx(twin.evaluate(plan.workload, plan.bins).tuning_tok_s.sum())
    assert found == pytest.approx(plan.evaluations.tuning_tok_s.sum(), rel=0.01)  # of a simulated hour
    for cut in range(1, 6):
        bins = [
            type(plan.bins[0])(part, PROFILE.settings(len(part), 8), PROFILE)
            for part in (tuple(range(cut)), tuple(range(cut, 6)))
        ]
        assert found >= 0.98 * twin.evaluate(plan.workload, bins).tuning_tok_s.sum()


def test_a_limit_out_of_reach_is_named() -> None:
    """A plan that can't keep a limit says which one, by how much, and on which GPU."""
    plan = solve(FLEET, PROFILE, "tuning:p99_ttft_ms=3,mean_tpot_ms=4000", max_gpus=1)
    assert plan.reasons[0].startswith("server 0 breaks a limit of the objective 'tuning': p99_ttft_ms ")
    assert plan.reasons[0].endswith(" > 3")


def test_refusals() -> None:
    """A limit of 0 and a policy that does not train are refused."""
    with pytest.raises(ValidationError, match="p99_ttft_ms"):
        load_objective("tuning:p99_ttft_ms=0")
    with pytest.raises(IncompatibleError, match="samples"):
        MostTuning(policy="none").fleet(FLEET)
