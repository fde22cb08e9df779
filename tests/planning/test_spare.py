"""Plans with a spare GPU hold when any one GPU is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError, ValidationError
from packer.failover import without_server
from packer.gpu import GpuKind
from packer.io.profiles import load_profile
from packer.objectives.base import load_objective
from packer.plan import Moves, Plan, Status
from packer.planning import loop, spare
from packer.planning.solve import solve
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.solvers.base import Problem
from packer.solvers.evaluator import Evaluator
from packer.solvers.replan import objective_of
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


def test_as_few_servers_as_any_split_takes() -> None:
    """The servers are even after a loss, not before: one split of these adapters on three servers is as even as can be,
    but only others hold without the largest server."""
    rates = ((8, 6.4), (32, 4.0), (16, 33.8), (8, 6.8), (32, 9.0))
    fleet = Workload([Adapter(f"a{k}", *each) for k, each in enumerate(rates)])
    given = {"predictor": "boosting", "margin": 0.0, "verify": False, "with_headroom": False}
    plan = solve(fleet, load_profile("h100-64gb/llama-3.1-8b-instruct"), "gpus:spare=1", **given)
    assert plan.n_gpus == 3


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
    _hours: Hours, _fleet: Workload, bins: Sequence[Bin], rooms: object, _admits: object, _least: float
) -> tuple[Sequence[Bin], object]:
    """Every server with more slots than it needs."""
    return [item.with_slots(len(FLEET) + 1) for item in bins], rooms


def test_too_few_gpus_for_a_spare_one() -> None:
    """A limit on the GPUs that leaves none to spare gives an infeasible plan with the reason."""
    profile, predictor = small_profile(), AnalyticPredictor()
    plain = solve(FLEET, profile, "gpus", predictor=predictor, margin=0.0, verify=False)
    plan = solve(FLEET, profile, "gpus:spare=1", predictor=predictor, margin=0.0, verify=False, max_gpus=plain.n_gpus)
    assert plan.status is Status.INFEASIBLE
    assert "holds when any of them is lost" in plan.reasons[-1]


def test_a_solver_that_spreads_finds_the_spare_gpu_among_those_given() -> None:
    """It takes all GPUs at hand at once: as many as another solver needs with a spare one hold the loss of any, and how
    few do without is not known; on one GPU there is none to lose."""
    profile, predictor = small_profile(), AnalyticPredictor()
    given = {"predictor": predictor, "margin": 0.0, "verify": False}
    fewest = solve(FLEET, profile, "gpus:spare=1", **given)
    plan = solve(FLEET, profile, "gpus:spare=1", solver="spread-refined", max_gpus=fewest.n_gpus, **given)
    assert (plan.status, plan.n_gpus) == (Status.FEASIBLE, fewest.n_gpus)
    assert "gpus_without_spare" not in plan.statistics
    alone = solve(FLEET.subset([0]), profile, "gpus:spare=1", solver="spread-refined", max_gpus=1, **given)
    assert alone.status is Status.INFEASIBLE


def test_fleets_without_hot_adapters_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no adapter has more load than a server's share, replicas lead to no second search on as many servers."""
    tried: list[int] = []
    monkeypatch.setattr("packer.planning.spare._survives", lambda _, bins: tried.append(len(bins)))
    given: dict[str, Any] = {"predictor": AnalyticPredictor(), "margin": 0.0, "verify": False, "max_gpus": 5}
    solve(FLEET, small_profile(), "gpus:spare=1", **given, max_replicas=2)
    split = tried.copy()
    solve(FLEET, small_profile(), "gpus:spare=1", **given)
    assert tried == 2 * split != []


def test_hot_adapters_of_which_a_server_may_be_lost() -> None:
    """Servers beyond those that the load needs are all used, with whole adapters or parts of them: more replicas never
    take more GPUs. A search that ends early says so, and one that more GPUs do not help asks for replicas."""
    fleet = Workload([Adapter(f"a{i}", 16, rate) for i, rate in enumerate((9.0, 8.0, 8.5, 0.5, 0.3, 0.6, 0.4))])
    given: dict[str, Any] = {"predictor": AnalyticPredictor(), "margin": 0.0, "verify": False}
    given |= {"objective": "gpus:spare=1", "profile": small_profile()}
    found = [solve(fleet, **given, max_replicas=copies) for copies in (1, 2, 4)]
    assert all(plan.status is not Status.INFEASIBLE for plan in found)
    assert [plan.n_gpus for plan in found] == [4, 4, 4]
    late = solve(fleet, **given, time_limit_s=1e-6)
    assert late.reasons[-1].startswith("The search ended before a plan was found that holds when any GPU is lost")
    alone = solve(Workload([Adapter("a", 16, 0.5)]), **given)
    assert alone.reasons[-1].endswith("What would help: --max-replicas 2 or more")


def test_a_class_with_a_tight_limit_has_its_own_spare_server(server: Profile) -> None:
    """Where all classes share servers, every server must be as lightly loaded as the tight limit asks, with one of them
    lost: six instead of four."""
    own = [Adapter(f"fast {k}", 16, 2.0, slo_class="fast") for k in range(2)]
    fleet = Workload([*own, *(Adapter(f"slow {k}", 16, 2.5) for k in range(4))])
    given: dict[str, Any] = {"predictor": TwinPredictor(), "verify": False, "with_headroom": False}
    plan = solve(fleet, server, "gpus:spare=1", slo="fast:mean_itl_ms=16", **given)
    assert (plan.n_gpus, plan.status) == (4, Status.FEASIBLE)


