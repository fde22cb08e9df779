"""Adapters that no number of GPUs keeps within the goal are apart, and all others keep it."""

from __future__ import annotations

import numpy as np
import pytest

import packer
from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.lengths import Lengths
from packer.plan import Plan, Status
from packer.planning.beyond import others_kept
from packer.planning.explore import Frontier
from packer.profile import Profile
from packer.workload import Workload

LONG = (1, 7, 13)


@pytest.fixture(scope="module")
def h100() -> Profile:
    return packer.load_profile("h100-64gb/llama-3.1-8b-instruct")


@pytest.fixture(scope="module")
def fleet() -> Workload:
    """A fleet for one GPU, but for three adapters with prompts that take longer than the limit on an idle server."""
    return Workload(
        [
            Adapter(f"a{i}", 8, 0.15, input_tokens=Lengths.constant(60_000)) if i in LONG else Adapter(f"a{i}", 8, 0.4)
            for i in range(30)
        ]
    )


def broken(plan: Plan) -> list[int]:
    """The adapters beyond their limits."""
    assert plan.adapters is not None
    return np.flatnonzero(np.nan_to_num(plan.adapters.slo_used, nan=np.inf) > 1.0).tolist()


def test_adapters_that_cannot_keep_the_goal_break_it_for_no_other(fleet: Workload, h100: Profile) -> None:
    """Only these are late, they are served, and the reasons name them and their servers."""
    plan = packer.recommend(fleet, h100)
    assert plan.status is Status.INFEASIBLE
    assert broken(plan) == list(LONG)
    assert plan.evaluations.feasible.all()
    own = [k for k, item in enumerate(plan.bins) if set(item.adapters) & set(LONG)]
    assert all(set(plan.bins[k].adapters) <= set(LONG) for k in own)
    assert "for adapter 'a1'" in plan.reasons[0] or "for adapter 'a7'" in plan.reasons[0] or "'a13'" in plan.reasons[0]
    servers = f"server{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
    assert (
        plan.reasons[1] == f"Adapters that cannot keep the goal, apart on {servers}: a1, a7, a13. All others keep it."
    )


def test_too_few_gpus_are_first_for_those_that_can_keep_the_goal(fleet: Workload, h100: Profile) -> None:
    """On GPUs at hand that do not serve all adapters, those that keep the goal go on keeping it."""
    plan = packer.recommend(fleet, h100, max_gpus=2)
    assert plan.n_gpus == 2
    assert broken(plan) == list(LONG)


def test_far_too_few_gpus_are_for_those_that_can_keep_the_goal(h100: Profile) -> None:
    """Where even those are too many for the GPUs at hand, they have all GPUs but one, on which some of them keep it."""
    adapters = [Adapter(f"a{i}", 8, 2.0, input_tokens=Lengths.constant(300)) for i in range(28)]
    adapters += [Adapter(f"long{i}", 8, 0.3, input_tokens=Lengths.constant(60_000)) for i in range(3)]
    plan = packer.recommend(Workload(adapters), h100, max_gpus=3)
    assert plan.n_gpus <= 3
    assert plan.bins[-1].adapters == (28, 29, 30)
    assert len(broken(plan)) < 31


@pytest.mark.usefixtures("whole_hours")
def test_a_share_of_adapters_takes_no_gpus_for_those_that_cannot_keep_the_goal(fleet: Workload, h100: Profile) -> None:
    """Where some may break the goal, those that break it anyway are apart: the plan takes no more GPUs than the one of
    all adapters that shows them late."""
    plan = packer.recommend(fleet, h100, slo="adapter_share=0.9")
    assert plan.status is not Status.INFEASIBLE
    assert plan.n_gpus <= packer.recommend(fleet, h100).n_gpus
    assert broken(plan) == list(LONG)


def test_a_gpu_that_may_be_lost_is_one_of_those_that_keep_the_goal(fleet: Workload, h100: Profile) -> None:
    """With a spare GPU, too, the others keep the goal; the reasons say that losses are judged for them alone."""
    plan = packer.recommend(fleet, h100, spare=1)
    assert broken(plan) == list(LONG)
    assert plan.n_gpus == packer.recommend(fleet, h100).n_gpus + 1
    assert plan.reasons[1].endswith(" The loss of a GPU is judged for the servers of the others alone.")


def test_a_class_that_no_server_keeps_is_apart_from_the_others(h100: Profile) -> None:
    """The lightest adapters of one class break its limits: those of another keep theirs."""
    classes = (("batch", packer.goal.Limits(15_000.0, 200.0)), ("chat", packer.goal.Limits(20.0, 50.0)))
    adapters = [Adapter(f"a{i}", 8, (0.2, 0.6)[i % 2], slo_class=("chat", "batch")[i % 2]) for i in range(12)]
    bins, late = others_kept(Frontier(Workload(adapters, slo=packer.Slo(classes=classes)), h100), None)
    assert late == tuple(range(0, 12, 2))
    assert [set(item.adapters) <= set(late) for item in bins] == [False, True]


def test_adapters_that_break_the_goal_anyway_take_few_gpus(h100: Profile) -> None:
    """Their servers keep up in an hour: none is added for bursts of other hours, which only make them later."""
    adapters = [Adapter("long", 8, 0.3, input_tokens=Lengths.constant(60_000))]
    adapters += [Adapter(f"a{i}", 8, 0.4) for i in range(20)]
    fleet = Workload(adapters, arrivals=Arrivals("unpredictable"))
    plan = packer.recommend(fleet, h100)
    assert sum(item.adapters == (0,) for item in plan.bins) <= 4


