"""Plans with a spare GPU hold when any one GPU is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError, ValidationError
from packer.failover import without_server
from packer.plan import Status
from packer.planning import loop
from packer.planning.solve import solve
from packer.predictors.twin import TwinPredictor
from packer.testing.analytic import AnalyticPredictor, small_profile
from packer.twin.hours import Hours
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{k}", 8 if k % 3 else 32, 0.5) for k in range(24)])


def test_any_gpu_may_be_lost() -> None:
    """With a spare one there are more GPUs, and the servers that are left hold whichever is lost."""
    profile, predictor = small_profile(), AnalyticPredictor()
    plain = solve(FLEET, profile, "gpus", predictor=predictor, margin=0.0, verify=False)
    plan = solve(FLEET, profile, "gpus:spare=1", predictor=predictor, margin=0.0, verify=False)
    assert plan.status is not Status.INFEASIBLE
    assert plan.n_gpus > plain.n_gpus
    for lost in range(plan.n_gpus):
        left, unplaced = without_server(FLEET, plan.bins, lost)
        assert unplaced == ()
        assert predictor.evaluate(FLEET, left).feasible.all()


def test_slots_stay_as_they_survive_the_loss_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a plan with a spare GPU are given no further slots: what is left of others was admitted with these."""
    monkeypatch.setattr(loop, "with_slots", _wider)
    given = {"predictor": TwinPredictor(), "margin": 0.0, "verify": False}
    plan = solve(FLEET.subset(range(8)), small_profile(), "gpus:spare=1", **given)
    assert plan.status is not Status.INFEASIBLE
    assert len(plan.rooms) == plan.n_gpus
    assert all(item.max_loras <= len(FLEET) for item in plan.bins)
    plain = solve(FLEET.subset(range(8)), small_profile(), "gpus", **given)
    assert all(item.max_loras > len(FLEET) for item in plain.bins)


def _wider(
    _hours: Hours, _fleet: Workload, bins: Sequence[Bin], rooms: object, _admits: object
) -> tuple[Sequence[Bin], object]:
    """Every server with more slots than it needs."""
    return [item.with_slots(len(FLEET) + 1) for item in bins], rooms


def test_too_few_gpus_for_a_spare_one() -> None:
    """A limit on the GPUs that leaves none to spare gives an infeasible plan with the reason."""
    profile, predictor = small_profile(), AnalyticPredictor()
    plain = solve(FLEET, profile, "gpus", predictor=predictor, margin=0.0, verify=False)
    plan = solve(
        FLEET, profile, "gpus:spare=1", predictor=predictor, margin=0.0, verify=False, max_gpus=plain.n_gpus
    )
    assert plan.status is Status.INFEASIBLE
    assert "holds when any of them is lost" in plan.reasons[-1]


def test_one_spare_gpu_of_one_kind() -> None:
    """More than one spare GPU, and several kinds of server, are refused."""
    with pytest.raises(ValidationError, match="spare"):
        solve(FLEET, small_profile(), "gpus:spare=2", predictor=AnalyticPredictor())
    kinds = [small_profile(), small_profile("other/test-model")]
    with pytest.raises(IncompatibleError, match="one kind of server"):
        solve(FLEET, kinds, "gpus:spare=1", predictor=AnalyticPredictor())