def test_classes_are_not_searched_apart_where_they_cannot_take_fewer_servers(
    server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups with a spare server each take four servers, at least: their search took most of the time for nothing."""
    monkeypatch.setattr(spare, "_apart", lambda *_given: pytest.fail("searched"))
    fleet = Workload([Adapter(f"{k}", 16, 1.0, slo_class="fast" if k % 2 else None) for k in range(4)])
    given: dict[str, Any] = {"predictor": TwinPredictor(), "verify": False, "with_headroom": False}
    plan = solve(fleet, server, "gpus:spare=1", slo="fast:mean_itl_ms=60", **given)
    assert (plan.n_gpus, plan.status) == (2, Status.OPTIMAL)


def test_groups_begin_with_more_servers_than_they_take_without_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fewer servers than a group needs with all of them it can't hold after a loss: these are not simulated."""
    fewest: dict[int, int] = {}
    monkeypatch.setattr(spare, "_fewest", lambda posed, low, _high: fewest.update({len(posed.workload): low}))
    fleet = Workload([Adapter(f"{k}", 16, 3.0, slo_class=None if k % 4 else "fast") for k in range(24)])
    objective = load_objective("gpus:spare=1")
    evaluator = Evaluator(AnalyticPredictor(), objective)
    posed = Problem(fleet.held_to("fast:mean_itl_ms=60"), (small_profile(),), objective, evaluator)
    assert spare._apart(posed, 24) == []
    given: dict[str, Any] = {"predictor": AnalyticPredictor(), "margin": 0.0, "verify": False, "with_headroom": False}
    assert fewest == {n: solve(fleet.subset(range(n)), small_profile(), **given).n_gpus + 1 for n in (6, 18)}


def _pairs() -> Profile:
    """The small profile on servers of two GPUs each."""
    one = small_profile()
    return replace(one, engine=replace(one.engine, tensor_parallel_size=2))


@pytest.mark.parametrize("max_gpus", [None, 4, 5])
def test_servers_of_several_gpus_are_lost_as_a_whole(max_gpus: int | None) -> None:
    """One more server is enough, whatever the number of its GPUs, and the limit on GPUs is kept."""
    given = {"predictor": AnalyticPredictor(), "margin": 0.0, "verify": False, "max_gpus": max_gpus}
    plain = solve(FLEET.subset(range(8)), _pairs(), "gpus", **given)
    plan = solve(FLEET.subset(range(8)), _pairs(), "gpus:spare=1", **given)
    assert plan.status is not Status.INFEASIBLE
    assert (len(plain.bins), plain.n_gpus) == (1, 2)
    assert (len(plan.bins), plan.n_gpus) == (2, 4)


@pytest.mark.parametrize(("max_gpus", "available"), [(3, None), (None, 2), (None, 3), (8, 2), (2, 8)])
def test_no_server_to_spare(max_gpus: int | None, available: int | None) -> None:
    """A plan is infeasible if the GPUs allowed or at hand make no second server, and the reason says which."""
    kind = GpuKind(_pairs(), available=available)
    fleet, predictor = FLEET.subset(range(8)), AnalyticPredictor()
    plan = solve(fleet, kind, "gpus:spare=1", predictor=predictor, verify=False, max_gpus=max_gpus)
    assert plan.status is Status.INFEASIBLE
    assert plan.reasons[-1].startswith("No plan on up to 2 GPUs holds when any of them is lost.")
    assert plan.reasons[-1].endswith("more GPUs at hand" if available in (2, 3) else "more GPUs")


def test_a_repaired_plan_has_a_spare_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """If fresh hours break the plan, the one with a larger margin holds without any one of its servers as well."""

    def second_holds(plan: Plan, *_: object, number: int = 0, **__: object) -> Plan:
        return replace(plan, verified=number > 0)

    monkeypatch.setattr("packer.planning.solve.verified", second_holds)
    predictor = AnalyticPredictor()
    plan = solve(FLEET, small_profile(), "gpus:spare=1", predictor=predictor, with_headroom=False)
    assert plan.verified
    assert plan.statistics["margin_at_first"] < plan.margin
    assert plan.n_gpus > plan.statistics["gpus_without_spare"]
    for lost in range(plan.n_gpus):
        assert predictor.evaluate(FLEET, without_server(FLEET, plan.bins, lost)[0]).feasible.all()


def test_a_running_plan_keeps_its_spare_gpu() -> None:
    """The default objective to follow a plan with a spare GPU asks for one again; servers that hold move nothing."""
    given = {"predictor": AnalyticPredictor(), "margin": 0.0, "verify": False, "with_headroom": False}
    old = solve(FLEET, small_profile(), "gpus:spare=1", **given)
    assert (old.spare, objective_of(old), objective_of(old, spare=False)) == (1, "gpus:spare=1", "moves")
    plan = solve(FLEET.scaled(0.9), small_profile(), objective_of(old), old_plan=old, solver="replan", **given)
    assert (plan.spare, plan.n_gpus, plan.moves) == (1, old.n_gpus, Moves((), tuple(range(old.n_gpus))))


def test_one_spare_gpu_of_one_kind() -> None:
    """More than one spare GPU, and several kinds of server, are refused."""
    with pytest.raises(ValidationError, match="spare"):
        solve(FLEET, small_profile(), "gpus:spare=2", predictor=AnalyticPredictor())
    kinds = [small_profile(), small_profile("other/test-model")]
    with pytest.raises(IncompatibleError, match="one kind of server"):
        solve(FLEET, kinds, "gpus:spare=1", predictor=AnalyticPredictor())