def test_a_part_that_no_server_serves_is_apart_too(h100: Profile) -> None:
    """An adapter with more load than its GPU serves starves alone: the others keep the goal."""
    fleet = Workload([Adapter("hot", 8, 90.0), *(Adapter(f"a{i}", 8, 0.4) for i in range(20))])
    plan = packer.recommend(fleet, h100, max_replicas=1)
    assert broken(plan) == [0]
    assert plan.bins[-1].adapters == (0,)


def test_long_prompts_and_long_answers_are_apart_together(h100: Profile) -> None:
    """A limit of whole answers and one of the TTFT: adapters that break either alone are apart, all others keep both,
    and so do those whose answers are long enough to break the goal in some hours only."""
    lengths = [(60_000, 20), (20, 2_000), (200, 100), (600, 40)]
    adapters = [
        Adapter(f"a{i}", 8, (0.05, 0.002)[i % 4 == 1], *map(Lengths.constant, lengths[i % 4])) for i in range(24)
    ]
    adapters += [Adapter(f"near{i}", 8, 0.05, Lengths.constant(20), Lengths.gamma(300.0 - i, 0.5)) for i in range(4)]
    fleet = Workload(adapters)
    plan = packer.recommend(fleet, h100, slo="p95_e2e_ms=8000")
    assert not [i for i in broken(plan) if i < 24 and i % 4 > 1]
    assert " All others keep it." in plan.reasons[1]


def test_adapters_with_few_requests_keep_the_goal_with_others(h100: Profile) -> None:
    """Adapters with few requests are judged by the percentile of their server: alone the load of their weights breaks
    it, beside others they keep it, and only the one with long prompts is apart."""
    adapters = [Adapter(f"busy{k}", 16, 1.0) for k in range(3)] + [Adapter(f"few{k}", 16, 0.008) for k in range(20)]
    fleet = Workload([*adapters, Adapter("long", 16, 0.1, input_tokens=Lengths.constant(30_000))])
    _, late = others_kept(Frontier(fleet.held_to("p95_ttft_ms=150"), h100), None)
    assert late == (23,)


def test_too_few_gpus_for_adapters_apart_say_how_many_serve_all(h100: Profile) -> None:
    """With adapters apart, too, the reasons say on how many GPUs all are served and the others keep the goal."""
    adapters = [Adapter(f"a{i}", 8, 2.0, input_tokens=Lengths.constant(300)) for i in range(28)]
    adapters += [Adapter(f"long{i}", 8, 0.3, input_tokens=Lengths.constant(60_000)) for i in range(3)]
    gpus = packer.recommend(Workload(adapters), h100).n_gpus
    said = packer.recommend(Workload(adapters), h100, max_gpus=2).reasons[1]
    assert said.endswith(f" {gpus} GPUs serve all, and all others keep the goal: --gpus {gpus}.")


def test_a_fleet_without_such_adapters_has_no_such_plan(h100: Profile) -> None:
    """Nothing is apart where all adapters keep the goal, or none does."""
    kept = Workload([Adapter(f"a{i}", 8, 0.4) for i in range(4)])
    assert others_kept(Frontier(kept, h100), None) == ([], ())
    assert others_kept(Frontier(kept.held_to("p95_ttft_ms=1"), h100), None) == ([], ())


def test_an_adapter_with_long_answers_is_divided(h100: Profile) -> None:
    """Where whole answers have a limit, an adapter of little load may break it alone by its long answers: it is split,
    which a search by load alone does not see."""
    adapters = [Adapter(f"a{i}", 8, 8.0, output_tokens=Lengths.constant(20)) for i in range(4)]
    adapters.append(Adapter("long", 8, 0.6, input_tokens=Lengths.constant(20), output_tokens=Lengths.constant(2000)))
    plan = packer.recommend(Workload(adapters), h100, slo="p95_e2e_ms=30000")
    assert plan.status is not Status.INFEASIBLE
    assert sum(4 in item.adapters for item in plan.bins) > 1


def test_adapters_with_long_answers_are_apart_whatever_their_prompts(h100: Profile) -> None:
    """Where whole answers have a limit, long ones break it alone: those with short answers keep it."""
    adapters = [
        Adapter(f"a{i}", 8, 0.3, Lengths.constant(20 + 10 * i), Lengths.constant((2000, 40)[i % 2])) for i in range(12)
    ]
    fleet = Workload(adapters).held_to("p95_e2e_ms=8000")
    _, late = others_kept(Frontier(fleet, h100), None)
    assert late == tuple(range(0, 12, 2))


@pytest.mark.usefixtures("whole_hours")
def test_a_goal_that_few_requests_keep_by_luck_takes_no_gpus(h100: Profile) -> None:
    """Adapters of equal lengths, which an idle server keeps beyond the goal, are served on one GPU: some of them kept
    the goal in an hour of few requests alone, so that the plan had 73 GPUs."""
    rates = np.random.default_rng(0).lognormal(0.0, 0.5, 400)
    adapters = [Adapter(f"a{i}", (8, 16, 32)[i % 3], rate) for i, rate in enumerate((rates / rates.sum()).tolist())]
    fleet = Workload(adapters, Lengths.gamma(mean=300, cv=0.7), Lengths.gamma(mean=260, cv=0.7))
    plan = packer.recommend(fleet, h100, slo="p95_e2e_ms=8000")
    assert plan.n_gpus == 1
    assert plan.reasons[0].startswith("p95 latency 8 s cannot be met: an idle server needs 8.")
